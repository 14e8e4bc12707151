"""Read rows of local files: whole files, or one line at a time. Errors name file and line."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from litgrpo.arguments import first_line, require, type_with_article
from litgrpo.data.in_memory import read_object, without_nulls_in_row
from litgrpo.text.strict_json import parse_json

PlacedRow = tuple[dict[str, Any], str]  # the fields of a row, and where it was read
# JSON may escape one half of a surrogate pair; tokenizers and files cannot encode it.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
IN_MEMORY_BYTES = 1 << 28  # size of a file above which rows are read on access
CHUNK_BYTES = 1 << 24  # bytes of a file that are searched for line ends at once
MARK = b"\xef\xbb\xbf"  # byte order mark, which spreadsheets write first
SPACES = " \t\r\n\v\f"  # a line of these alone is not a row, in memory and streamed


def rows_from_list(rows: Iterable[Any], name: str) -> list[PlacedRow]:
    """Return list items with their places; texts become `{"prompt": text}`."""
    as_objects = ({"prompt": row} if isinstance(row, str) else row for row in rows)
    return [
        (check_characters(row, place), place) for row, place in _rows_from_objects(as_objects, name)
    ]


def _rows_from_objects(rows: Iterable[Any], name: str) -> list[PlacedRow]:
    with_places = ((row, f"{name}, row {number}") for number, row in enumerate(rows, start=1))
    return [(require_object(row, place), place) for row, place in with_places]


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
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 (byte {error.start} of file)") from error


def _read_json(path: Path) -> list[PlacedRow]:
    rows = _parse_json(_decode_file(path) or "[]", str(path))
    if not isinstance(rows, list):
        raise ValueError(f"{path}: is {type_with_article(rows)}, expected a list of objects")
    return _rows_from_objects(rows, str(path))


def _parse_json(text: str, place: str) -> Any:
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        inside = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(
            f"{place}: not JSON: {error.msg} at {inside}column {error.colno}"
        ) from error
    except ValueError as error:  # also a number of thousands of digits, which Python rejects
        raise ValueError(f"{place}: not JSON: {first_line(error)}") from error
    except RecursionError as error:
        raise ValueError(f"{place}: nested too deeply") from error
    # Only an escape can write a lone surrogate, so most texts need no search.
    if "\\u" in text:
        check_characters(value, place)
    return value


def check_characters(value: Any, place: str) -> Any:
    """Return a value whose texts have no half of a surrogate pair, which nothing can encode."""
    text = json.dumps(value, ensure_ascii=False, skipkeys=True, default=str)
    if lone := LONE_SURROGATE.search(text):
        raise ValueError(
            f"{place}: contains {lone[0]!a}, one half of a surrogate pair, which is not a character"
        )
    return value


def require_object(row: Any, place: str) -> dict[str, Any]:
    """Return the row as a dictionary."""
    if isinstance(row, Mapping):
        return row if isinstance(row, dict) else dict(row)
    if hasattr(row, "_asdict"):  # a named tuple
        return dict(row._asdict())
    kind = type_with_article(row)
    raise ValueError(f"{place}: is {kind}, expected an object {{field: value}}, not {row!r:.40}")


def _read_csv(path: Path) -> list[PlacedRow]:
    lines = csv.reader(io.StringIO(_decode_file(path), newline=""), strict=True)
    rows = []
    try:
        header = next(lines, [])
        twice = next((name for name in header if header.count(name) > 1), None)
        require(twice is None, f"{path}, line 1: the column {twice!r} occurs twice")
        for cells in filter(None, lines):  # skips empty lines
            place = f"{path}, line {lines.line_num}"
            require(
                len(cells) == len(header),
                f"{place}: has {len(cells)} fields, the header {len(header)}",
            )
            rows.append((dict(zip(header, cells, strict=True)), place))
    except csv.Error as error:
        raise ValueError(f"{path}, line {lines.line_num}: not CSV: {error}") from error
    return rows


class LineFile(Sequence[PlacedRow]):
    """Rows of a file with one row per line, read on access. Empty lines are skipped.

    Takes 16 bytes of memory per line.
    """

    # The content must not change while it is used.

    def __init__(self, path: Path, parse: Callable[[bytes, str], dict[str, Any]]) -> None:
        self.path, self.parse = path, parse
        self.starts, self.line_numbers = index_lines(path)
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self.line_numbers)

    def __getitem__(self, row: Any) -> Any:
        number = self.line_numbers[row]
        start, end = map(int, self.starts[number : number + 2])
        place = f"{self.path}, line {number + 1}"
        # Unlike `read`, it has no position that threads and processes would share.
        data = os.pread(self._file, end - max(start - 1, 0), max(start - 1, 0))
        before, line = (data[:1], data[1:]) if start else (b"\n", data)
        is_last = number + 2 == len(self.starts)
        is_line = before == b"\n" and (
            line.endswith(b"\n") or (is_last and len(line) == end - start - 1)
        )
        require(
            is_line,
            f"{place}: the file changed during the run: no line is there any more. Restore it and "
            "resume from the last checkpoint",
        )
        return self.parse(line.removeprefix(MARK) if start == 0 else line, place), place


def index_lines(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return where each line of a file begins, and which lines are rows.

    [lines + 1] int64 byte offsets, the last one where the last line ends; [rows] line numbers.
    """
    is_space = np.zeros(256, bool)
    is_space[[*SPACES.encode()]] = True
    starts, words, size = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)], 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            characters = np.frombuffer(chunk, np.uint8)
            starts.append(np.flatnonzero(characters == ord("\n")) + (size + 1))
            blank = is_space[characters]
            if size == 0 and chunk.startswith(MARK):
                blank[: len(MARK)] = True
            # The first character of each word is enough to find the lines with text.
            begins = ~blank
            begins[1:] &= blank[:-1]
            words.append(np.flatnonzero(begins) + size)
            size += len(chunk)
    lines = np.concatenate(starts)
    if lines[-1] != size:  # a last line without a line break counts as if it had one
        lines = np.append(lines, size + 1)
    return lines, np.unique(np.searchsorted(lines, np.concatenate(words), side="right") - 1)


