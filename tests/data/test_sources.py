"""Rows from files, functions, lists and the Hub; a bad row is named by file, line and field."""

import json
from pathlib import Path

import pytest

from litgrpo import PromptData
from litgrpo.data.rendering import build_prompt_format
from litgrpo.data.rows import RowReader, columns_of
from litgrpo.data.sources import Source, read_rows
from litgrpo.rewards import correctness
from tests.support.raises import raises_for


def rows_for_tests(size: int = 2, start: int = 0):
    return [{"prompt": f"{number}?"} for number in range(start, start + size)]


def written(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def values(source):
    return [row.values for row in read_rows(source)]


def test_jsonl_rows_know_their_line_and_position(tmp_path):
    path = written(tmp_path / "a.jsonl", '{"q": "1+1?"}\n\n{"q": "2+2?"}\n')
    first, second = read_rows(path)
    assert (first.values, first.place, first.index) == ({"q": "1+1?"}, f"{path}, line 1", 0)
    assert (second.values, second.place, second.index) == ({"q": "2+2?"}, f"{path}, line 3", 1)


def test_a_line_separator_inside_a_json_string_ends_no_line(tmp_path):
    path = written(tmp_path / "a.jsonl", '{"q": "a\u2028b"}\r\n')
    assert values(path) == [{"q": "a\u2028b"}]


def test_every_format_gives_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"q": "a, b", "a": "1"}, {"q": 'say "x"\nnow', "a": "2"}]
    written(tmp_path / "r.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    written(tmp_path / "r.json", json.dumps(rows))
    written(tmp_path / "r.csv", '\ufeffq,a\n"a, b",1\n"say ""x""\nnow",2\n')
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    for ending in ("jsonl", "json", "csv", "parquet"):
        assert values(str(tmp_path / f"r.{ending}")) == rows


def test_each_line_of_a_text_file_is_a_prompt(tmp_path):
    path = written(tmp_path / "a.txt", "What is 3+4?\r\n\nAnd 5?\n")
    assert values(path) == [{"prompt": "What is 3+4?"}, {"prompt": "And 5?"}]


def test_lists_hold_texts_or_rows():
    assert values(["a", "b"]) == [{"prompt": "a"}, {"prompt": "b"}]
    assert values([{"q": "a"}]) == [{"q": "a"}]


def test_a_function_takes_arguments_from_its_path_and_from_kwargs():
    path = f"python:{__name__}.rows_for_tests"
    assert len(values(path)) == 2
    assert values(f"{path}?size=1&start=7") == [{"prompt": "7?"}]
    assert values(Source(path, kwargs={"size": 1, "start": 7})) == [{"prompt": "7?"}]


def test_a_limit_takes_the_same_random_rows_and_says_so(tmp_path, caplog):
    path = written(tmp_path / "a.txt", "".join(f"{n}\n" for n in range(100)))
    with caplog.at_level("INFO"):
        few = [row.values["prompt"] for row in read_rows(Source(path, limit=20))]
    assert "20 of 100 rows, chosen at random, the same ones in every run" in caplog.text
    assert few == sorted(few, key=int) != [str(n) for n in range(20)]
    assert values(Source(path, limit=20)) == [{"prompt": text} for text in few]
    more = [row.values["prompt"] for row in read_rows(Source(path, limit=40))]
    assert set(few) < set(more)
    assert len(read_rows(Source(path, limit=1000))) == 100


def test_files_of_a_pattern_and_sets_are_read_one_after_the_other(tmp_path):
    a, b = written(tmp_path / "a.txt", "a\n"), written(tmp_path / "b.txt", "b\nc\n")
    assert values(f"{tmp_path}/*.txt") == [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]
    rows = read_rows({"one": a, "two": Source(b)})
    assert [(row.index, row.values["task"]) for row in rows] == [(0, "one"), (1, "two"), (2, "two")]
    assert rows[2].place == rows[-1].place == f"{b}, line 2"
    assert [row.index for row in rows.select([0, 2])] == [0, 2]
    assert rows.select([1, 2]).set_names == ["two", "two"]


@pytest.mark.parametrize(
    "given",
    [
        ["a.txt", "b.txt"],
        ["Write a story.", "python:package.rows"],
        [Source("a.txt"), "b.txt"],
        [Path("a.jsonl")],
        [{"prompt": "a"}, Source("a.txt")],
    ],
)
def test_a_list_of_sources_is_refused_with_the_names_that_it_lacks(given):
    for read in (read_rows, lambda given: PromptData(given).reader.read(given)):
        with raises_for("a list of rows", "is a source", "{sums: a.jsonl, letters: b.jsonl}"):
            read(given)
    assert values([{"prompt": "a.txt"}, "What is in a.txt?"])[0] == {"prompt": "a.txt"}


def test_sets_have_names(tmp_path):
    path = written(tmp_path / "b.txt", "b\nc\n")
    data = PromptData(val={"easy": ["What is in a.txt?"], "hard": {"path": path}})
    rows = read_rows(data.sources["val"])
    assert [(r.set_name, r.index) for r in rows] == [("easy", 0), ("hard", 1), ("hard", 2)]


def test_a_data_set_of_the_library_datasets_is_a_source(tmp_path):
    import datasets

    datasets.disable_progress_bars()
    rows = [{"q": "a"}, {"q": "b"}]
    given = datasets.Dataset.from_list(rows)
    assert values(given) == values(given.to_iterable_dataset()) == rows
    given.save_to_disk(tmp_path / "one")
    splits = datasets.DatasetDict({"train": given, "test": datasets.Dataset.from_list(rows[:1])})
    splits.save_to_disk(tmp_path / "splits")
    assert values(f"{tmp_path}/one") == values(f"{tmp_path}/splits") == rows
    assert values(f"{tmp_path}/splits:test") == rows[:1]
    with pytest.raises(ValueError, match="has no split 'val'; it has: train, test"):
        read_rows(f"{tmp_path}/splits:val")
    assert [row.set_name for row in read_rows(splits)] == ["train", "train", "test"]


def test_an_escaped_pair_of_surrogates_is_a_character(tmp_path):
    assert values(str(written(tmp_path / "a.jsonl", '{"q": "\\ud83d\\ude00"}\n'))) == [
        {"q": "\U0001f600"}
    ]


def test_a_folder_of_a_data_set_is_read_by_the_hub_library(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    (tmp_path / "set").mkdir()
    written(tmp_path / "set" / "train.jsonl", '{"q": "a"}\n')
    written(tmp_path / "set" / "test.jsonl", '{"q": "b"}\n')
    assert values(str(tmp_path / "set")) == [{"q": "a"}]
    assert values(f"{tmp_path}/set:default:test") == [{"q": "b"}]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"q": 1}\n{"q": \n', r"a\.jsonl, line 2: not JSON: Expecting value"),
        ("a.jsonl", '{"q": 1}\n[1]\n', r"a\.jsonl, line 2: is a list, expected an object"),
        ("a.jsonl", b'{"q": 1}\n{"q": "\xe9"}\n', r"a\.jsonl, line 2: not UTF-8"),
        (
            "a.jsonl",
            '{"q": 1}\n{"q": "\\ud83d"}\n',
            "line 2",
        ),
        ("a.jsonl", "", r"a\.jsonl holds no rows"),
        ("a.jsonl", "\n\n", r"a\.jsonl holds no rows"),
        ("a.json", "", r"a\.json holds no rows"),
        ("a.json", '[{"q": 1},\n{"q"}]', r"a\.json: not JSON: .* at line 2, column 5"),
        ("a.json", '{"q": 1}', r"a\.json: is a dict, expected a list"),
        ("a.csv", "q,a\n1,2\n1\n", r"a\.csv, line 3: has 1 fields, the header 2"),
        ("a.csv", 'q,a\n"1,2\n', r"a\.csv, line 2: not CSV"),
        ("a.csv", b"q\n\xff\n", r"a\.csv, line 2: not UTF-8"),
        ("a.csv", "", r"a\.csv holds no rows"),
        ("a.csv", "q,a\n", r"a\.csv holds no rows"),
        ("a.txt", "", r"a\.txt holds no rows"),
        ("a.parquet", "no", r"a\.parquet: not Parquet"),
        ("a.yaml", "no", r"a\.yaml: cannot read \.yaml; files end in \.jsonl"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, name, text, said):
    path = written(tmp_path / name, text)
    with pytest.raises(ValueError, match=said):
        read_rows(path)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere/a.jsonl", r"nowhere/a\.jsonl: no such file"),
        ([], "the given list holds no rows"),
        (["a", 3], "the given list, row 2: is an int"),
        ("python:nowhere.rows", "No module named 'nowhere'"),
        ("python:json.nothing", "has no 'nothing'"),
        ("nowhere/*.jsonl", "no file fits this pattern"),
        (3, r"3 .an int"),
        (list, "a type. is not a source"),
        (["a", "b\ud800"], r"row 2: contains '\\ud800', one half of a surrogate pair"),
        ([{"prompt": "a", "tags": [{"x": "\udfff"}]}], r"row 1: contains '\\udfff'"),
        ("python:rows", "write python:package.module.function"),
        (f"python:{__name__}.rows_for_tests?sise=1", r"unexpected .* 'sise'; signature: \(size"),
    ],
)
def test_a_bad_source_is_named(source, said):
    with pytest.raises(ValueError, match=said):
        read_rows(source)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ({"path": "a.txt", "limt": 3}, r"no key 'limt' \(did you mean 'limit'\?\)"),
        ({"easy": {"path": "a.txt", "limt": 3}}, r"no key 'limt' \(did you mean 'limit'\?\)"),
        ({"a/b": "a.txt"}, "'a/b' cannot name a set"),
        ({}, "the sets are {}"),
    ],
)
def test_a_mapping_that_names_no_source_is_an_error(sets, said):
    with pytest.raises(ValueError, match=said):
        PromptData(val=sets)


