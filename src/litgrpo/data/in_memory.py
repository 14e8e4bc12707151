"""Rows that exist in Python: lists, tables, dictionaries of columns, generators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sized
from io import IOBase
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


def are_columns(value: Mapping[Any, Any]) -> bool:
    """True for a dictionary whose values are all lists, arrays or columns of a table."""
    return bool(value) and all(
        isinstance(values, list | tuple | np.ndarray) or is_table(values)
        for values in value.values()
    )


def rows_of_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of {column: values}."""
    for name, values in columns.items():
        require(
            isinstance(values, Sized) and not isinstance(values, str | Mapping),
            f"column {name!r} is {values!r:.60}, expected a list of values",
        )
    lengths = {str(name): len(values) for name, values in columns.items()}
    listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
    require(
        len(set(lengths.values())) == 1, f"the columns have unequal numbers of values: {listed}"
    )
    return [dict(zip(lengths, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def is_table(value: Any) -> bool:
    """True for tables and columns of pandas, Polars, Arrow and `datasets`."""
    return _library_of(value) in READERS and not isinstance(value, Mapping | tuple | type)


def _library_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def read_object(source: Any) -> list[Any]:
    """Return the rows of an object: mappings or texts."""
    kind = type_with_article(source)
    why = next((why for type_, why in REJECTED.items() if isinstance(source, type_)), "")
    require(not why, f"{source!r:.60} ({kind}) is not a source: {why}")
    if isinstance(source, Mapping):
        rows: Iterable[Any] = rows_of_columns(source)
    elif is_table(source):
        rows = map(without_nulls_in_row, READERS[_library_of(source)](source))
    elif isinstance(source, np.ndarray):
        rows = source.tolist()
    elif isinstance(source, Iterable):
        rows = source
    else:  # a `torch.utils.data.Dataset` need not be iterable
        has_rows = hasattr(source, "__getitem__") and hasattr(source, "__len__")
        is_source = has_rows and not isinstance(source, type)
        hint = "; call it, or name it as `python:module.function`" if callable(source) else ""
        require(is_source, f"{source!r:.60} ({kind}) is not a source: {ACCEPTED}{hint}")
        rows = (source[number] for number in range(len(source)))
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
        return {name: _plain(inner) for name, inner in value.items()}
    if type(value) is list:
        return [_plain(inner) for inner in value]
    return value


def _read_pandas(table: Any) -> Iterable[Any]:
    is_missing = sys.modules["pandas"].isna
    if not hasattr(table, "columns"):  # a Series
        return [None if is_missing(value) is True else value for value in table]
    names = [str(name) for name in table.columns]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, f"the DataFrame has two columns {twice!r}; rename one of them")
    # `itertuples` keeps the type of each column; missing values of any type become None.
    return [
        {
            name: None if is_missing(value) is True else value
            for name, value in zip(names, row, strict=True)
        }
        for row in table.itertuples(index=False, name=None)
    ]


def _read_polars(table: Any) -> Iterable[Any]:
    if hasattr(table, "collect"):  # a LazyFrame
        table = table.collect()
    return list(table.to_dicts() if hasattr(table, "to_dicts") else table.to_list())


def _read_arrow(table: Any) -> Iterable[Any]:
    return list(table.to_pylist())


READERS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "pandas": _read_pandas,
    "polars": _read_polars,
    "pyarrow": _read_arrow,
    "datasets": iter,
}
