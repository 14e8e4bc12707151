"""Rows that exist in Python: lists, tables, dictionaries of columns, generators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from io import IOBase
from pathlib import Path
from typing import Any

import numpy as np

from litgrpo.arguments import require, type_with_article
from litgrpo.data.messages import without_nulls

ACCEPTED = (
    "give a path, a list of rows or texts, a Dataset, a DataFrame, {column: values} or a generator"
)
# Iterables whose items are not rows, with the reason.
REJECTED: dict[type, str] = {
    bytes: "bytes are not text",
    bytearray: "bytes are not text",
    set: "it has no order; sort it into a list",
    frozenset: "it has no order; sort it into a list",
    IOBase: "give the path of the file",
}


def settle_source(given: Any, names: Iterable[str], *, is_train: bool = False) -> Any:
    """Return a source that can be read several times: once for each stage of a run.

    Paths become texts, generators and tuples lists, and a dictionary of columns a list of rows.
    """
    # `names` are columns by which a dictionary of columns differs from named sets.
    if isinstance(given, Path):
        return str(given)
    if isinstance(given, Mapping):
        return _settle_mapping(given, {*names}, is_train)
    if isinstance(given, Iterator) and not isinstance(given, IOBase):
        given = list(given)  # it can be read once only
    return list(given) if isinstance(given, tuple) else given


def _settle_mapping(given: Mapping[str, Any], names: set[str], is_train: bool) -> Any:
    if {"path", "class_path"} & given.keys() and not _are_columns(given):
        return given
    kind, listed = type_with_article(given), ", ".join(map(str, given))
    if is_train and kind.endswith("DatasetDict"):
        first = next(iter(given), "train")
        raise ValueError(f"train is {kind} with splits {listed}; give one: dataset[{first!r}]")
    if _are_columns(given) and names & given.keys():
        return rows_of_columns(given)
    one_row = names & given.keys() and all(isinstance(value, str) for value in given.values())
    require(
        not (is_train and one_row),
        f"train is one row with fields {listed}; give a list of rows: [{{...}}, {{...}}]",
    )
    return {name: settle_source(each, names) for name, each in given.items()}


def _are_columns(given: Mapping[str, Any]) -> bool:
    return bool(given) and all(
        isinstance(values, list | tuple | np.ndarray) or is_table(values)
        for values in given.values()
    )


def rows_of_columns(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of {column: values}."""
    for name, values in given.items():
        require(
            isinstance(values, Sized) and not isinstance(values, str | Mapping),
            f"column {name!r} is {values!r:.60}, expected a list of values",
        )
    lengths = {str(name): len(values) for name, values in given.items()}
    listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
    require(
        len(set(lengths.values())) == 1, f"the columns have unequal numbers of values: {listed}"
    )
    return [dict(zip(lengths, row, strict=True)) for row in zip(*given.values(), strict=True)]


def is_table(given: Any) -> bool:
    """True for tables and columns of pandas, Polars, Arrow and `datasets`."""
    library = type(given).__module__.partition(".")[0]
    return library in READERS and not isinstance(given, Mapping | tuple | type)


def read_object(given: Any) -> list[Any]:
    """Return the rows of an object: mappings or texts."""
    kind = type_with_article(given)
    why = next((why for type_, why in REJECTED.items() if isinstance(given, type_)), "")
    require(not why, f"{given!r:.60} ({kind}) is not a source: {why}")
    if isinstance(given, Mapping):
        rows: Iterable[Any] = rows_of_columns(given)
    elif is_table(given):
        library = type(given).__module__.partition(".")[0]
        rows = map(without_nulls_in_row, READERS[library](given))
    elif isinstance(given, np.ndarray):
        rows = given.tolist()
    elif isinstance(given, Iterable):
        rows = given
    else:  # a `torch.utils.data.Dataset` need not be iterable
        has_rows = hasattr(given, "__getitem__") and hasattr(given, "__len__")
        known = has_rows and not isinstance(given, type)
        called = "; call it, or name it as `python:module.function`" if callable(given) else ""
        require(known, f"{given!r:.60} ({kind}) is not a source: {ACCEPTED}{called}")
        rows = (given[number] for number in range(len(given)))
    return [_plain(row) for row in rows]


def without_nulls_in_row(row: Any) -> Any:
    """Return a row of a table whose messages are without fields that are null."""
    if not isinstance(row, Mapping):
        return row
    return {name: without_nulls(_plain(value)) for name, value in row.items()}


def _plain(value: Any) -> Any:
    """Return arrays and numbers of numpy as lists and numbers, at any depth."""
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist()) if isinstance(value, np.ndarray) else value.item()
    if type(value) is dict:
        return {name: _plain(one) for name, one in value.items()}
    if type(value) is list:
        return [_plain(one) for one in value]
    return value


def _read_pandas(given: Any) -> Iterable[Any]:
    missing = sys.modules["pandas"].isna
    if not hasattr(given, "columns"):  # a Series
        return [None if missing(value) is True else value for value in given]
    names = [str(name) for name in given.columns]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, f"the DataFrame has two columns {twice!r}; rename one of them")
    # `itertuples` keeps the type of each column; missing values of any type become None.
    return [
        {
            name: None if missing(value) is True else value
            for name, value in zip(names, row, strict=True)
        }
        for row in given.itertuples(index=False, name=None)
    ]


def _read_polars(given: Any) -> Iterable[Any]:
    if hasattr(given, "collect"):  # a LazyFrame
        given = given.collect()
    return list(given.to_dicts() if hasattr(given, "to_dicts") else given.to_list())


def _read_arrow(given: Any) -> Iterable[Any]:
    return list(given.to_pylist())


READERS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "pandas": _read_pandas,
    "polars": _read_polars,
    "pyarrow": _read_arrow,
    "datasets": iter,
}
