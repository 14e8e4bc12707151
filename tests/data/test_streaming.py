import json
from dataclasses import replace

import datasets
import pytest

from litgrpo.data import files, prompts
from litgrpo.data.files import LINE_PARSERS, LineFile
from litgrpo.data.modules import PromptData
from litgrpo.data.sources import Source, is_streaming, open_rows, read_rows
from tests.support.models import byte_tokenizer

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]


def set_up(data):
    data.find_tokenizer = lambda texts: byte_tokenizer()
    data.setup("fit")
    return data


def batches_of(data):
    return [*data.train_dataloader()]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def stream_data(path, **settings):
    given = {"batch_size": 4, "max_prompt_length": 16} | settings
    limit = given.pop("limit", None)
    return PromptData(Source(str(path), limit=limit, streaming=True), **given)


def seen(data):
    return [(batch.prompts, batch.columns, batch.index.tolist()) for batch in batches_of(data)]


HINT = {"reference_template": "{{ prompt }} {{ answer }}", "max_prompt_length": 16}


@pytest.mark.parametrize("settings", [{}, {"shuffle": False}, {"seed": 5}, {"limit": 11}, HINT])
def test_batches_are_those_of_the_same_rows_in_memory(file, settings):
    lazy = set_up(stream_data(file, **settings))
    limit = settings.pop("limit", None)
    held = Source(str(file), limit=limit)
    eager = set_up(PromptData(held, **{"batch_size": 4, "max_prompt_length": 16} | settings))
    assert seen(lazy) == seen(eager)
    assert lazy.train_dataloader().identity["num_prompts"] == len(eager.sets["train"])


@pytest.mark.parametrize("kind", ["parquet", "saved", "txt"])
def test_files_that_can_be_read_by_row_give_the_same_batches(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows, path = datasets.Dataset.from_list(ROWS), tmp_path / f"rows.{kind}"
    write = {
        "parquet": lambda: rows.to_parquet(path),
        "saved": lambda: rows.save_to_disk(path),
        "txt": lambda: path.write_text("\n".join(row["prompt"] for row in ROWS)),
    }
    write[kind]()
    eager = set_up(PromptData(str(path), batch_size=4, max_prompt_length=16))
    assert seen(set_up(stream_data(path))) == seen(eager)


def test_only_the_rows_of_a_batch_are_read(file, monkeypatch):
    read_by = []
    get = LineFile.__getitem__
    monkeypatch.setattr(
        LineFile, "__getitem__", lambda self, n: (read_by.append(n), get(self, n))[1]
    )
    monkeypatch.setattr(prompts, "NUM_PREVIEWED", 3)
    loader = set_up(stream_data(file)).train_dataloader()
    assert len(read_by) == 3
    next(iter(loader))
    assert len(read_by) == 3 + 4


def test_a_resumed_run_goes_on_with_the_next_batch_and_changed_data_are_refused(file):
    loader = set_up(stream_data(file)).train_dataloader()
    all_of_them = [batch.prompts for batch in loader]
    going = iter(loader)
    for _ in range(3):
        next(going)
    state = loader.state_dict()
    resumed = set_up(stream_data(file)).train_dataloader()
    resumed.load_state_dict(state)
    assert [batch.prompts for batch in resumed] == all_of_them[3:]
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[::-1]))
    with pytest.raises(ValueError, match="the checkpoint was made with data prompts="):
        set_up(stream_data(file)).train_dataloader().load_state_dict(state)


def test_processes_share_each_batch(file):
    def of(rank, processes):
        data = stream_data(file)
        kind = type(data)
        data.__class__ = type("Apart", (kind,), {"process": (rank, processes)})
        return [prompt for batch in batches_of(set_up(data)) for prompt in batch.prompts]

    alone, first, second = of(0, 1), of(0, 2), of(1, 2)
    assert sorted(first + second) == sorted(alone)
    assert not set(first) & set(second)


def test_a_row_that_is_left_out_gives_its_place_to_the_next(file, monkeypatch):
    monkeypatch.setattr(prompts, "NUM_PREVIEWED", 1)
    long = {"prompt": "x" * 50, "answer": "0"}
    file.write_text("".join(json.dumps(row) + "\n" for row in [ROWS[0], long, *ROWS[1:]]))
    held = [ROWS[4]]
    data = set_up(stream_data(file, val=held, shuffle=False))
    batches = batches_of(data)
    assert all(len(batch.prompts) == 4 for batch in batches)
    asked = [prompt for batch in batches for prompt in batch.prompts]
    assert asked[:6] == ["0+1=", "1+1=", "1+1=", "2+1=", "3+1=", "5+1="]
    assert [i for batch in batches for i in batch.index.tolist()] == [*range(40)]
    assert "4+1=" not in asked
    assert [batch.prompts for batch in data.val_dataloader()] == [["4+1="]]
    with pytest.raises(ValueError, match=r"line 2: has 5\d tokens, more than max_prompt_length=16"):
        set_up(stream_data(file, long_prompts="error", shuffle=False)).sets["train"][[1]]
    kept = set_up(stream_data(file, train_val_overlap="keep", val=held))
    assert "4+1=" in kept.sets["train"][[5]].prompts
    refused = set_up(stream_data(file, train_val_overlap="error", val=held))
    with pytest.raises(ValueError, match="line 6: this training prompt is in the validation set"):
        refused.sets["train"][[5]]


def test_a_bad_row_is_named_when_it_is_read(file):
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([*lines[:2], b"{broken", b"\xff", b'{"question": 1}', *lines[2:]]))
    rows = LineFile(file, LINE_PARSERS[".jsonl"])
    for number, said in [(2, "line 3: not JSON"), (3, "line 4: not UTF-8")]:
        with pytest.raises(ValueError, match=said):
            rows[number]
    with pytest.raises(ValueError, match="line 3: not JSON"):
        set_up(stream_data(file))


