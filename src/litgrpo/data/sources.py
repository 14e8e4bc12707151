"""Where rows come from: the Hub, a local file, a Python function, or a list in memory."""

from __future__ import annotations

import csv
import inspect
import io
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from litgrpo.arguments import at_least, import_by_path, require

PYTHON = "python:"
GIVEN = "the given list"
# JSON may escape one; no tokenizer and no file takes it.
HALF_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Source:
    """Where rows come from. A plain string in YAML is the `path` of one.

    Args:
        path: a file ending in .jsonl, .json, .csv, .parquet or .txt (one prompt per line); or
            `python:package.module.function?size=500`, a function that returns rows; or a data set
            of the Hugging Face Hub, `name`, `name:config` or `name:config:split` (split: train).
        limit: take only so many rows from the start.
        kwargs: more arguments for the function.
    """

    path: str
    limit: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what can give no rows."""
        at_least(f"limit of {self.path!r}", self.limit, 1)
        used = not self.kwargs or self.path.startswith(PYTHON)
        require(used, f"kwargs are for a path that begins with {PYTHON!r}, not {self.path}")


SourceLike = str | Source | list[str] | list[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """One example, and where it was read.

    Args:
        values: the fields by name.
        place: file and line (or row) for messages.
        index: position in its source.
    """

    values: dict[str, Any]
    place: str
    index: int


Placed = tuple[dict[str, Any], str]


def read(source: SourceLike) -> list[Row]:
    """All rows of a source, up to its limit.

    Args:
        source: a source, its path, or the rows themselves (texts become `{"prompt": text}`).

    Returns:
        At least one row; an empty source is an error.
    """
    if isinstance(source, list):
        return _numbered(_from_list(source, GIVEN), GIVEN)
    source = Source(source) if isinstance(source, str) else source
    return _numbered(_placed(source)[: source.limit], source.path)


def _numbered(placed: list[Placed], path: str) -> list[Row]:
    require(bool(placed), f"{path} holds no rows")
    return [Row(values, place, index) for index, (values, place) in enumerate(placed)]


def _placed(source: Source) -> list[Placed]:
    path, suffix = source.path, Path(source.path).suffix.lower()
    if path.startswith(PYTHON):
        return _from_function(path, source.kwargs)
    if suffix in READERS:
        require(Path(path).is_file(), f"{path}: no such file (looked in {Path.cwd()})")
        return READERS[suffix](Path(path))
    known = f"{path}: cannot read {suffix or 'a file without ending'}; {_ENDINGS}"
    require(not Path(path).is_file(), known)
    return _from_hub(path)


def _from_list(rows: Iterable[Any], name: str) -> list[Placed]:
    texts_as_rows = ({"prompt": row} if isinstance(row, str) else row for row in rows)
    return _objects(texts_as_rows, name)


def _objects(rows: Iterable[Any], name: str) -> list[Placed]:
    places = ((row, f"{name}, row {number}") for number, row in enumerate(rows, start=1))
    return [(_object(row, place), place) for row, place in places]


def _from_function(path: str, kwargs: dict[str, Any]) -> list[Placed]:
    name, _, query = path.removeprefix(PYTHON).partition("?")
    arguments = {key: _literal(text) for key, text in parse_qsl(query)} | kwargs
    function = _import(name, path)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{path}: {error}; signature: {inspect.signature(function)}") from error
    return _from_list(function(**arguments), path)


def _import(name: str, path: str) -> Callable[..., Iterable[Any]]:
    try:
        return import_by_path(name)
    except ValueError as error:
        hint = f"write {PYTHON}package.module.function, importable from here"
        raise ValueError(f"{path}: {error}; {hint}") from error


def _literal(text: str) -> Any:
    """The number, truth value or text that was written."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _from_hub(path: str) -> list[Placed]:
    from datasets import load_dataset  # slow to import, and most runs do not need it

    name, config, split = (*path.split(":"), "", "")[:3]
    try:
        rows = load_dataset(name, config or None, split=split or "train")
    except (OSError, ValueError) as error:
        hint = f"a data set of the Hub is name:config:split, a local file must exist; {_ENDINGS}"
        raise ValueError(f"{path}: cannot be loaded from the Hub ({error}); {hint}") from error
    return _from_list(rows, path)


def _text(path: Path) -> str:
    """The decoded file, or an error that names the line which is not UTF-8."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")  # spreadsheets put a byte order mark in front
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 (byte {error.start} of file)") from error


def _read_jsonl(path: Path) -> list[Placed]:
    placed = []
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028, unescaped.
    for number, line in enumerate(_text(path).split("\n"), start=1):
        place = f"{path}, line {number}"
        if line.strip():
            placed.append((_object(_json(line, place), place), place))
    return placed


def _read_json(path: Path) -> list[Placed]:
    rows = _json(_text(path) or "[]", str(path))
    require(isinstance(rows, list), f"{path}: is {_kind(rows)}, expected a list of objects")
    return _objects(rows, str(path))


def _json(text: str, place: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        inside = f"line {error.lineno}, " if error.lineno > 1 else ""
        where = f"{inside}column {error.colno}"
        raise ValueError(f"{place}: not JSON: {error.msg} at {where}") from error
    if half := HALF_PAIR.search(json.dumps(value, ensure_ascii=False) if "\\u" in text else ""):
        raise ValueError(
            f"{place}: holds {half[0]!a}, half of a surrogate pair, which is no character"
        )
    return value


def _object(row: Any, place: str) -> dict[str, Any]:
    require(isinstance(row, dict), f"{place}: is {_kind(row)}, expected an object {{field: value}}")
    return row


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _read_csv(path: Path) -> list[Placed]:
    lines = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    placed = []
    try:
        header = next(lines, [])
        for cells in filter(None, lines):  # an empty line is no row
            place = f"{path}, line {lines.line_num}"
            said = f"{place}: has {len(cells)} fields, the header {len(header)}"
            require(len(cells) == len(header), said)
            placed.append((dict(zip(header, cells, strict=True)), place))
    except csv.Error as error:
        raise ValueError(f"{path}, line {lines.line_num}: not CSV: {error}") from error
    return placed


def _read_parquet(path: Path) -> list[Placed]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not Parquet: {error}") from error
    return _from_list(rows, str(path))


def _read_text(path: Path) -> list[Placed]:
    lines = enumerate(_text(path).split("\n"), start=1)
    return [
        ({"prompt": line.removesuffix("\r")}, f"{path}, line {number}")
        for number, line in lines
        if line.strip()
    ]


READERS: dict[str, Callable[[Path], list[Placed]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
_ENDINGS = f"files end in {', '.join(READERS)}"
