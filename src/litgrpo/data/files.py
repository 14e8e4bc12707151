"""Rows of local files, each with its place; a bad row is named by file and line."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from litgrpo.arguments import require

Placed = tuple[dict[str, Any], str]  # the fields of a row, and where it was read
# JSON may escape one; no tokenizer and no file takes it.
HALF_PAIR = re.compile("[\ud800-\udfff]")


def from_list(rows: Iterable[Any], name: str) -> list[Placed]:
    """Rows of a list: objects, or texts, which become `{"prompt": text}`."""
    texts_as_rows = ({"prompt": row} if isinstance(row, str) else row for row in rows)
    return objects(texts_as_rows, name)


def objects(rows: Iterable[Any], name: str) -> list[Placed]:
    """The rows with their places; what is no object is an error."""
    places = ((row, f"{name}, row {number}") for number, row in enumerate(rows, start=1))
    return [(row_object(row, place), place) for row, place in places]


def json_line(line: bytes, place: str) -> dict[str, Any]:
    """The row of one line of JSON."""
    return row_object(_json(_line(line, place), place), place)


def text_line(line: bytes, place: str) -> dict[str, Any]:
    """The row of one line of text, a prompt."""
    return {"prompt": _line(line, place).removesuffix("\r")}


def _line(line: bytes, place: str) -> str:
    try:
        return line.removesuffix(b"\n").decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 (byte {error.start} of line)") from error


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
            placed.append((row_object(_json(line, place), place), place))
    return placed


def _read_json(path: Path) -> list[Placed]:
    rows = _json(_text(path) or "[]", str(path))
    require(isinstance(rows, list), f"{path}: is {_kind(rows)}, expected a list of objects")
    return objects(rows, str(path))


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


def row_object(row: Any, place: str) -> dict[str, Any]:
    """The row, if it is an object; else an error that names its place."""
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
    return from_list(rows, str(path))


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
ENDINGS = f"files end in {', '.join(READERS)}"
