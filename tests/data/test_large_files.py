"""Rows that stay on disk: the same batches as in memory, one line at a time, changes are found."""

import json

import datasets
import pytest

from litgrpo.data import files, prompts, sources
from litgrpo.data.files import LineFile, parse_text_line
from litgrpo.data.modules import PairData, PromptData
from litgrpo.data.sources import Source, read_rows
from tests.support.models import byte_tokenizer

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
SETTINGS = {"batch_size": 4, "max_prompt_length": 16}


def set_up(data):
    data.find_tokenizer = lambda texts: byte_tokenizer()
    data.setup("fit")
    return data


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def on_disk(monkeypatch, tmp_path):
    """Read every file on access, and keep every twentieth prompt in memory."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()

    def switch():
        monkeypatch.setattr(files, "IN_MEMORY_BYTES", 0)
        monkeypatch.setattr(prompts, "MAX_KEPT", 2)
        monkeypatch.setattr(sources, "CHUNK", 7)

    return switch


def seen(data):
    return [
        (batch.prompts, batch.prompt_ids.tolist(), batch.columns, batch.index.tolist())
        for batch in data.train_dataloader()
    ]


HINT = {"reference_template": "{{ prompt }} {{ answer }}"}
TALK = {"template": "{{ prompt }} {{ answer }}", "max_prompt_length": 20}


@pytest.mark.parametrize(
    "settings",
    [{}, {"shuffle": False}, {"seed": 5}, HINT, TALK, {"val_fraction": 0.2}, {"val": [ROWS[3]]}],
)
@pytest.mark.parametrize("limit", [None, 23])
def test_batches_are_those_of_the_same_rows_in_memory(file, on_disk, settings, limit, recwarn):
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines, json.dumps({"prompt": "x" * 400, "answer": "0"}) + "\n"]))
    source = Source(str(file), limit=limit)
    in_memory = set_up(PromptData(source, **SETTINGS | settings))
    on_disk()
    from_disk = set_up(PromptData(source, **SETTINGS | settings))
    assert seen(from_disk) == seen(in_memory)
    assert len(from_disk.sets["train"].texts) <= 2 < len(in_memory.sets["train"].texts)
    identities = [data.train_dataloader().identity for data in (from_disk, in_memory)]
    assert identities[0] == identities[1]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved", "txt"])
def test_each_kind_of_file_gives_the_same_batches_with_weights(kind, tmp_path, on_disk):
    rows = datasets.Dataset.from_list(ROWS)
    write = {
        "jsonl": lambda: rows.to_json(path),
        "parquet": lambda: rows.to_parquet(path),
        "saved": lambda: rows.save_to_disk(path),
        "txt": lambda: path.write_text("\n".join(row["prompt"] for row in ROWS)),
    }
    path = tmp_path / f"rows.{kind}"
    write[kind]()
    sources = {"files": Source(str(path)), "others": [{"prompt": f"{n}?"} for n in range(9)]}
    weights = {"task_weights": {"files": 2, "others": 1}}
    in_memory = set_up(PromptData(sources, **SETTINGS, **weights))
    on_disk()
    assert seen(set_up(PromptData(sources, **SETTINGS, **weights))) == seen(in_memory)


def test_pairs_are_those_of_the_same_rows_in_memory(file, on_disk):
    def batches(data):
        return [batch.input_ids.tolist() for batch in set_up(data).train_dataloader()]

    options = {"columns": {"completion": "answer"}, "val_fraction": 0.2, "batch_size": 3}
    in_memory = batches(PairData(str(file), **options))
    on_disk()
    assert batches(PairData(str(file), **options)) == in_memory


def test_a_batch_reads_its_own_rows_only(file, on_disk, monkeypatch):
    on_disk()
    loader = set_up(PromptData(str(file), **SETTINGS)).train_dataloader()
    read, get = [], LineFile.__getitem__
    monkeypatch.setattr(LineFile, "__getitem__", lambda self, n: (read.append(n), get(self, n))[1])
    batch = next(iter(loader))
    assert sorted(read) == sorted(set(batch.index.tolist()) - loader.dataset.in_memory.keys())


def test_a_resumed_run_goes_on_with_the_next_batch_and_changed_data_are_refused(file, on_disk):
    on_disk()
    loader = set_up(PromptData(str(file), **SETTINGS)).train_dataloader()
    all_of_them = [batch.prompts for batch in loader]
    going = iter(loader)
    for _ in range(3):
        next(going)
    state = loader.state_dict()
    resumed = set_up(PromptData(str(file), **SETTINGS)).train_dataloader()
    resumed.load_state_dict(state)
    assert [batch.prompts for batch in resumed] == all_of_them[3:]
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:20], lines[21], lines[20], *lines[22:]]))
    with pytest.raises(ValueError, match="the checkpoint was made with data prompts="):
        set_up(PromptData(str(file), **SETTINGS)).train_dataloader().load_state_dict(state)


def test_a_bad_row_is_named_before_training(file, on_disk):
    on_disk()
    lines = file.read_bytes().split(b"\n")
    for bad, said in [
        (b"{broken", "line 30: not JSON"),
        (b"\xff", "line 30: not UTF-8"),
        (b'{"question": 1}', "line 30: no field 'prompt'"),
    ]:
        file.write_bytes(b"\n".join([*lines[:29], bad, *lines[29:]]))
        with pytest.raises(ValueError, match=said):
            set_up(PromptData(str(file), **SETTINGS))


@pytest.mark.parametrize(
    "text",
    ["a", "a\n", "a\nb", "\n\na\n\nb\n", "\ufeffa\nb\u2028c\n", "a\r\nb\r\n"],
)
@pytest.mark.parametrize("chunk", [1, 2, 1 << 24])
def test_lines_are_found_in_any_chunks(text, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", chunk)
    path = tmp_path / "rows.txt"
    path.write_bytes(text.encode())
    lines = enumerate(text.removeprefix("\ufeff").split("\n"), start=1)
    expected = [
        ({"prompt": line.removesuffix("\r")}, f"{path}, line {n}")
        for n, line in lines
        if line.strip()
    ]
    found = LineFile(path, parse_text_line)
    assert [*found] == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": "a"}\n\n \t\r\n{"prompt": "b"}\r\n\r\n',
        '\ufeff\n{"prompt": "a"}\n\x0b\n{"prompt": "b"}',
        '\ufeff{"prompt": "a"}\n  {"prompt": "b"}  \n',
        '{"prompt": "a"}\n{"prompt": "b"}',
    ],
)
def test_blank_lines_are_no_rows(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.encode())
    assert [row.values["prompt"] for row in read_rows(str(path))] == ["a", "b"]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a", "prompt": "b"}',
        '{"prompt": "a", "meta": {"x": 1, "x": 2}}',
        '{"prompt": "a", "score": NaN}',
        '{"prompt": "a", "score": -Infinity}',
        '{"prompt": "a", "number": ' + "7" * 200_000 + "}",
        '{"prompt": ' + "[" * 100_000,
        '["a"]',
    ],
)
def test_what_is_no_json_is_one_sentence_with_the_line(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "x"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: ") as caught:
        read_rows(str(path))
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500


def test_integers_beyond_64_bits_stay_exact(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "n": 123456789012345678901234567890}\n')
    assert read_rows(str(path))[0].values["n"] == 123456789012345678901234567890


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_file_that_changes_during_a_run_is_named(tmp_path, on_disk, name):
    on_disk()
    lines = [f'{{"prompt": "{n}"}}\n' for n in range(30)]
    path = tmp_path / name
    path.write_text("".join(lines))
    rows = read_rows(str(path))
    assert rows[29].values["prompt"].strip('{}"promt: \n') == "29"
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
    path.write_text("".join(lines) + "more\n")  # a log that grows has the same lines
    path.unlink()  # an open file can be read
    assert rows[28].place == f"{path}, line 29"