@pytest.mark.parametrize(
    "text", ["", "\n", "a", "a\n", "a\nb", "\n\na\n\nb\n", "\ufeffa\nb\u2028c\n", "a\r\nb\r\n"]
)
@pytest.mark.parametrize("chunk", [1, 2, 1 << 24])
def test_lines_are_those_of_the_file_in_memory(text, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", chunk)
    path = tmp_path / "rows.txt"
    path.write_bytes(text.encode())
    lines = LineFile(path, LINE_PARSERS[".txt"])
    found = [lines[row] for row in range(len(lines))]
    if not text.strip():
        assert not found
    else:
        assert found == [(row.values, row.place) for row in read_rows(str(path))]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"val_fraction": 0.1}, "val_fraction would read all rows of `train`"),
        ({"val": Source("rows.jsonl", streaming=True)}, "streaming"),
        ({"train": Source("rows.csv", streaming=True)}, "rows.csv"),
        ({"train": Source("python:a.b", streaming=True)}, "python:a.b"),
        ({"train": Source("none.jsonl", streaming=True)}, "none.jsonl: no such file"),
        ({"train": Source("rows.jsonl", weight=1.0, streaming=True)}, "weight and streaming"),
    ],
)
def test_what_cannot_be_streamed_is_refused(settings, said, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    given = {"train": Source("rows.jsonl", streaming=True), "batch_size": 4} | settings
    with pytest.raises(ValueError, match=said):
        set_up(PromptData(**given))


def test_several_files_are_read_one_after_the_other(file, tmp_path):
    (tmp_path / "more.jsonl").write_text('{"prompt": "last", "answer": "1"}')
    both = [Source(str(file), limit=3, streaming=True), str(tmp_path / "more.jsonl")]
    assert is_streaming(both)
    assert len(open_rows(both)) == 3 + 1
    pattern = Source(str(tmp_path / "*.jsonl"), limit=7, streaming=True)
    assert len(open_rows(pattern)) == 7  # of all files together
    assert len(open_rows(replace(pattern, limit=99))) == 41
    data = set_up(PromptData(both, batch_size=2, shuffle=False))
    assert batches_of(data)[-1].prompts[-1] == "last"


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": "a"}\n\n \t\r\n{"prompt": "b"}\r\n\r\n',
        '\ufeff\n{"prompt": "a"}\n\x0b\n{"prompt": "b"}',
        '\ufeff{"prompt": "a"}\n  {"prompt": "b"}  \n',
        '{"prompt": "a\\u2028"}\n{"prompt": "b\u2028c"}\n',
    ],
)
@pytest.mark.parametrize("chunk", [1 << 24, 4])
def test_a_file_gives_the_same_rows_in_memory_and_streamed(tmp_path, monkeypatch, text, chunk):
    monkeypatch.setattr("litgrpo.data.files.CHUNK_BYTES", chunk)
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.encode())
    rows = open_rows(Source(str(path), streaming=True))
    found = [rows[number] for number in range(len(rows))]
    assert found == [(row.values, row.place) for row in read_rows(str(path))]
    assert len(found) == 2


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("a.jsonl", '{"prompt": "a", "prompt": "b"}'),
        ("a.jsonl", '{"prompt": "a", "meta": {"x": 1, "x": 2}}'),
        ("a.jsonl", '{"prompt": "a", "score": NaN}'),
        ("a.jsonl", '{"prompt": "a", "score": -Infinity}'),
        ("a.jsonl", '{"prompt": "a", "number": ' + "7" * 200_000 + "}"),
        ("a.jsonl", '{"prompt": ' + "[" * 100_000),
        ("a.jsonl", '{"prompt": ' + "[" * 500 + "]" * 500 + "}"),
        ("a.jsonl", '{"prompt": ' + '{"a":' * 150 + "1" + "}" * 151),
        ("a.jsonl", '{"prompt": "a"}\0'),
        ("a.jsonl", '["a"]'),
        ("a.jsonl", '"a"'),
        ("a.txt", "w\0h\0y\0"),
    ],
)
def test_what_is_no_json_is_one_sentence_with_the_line_in_memory_and_streamed(tmp_path, name, line):
    path = tmp_path / name
    first = '{"prompt": "x"}' if name.endswith("jsonl") else "x"
    path.write_text(f"{first}\n{line}\n")
    errors = []
    with pytest.raises(ValueError, match=f"{name}, line 2: ") as found:
        read_rows(str(path))
    errors.append(str(found.value))
    rows = open_rows(Source(str(path), streaming=True))
    with pytest.raises(ValueError, match=f"{name}, line 2: ") as found:
        rows[1]
    errors.append(str(found.value))
    assert all(len(error.splitlines()) == 1 and len(error) < 500 for error in errors)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_file_that_changes_during_a_streaming_run_is_named(tmp_path, name):
    lines = [f'{{"prompt": "{n}"}}\n' for n in range(30)]
    path = tmp_path / name
    path.write_text("".join(lines))
    rows = open_rows(Source(str(path), streaming=True))
    assert rows[29][0]["prompt"].strip('{}"promt: \n') == "29"
    damaged = {
        "truncated": "".join(lines)[: len("".join(lines)) // 2],
        "shifted": "x" + "".join(lines),
        "one line": "x" * 2000,
        "empty": "",
    }
    for text in damaged.values():
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"{name}, line 29: the file changed during the run"):
            rows[28]
    path.unlink()
    with pytest.raises(ValueError, match=rf"{name}, line 29: could not be read again: .*No such"):
        rows[28]
    path.write_text("".join(lines) + "more\n")  # a log that grows has the same lines
    assert rows[28][1] == f"{path}, line 29"
