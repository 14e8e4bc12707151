"""Read rows of local files: whole files, or one line at a time. Errors name file and line."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from litgrpo.arguments import require

PlacedRow = tuple[dict[str, Any], str]  # the fields of a row, and where it was read
# JSON may escape one half of a surrogate pair; tokenizers and files cannot encode it.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
CHUNK_BYTES = 1 << 24  # bytes of a file that are searched for line ends at once


def rows_from_list(rows: Iterable[Any], name: str) -> list[PlacedRow]:
    """Return list items with their places; texts become `{"prompt": text}`.

    Example:
        >>> rows_from_list(["What is 3+4?"], "the given list")
        [({'prompt': 'What is 3+4?'}, 'the given list, row 1')]
    """
    texts_as_rows = ({"prompt": row} if isinstance(row, str) else row for row in rows)
    return _rows_from_objects(texts_as_rows, name)


def _rows_from_objects(rows: Iterable[Any], name: str) -> list[PlacedRow]:
    places = ((row, f"{name}, row {number}") for number, row in enumerate(rows, start=1))
    return [(require_object(row, place), place) for row, place in places]


def parse_json_line(line: bytes, place: str) -> dict[str, Any]:
    """Parse one line of a .jsonl file."""
    return require_object(_parse_json(_decode_line(line, place), place), place)


def parse_text_line(line: bytes, place: str) -> dict[str, Any]:
    """Parse one line of a .txt file, which is a prompt."""
    return {"prompt": _decode_line(line, place).removesuffix("\r")}


def _decode_line(line: bytes, place: str) -> str:
    try:
        return line.removesuffix(b"\n").decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 (byte {error.start} of line)") from error


def _decode_file(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")  # spreadsheets write a byte order mark first
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 (byte {error.start} of file)") from error


def _read_jsonl(path: Path) -> list[PlacedRow]:
    placed = []
    # Not splitlines(): JSON strings may contain other line separators, such as U+2028, unescaped.
    for number, line in enumerate(_decode_file(path).split("\n"), start=1):
        place = f"{path}, line {number}"
        if line.strip():
            placed.append((require_object(_parse_json(line, place), place), place))
    return placed


def _read_json(path: Path) -> list[PlacedRow]:
    rows = _parse_json(_decode_file(path) or "[]", str(path))
    if not isinstance(rows, list):
        raise ValueError(f"{path}: is a {type(rows).__name__}, expected a list of objects")
    return _rows_from_objects(rows, str(path))


def _parse_json(text: str, place: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        inside = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(
            f"{place}: not JSON: {error.msg} at {inside}column {error.colno}"
        ) from error
    # Only an escape can write a lone surrogate, so most texts need no search.
    lone = LONE_SURROGATE.search(json.dumps(value, ensure_ascii=False)) if "\\u" in text else None
    if lone:
        raise ValueError(
            f"{place}: contains {lone[0]!a}, one half of a surrogate pair, which is not a character"
        )
    return value


def require_object(row: Any, place: str) -> dict[str, Any]:
    """Return the row.

    Raises:
        ValueError: it is not an object.
    """
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise ValueError(f"{place}: is a {kind}, expected an object {{field: value}}")
    return row


def _read_csv(path: Path) -> list[PlacedRow]:
    lines = csv.reader(io.StringIO(_decode_file(path), newline=""), strict=True)
    placed = []
    try:
        header = next(lines, [])
        for cells in filter(None, lines):  # skips empty lines
            place = f"{path}, line {lines.line_num}"
            require(
                len(cells) == len(header),
                f"{place}: has {len(cells)} fields, the header {len(header)}",
            )
            placed.append((dict(zip(header, cells, strict=True)), place))
    except csv.Error as error:
        raise ValueError(f"{path}, line {lines.line_num}: not CSV: {error}") from error
    return placed


def _read_parquet(path: Path) -> list[PlacedRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not Parquet: {error}") from error
    return rows_from_list(rows, str(path))


def _read_text(path: Path) -> list[PlacedRow]:
    lines = enumerate(_decode_file(path).split("\n"), start=1)
    return [
        ({"prompt": line.removesuffix("\r")}, f"{path}, line {number}")
        for number, line in lines
        if line.strip()
    ]


READERS: dict[str, Callable[[Path], list[PlacedRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
LINE_PARSERS: dict[str, Callable[[bytes, str], dict[str, Any]]] = {
    ".jsonl": parse_json_line,
    ".txt": parse_text_line,
}
ENDINGS = f"files end in {', '.join(READERS)}"


class LineFile:
    """Rows of a file with one row per line, read on access. Empty lines are skipped.

    Takes 16 bytes of memory per line.

    Args:
        path: the file; it must not change while it is read.
        parse: makes a row of a line and its place.
    """

    def __init__(self, path: Path, parse: Callable[[bytes, str], dict[str, Any]]) -> None:
        self.path, self.parse = path, parse
        self.starts = line_starts(path)
        lengths = np.diff(self.starts)
        self.line_numbers = np.flatnonzero(lengths > len("\n"))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.line_numbers)

    def __getitem__(self, row: int) -> PlacedRow:
        """Read a row."""
        number = self.line_numbers[row]
        start, end = self.starts[number : number + 2]
        # Opened for each read: worker processes must not share a file position.
        with self.path.open("rb") as file:
            file.seek(start)
            line = file.read(end - start)
        if start == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")  # byte order mark
        place = f"{self.path}, line {number + 1}"
        return self.parse(line, place), place


def line_starts(path: Path) -> np.ndarray:
    """[lines + 1] int64 byte offsets: where each line begins, and where the last one ends."""
    found, done = [np.zeros(1, np.int64)], 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            found.append(ends + (done + 1))
            done += len(chunk)
    starts = np.concatenate(found)
    # A last line without a line break counts as if it had one.
    return starts if starts[-1] == done else np.append(starts, done + 1)