def test_an_unknown_name_says_what_a_source_can_be(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"no/such-set"):
        read_rows("no/such-set")


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="limit"):
        Source("a.txt", limit=0)
    with pytest.raises(ValueError, match="kwargs are for"):
        Source("a.txt", kwargs={"size": 1})


def test_a_column_that_occurs_twice_in_a_csv_file_is_an_error(tmp_path):
    path = written(tmp_path / "a.csv", "q,a,q\n1,2,3\n")
    with pytest.raises(ValueError, match=r"a\.csv, line 1: the column 'q' occurs twice"):
        read_rows(path)


def test_empty_cells_are_named_when_the_data_are_read(tmp_path):
    path = written(tmp_path / "a.csv", "prompt,gold,hint\na,1,\nb,,\nc, ,x\n")
    reader = RowReader({"answer": "gold"}, {}, 0.0, "drop")
    said = r"2 of 3 rows have an empty 'answer' \(the first: .*a\.csv, line 3\)"
    with pytest.warns(UserWarning, match=said) as warned:
        reader.read(path)
    assert len(warned) == 1  # a column that no option names may be empty


@pytest.mark.parametrize("empty", ["", " \n", None, float("nan"), [], ["", None], {}])
def test_each_kind_of_no_answer_is_counted_with_the_first_place(empty):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": empty}]
    for extract in ({}, {"answer": "(.+)"}):
        reader = RowReader({}, extract, 0.0, "drop")
        with pytest.warns(UserWarning, match=r"1 of 2 rows have an empty 'answer' .* row 2"):
            read = reader.read(rows)
        # Rewards leave the same rows out.
        scores = correctness(["?"] * 2, ["<answer>1</answer>"] * 2, columns_of(read)["answer"])
        assert scores == [1.0, None]


