"""Sources in Python: every natural object gives its rows, any other one is rejected by name."""

from collections import UserDict, namedtuple

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from litgrpo import PairData, PromptData
from litgrpo.data.sources import Source, read_rows
from tests.support.raises import raises_for

ROWS = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?", "answer": "4"}]
COLUMNS = {"prompt": ["1+1?", "2+2?"], "answer": ["2", "4"]}
Row = namedtuple("Row", ["prompt", "answer"])


class MapStyle(torch.utils.data.Dataset):
    """A data set of torch, which has no `__iter__`."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, number):
        return ROWS[range(len(ROWS))[number]]


class Rows:
    """An iterable that can be read several times."""

    def __iter__(self):
        return iter(ROWS)


def generate():
    yield from ROWS


NATURAL = {
    "list": lambda: ROWS,
    "tuple": lambda: tuple(ROWS),
    "DataFrame": lambda: pd.DataFrame(ROWS),
    "DataFrame with another index": lambda: pd.DataFrame(ROWS, index=[7, 9]),
    "Dataset": lambda: datasets.Dataset.from_list(ROWS),
    "IterableDataset": lambda: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "arrow table": lambda: pa.Table.from_pylist(ROWS),
    "columns": lambda: COLUMNS,
    "columns of arrays": lambda: {name: np.array(each) for name, each in COLUMNS.items()},
    "columns of Series": lambda: {name: pd.Series(each) for name, each in COLUMNS.items()},
    "generator": generate,
    "iterator": lambda: iter(ROWS),
    "map": lambda: map(dict, ROWS),
    "torch data set": MapStyle,
    "an iterable of one's own": Rows,
    "mappings": lambda: [UserDict(row) for row in ROWS],
    "named tuples": lambda: [Row(**row) for row in ROWS],
    "itertuples": lambda: pd.DataFrame(ROWS).itertuples(index=False),
    "object array": lambda: np.array(ROWS, dtype=object),
}


@pytest.fixture(autouse=True)
def _no_bars():
    datasets.disable_progress_bars()


def rows_of(given, role="train", **options):
    data = PromptData(**{role: given}, batch_size=1, **options)
    # Each stage of a run reads its source again.
    first, second = ([row.values for row in data.reader.read(data.sources[role])] for _ in "ab")
    assert first == second
    return first


@pytest.mark.parametrize("role", ["train", "val", "test", "predict"])
@pytest.mark.parametrize("kind", NATURAL)
def test_natural_objects_give_their_rows(kind, role):
    assert rows_of(NATURAL[kind](), role) == ROWS


def test_pairs_take_the_same_objects():
    data = PairData(pd.DataFrame({"prompt": ["a"], "completion": ["b"]}))
    assert read_rows(data.sources["train"])[0].values == {"prompt": "a", "completion": "b"}


def test_paths_are_files_alone_and_as_named_sets(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("1+1?\n")
    assert rows_of(path) == rows_of(Source(path)) == rows_of({"path": path}) == [{"prompt": "1+1?"}]
    data = PromptData(val={"easy": path, "hard": iter(["b"])})
    found = read_rows(data.sources["val"])
    assert [(row.set_name, row.values["prompt"]) for row in found] == [
        ("easy", "1+1?"),
        ("hard", "b"),
    ]


def test_texts_and_named_tables_are_sources():
    assert rows_of(pd.Series(["a", "b"])) == rows_of(np.array(["a", "b"])) == rows_of(iter("ab"))
    tables = {"one": pd.DataFrame(ROWS[:1]), "two": datasets.Dataset.from_list(ROWS[1:])}
    named = [{"task": name, **row} for name, row in zip(tables, ROWS, strict=True)]
    assert rows_of(tables) == named


def test_columns_are_known_by_their_names():
    given = {"q": ["1+1?", "2+2?"], "a": ["2", "4"]}
    asked = [{"q": "1+1?", "a": "2", "prompt": "1+1?"}, {"q": "2+2?", "a": "4", "prompt": "2+2?"}]
    assert rows_of(given, "val", columns={"prompt": "q"}) == asked
    assert rows_of(given, template="{{ q }}") == [{"q": "1+1?", "a": "2"}, {"q": "2+2?", "a": "4"}]
    named = PromptData(val={"easy": ["a"], "hard": ["b"]}).sources["val"]
    assert [row.set_name for row in read_rows(named)] == ["easy", "hard"]


def test_missing_values_and_types_of_a_frame_are_plain_python():
    frame = pd.DataFrame({"prompt": ["a", "b"], "n": [1, 2], "x": [0.5, None], "t": ["u", None]})
    frame["tags"] = [np.array(["p"]), np.array([])]
    found = rows_of(frame)
    assert found == [
        {"prompt": "a", "n": 1, "x": 0.5, "t": "u", "tags": ["p"]},
        {"prompt": "b", "n": 2, "x": None, "t": None, "tags": []},
    ]
    assert type(found[0]["n"]) is int


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        (b"1+1?", ("bytes", "not a source")),
        ({"1+1?"}, ("set", "no order")),
        (3, ("an int", "not a source", "give a path")),
        (generate, ("not a source", "call it")),
        ({"prompt": "1+1?", "answer": "2"}, ("train is one row", "list of rows")),
        ({"prompt": ["a"], "answer": ["1", "2"]}, ("unequal", "prompt 1, answer 2")),
        ([("1+1?", "2")], ("row 1", "is a tuple")),
        (zip("ab", "cd", strict=True), ("row 1", "is a tuple")),
        (pd.DataFrame([[1, 2]], columns=["prompt", "prompt"]), ("two columns", "prompt")),
        (iter([]), ("holds no rows",)),
        (pd.DataFrame({"prompt": []}), ("DataFrame", "holds no rows")),
        (torch.zeros(2), ("row 1",)),
    ],
)
def test_other_objects_are_rejected_by_name(given, keys):
    with raises_for(*keys):
        rows_of(given)


def test_an_open_file_is_no_source(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with path.open() as file, raises_for("not a source", "path of the file"):
        rows_of(file)


def test_the_splits_of_a_dictionary_are_named():
    given = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    )
    with raises_for("DatasetDict", "splits train, test", "dataset['train']"):
        PromptData(given)
    assert rows_of(given["train"]) == ROWS


def test_prompts_may_be_one_text():
    for text in ("What is 3+4?", "a.jsonl"):
        data = PromptData(prompts=text)
        assert [row.values for row in read_rows(data.sources["predict"])] == [{"prompt": text}]