def _read_jsonl(path: Path) -> Sequence[PlacedRow]:
    return _read_lines(path, parse_json_line)


def _read_text(path: Path) -> Sequence[PlacedRow]:
    return _read_lines(path, parse_text_line)


def _read_lines(path: Path, parse: Callable[[bytes, str], dict[str, Any]]) -> Sequence[PlacedRow]:
    rows = LineFile(path, parse)
    return rows if _is_large(path) else list(rows)


def _read_parquet(path: Path) -> Sequence[PlacedRow]:
    try:
        if _is_large(path):
            from datasets import Dataset  # slow to import

            return TableRows(Dataset.from_parquet(str(path)), str(path))
        import pyarrow.parquet

        return rows_from_list(read_object(pyarrow.parquet.read_table(path)), str(path))
    except Exception as error:  # of the libraries, of many types
        cause = error.__cause__ or error
        raise ValueError(f"{path}: not Parquet: {first_line(cause)}") from error


def _is_large(path: Path) -> bool:
    """True if the rows of a file are read on access, instead of once."""
    return path.stat().st_size > IN_MEMORY_BYTES


class TableRows(Sequence[PlacedRow]):
    """Rows of a `datasets.Dataset`, which maps its files into memory."""

    def __init__(self, table: Any, name: str) -> None:
        self.table, self.name = table, name

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: Any) -> Any:
        place = f"{self.name}, row {row + 1}"
        return require_object(without_nulls_in_row(self.table[int(row)]), place), place


READERS: dict[str, Callable[[Path], Sequence[PlacedRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
ENDINGS = f"files end in {', '.join(READERS)}"