def test_a_row_that_lacks_the_column_of_the_others_has_no_answer():
    reader = RowReader({}, {}, 0.0, "drop")
    with pytest.warns(UserWarning, match=r"1 of 2 rows have an empty 'answer' .* row 2"):
        reader.read([{"prompt": "a", "answer": 0}, {"prompt": "b"}])


def test_a_task_without_answers_is_no_gap_in_those_of_another():
    reader = RowReader({}, {}, 0.0, "drop")
    read = reader.read({"sums": [{"prompt": "a", "answer": False}], "letters": ["b", "c"]})
    assert columns_of(read)["answer"] == [False, None, None]
    assert reader.read([{"prompt": "a", "answer": None}, {"prompt": "b"}])


@pytest.mark.parametrize("template", [None, "Q: {{ prompt }}", "{{ prompt | upper }} {{ x }}"])
@pytest.mark.parametrize("chat", [False, True])
def test_an_empty_prompt_is_an_error_with_and_without_a_template(tmp_path, template, chat):
    path = written(tmp_path / "a.csv", "prompt,x\na,b\n  ,c\n")
    texts = build_prompt_format(template, chat).plain_texts(read_rows(path))
    with pytest.raises(ValueError, match=r"a\.csv, line 3: the prompt is empty"):
        list(texts)


def test_a_template_may_leave_an_empty_prompt_out(tmp_path):
    path = written(tmp_path / "a.csv", "prompt,x\n,b\n")
    texts = build_prompt_format("{{ x }}", False).plain_texts(read_rows(path))
    assert list(texts) == ["b"]


def test_a_folder_with_a_script_is_one_sentence_and_the_script_does_not_run(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    ran = tmp_path / "ran"
    folder = tmp_path / "mine"
    folder.mkdir()
    written(folder / "mine.py", f"open({str(ran)!r}, 'w')\n")
    with pytest.raises(ValueError, match="mine: could not be loaded from the Hub") as found:
        read_rows(str(folder))
    assert len(str(found.value).splitlines()) == 1
    assert not ran.exists()
