"""Training rows that stay on disk and are read when their batch comes: data larger than memory."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from litgrpo.arguments import require
from litgrpo.data.files import Placed, json_line, row_object, text_line
from litgrpo.data.prompts import PromptSet, tokenized_prompts
from litgrpo.data.rendering import LengthLimit, PromptStyle, end_of
from litgrpo.data.rows import Table, columns_of, identity
from litgrpo.data.sources import PYTHON, Row, Source, chosen, files_of, saved_or_hub, several
from litgrpo.types import PromptBatch

if TYPE_CHECKING:  # slow to import; only named here
    from transformers import PreTrainedTokenizerBase

CHUNK = 1 << 24  # bytes of a file that are looked through for line ends at once
LOOKED_AT = 256  # rows that are read before training, evenly spread
PATIENCE = 1000  # rows that may be left out in a row
LINES: dict[str, Callable[[bytes, str], dict[str, Any]]] = {".jsonl": json_line, ".txt": text_line}
BY_PLACE = f"{', '.join(LINES)}, .parquet, a folder of save_to_disk or a data set of the Hub"


class Lines:
    """The lines of a file that are not empty; 16 bytes of memory for each.

    Args:
        path: of the file; it must not change while it is read.
        read: makes a row of a line and its place.
    """

    def __init__(self, path: Path, read: Callable[[bytes, str], dict[str, Any]]) -> None:
        self.path, self.read = path, read
        self.starts = line_starts(path)
        lengths = np.diff(self.starts)
        self.numbers = np.flatnonzero(lengths > len("\n"))

    def __len__(self) -> int:
        """Number of lines."""
        return len(self.numbers)

    def __getitem__(self, row: int) -> Placed:
        """The row and its place; the file is opened anew, so that processes share nothing."""
        number = self.numbers[row]
        start, end = self.starts[number : number + 2]
        with self.path.open("rb") as file:
            file.seek(start)
            line = file.read(end - start)
        place = f"{self.path}, line {number + 1}"
        return self.read(line.removeprefix(b"\xef\xbb\xbf") if start == 0 else line, place), place


def line_starts(path: Path) -> np.ndarray:
    """[lines + 1] int64: where each line begins, and where the last one ends."""
    found, done = [np.zeros(1, np.int64)], 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            found.append(ends + (done + 1))
            done += len(chunk)
    starts = np.concatenate(found)
    # A last line without an end is as long as one with it.
    return starts if starts[-1] == done else np.append(starts, done + 1)


class Mapped:
    """Rows of a `datasets.Dataset`, which maps its files into memory.

    Args:
        rows: the data set.
        name: for places.
    """

    def __init__(self, rows: Any, name: str) -> None:
        self.rows, self.name = rows, name

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def __getitem__(self, row: int) -> Placed:
        """The row and its place."""
        place = f"{self.name}, row {row + 1}"
        return row_object(self.rows[int(row)], place), place


class Rows(Protocol):
    """Rows with their places, which are read when they are asked for."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, row: int) -> Placed:
        """The row and its place."""


class Chain:
    """The rows of several, one after the other.

    Args:
        several: whose rows they are.
    """

    def __init__(self, several: Sequence[Rows]) -> None:
        self.several, self.ends = several, [*accumulate(map(len, several))]

    def __len__(self) -> int:
        """Number of rows."""
        return self.ends[-1]

    def __getitem__(self, row: int) -> Placed:
        """The row and its place."""
        place = bisect_right(self.ends, row)
        return self.several[place][row - self.ends[place] + len(self.several[place])]


class Some:
    """Some rows, at random, the same ones in every run.

    Args:
        rows: all rows.
        limit: how many to take.
    """

    def __init__(self, rows: Rows, limit: int) -> None:
        self.rows, self.numbers = rows, array("q", chosen(len(rows), limit))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.numbers)

    def __getitem__(self, row: int) -> Placed:
        """The row and its place."""
        return self.rows[self.numbers[row]]


def streams(source: Any) -> bool:
    """Whether a source, or any of a list, is read when it is needed."""
    each = source if isinstance(source, list) else [source]
    return any(isinstance(one, Source) and one.streaming for one in each)


def rows_of(source: Any) -> Rows:
    """The rows of a source or of several, none of them in memory.

    Raises:
        ValueError: a source has a weight, no rows, or cannot be read by row.
    """
    each = [Source(one) if isinstance(one, str) else one for one in several(source)]
    known = all(isinstance(one, Source) for one in each)
    require(known, "train has a source with `streaming: true`: the others must be paths, too")
    weighed = any(one.weight is not None for one in each)
    require(not weighed, "weight and streaming do not go together: leave one of them out")
    return Chain([_opened(one) for one in each])


def _opened(source: Source) -> Rows:
    path, suffix = source.path, Path(source.path).suffix.lower()
    refused = path.startswith(PYTHON) or suffix in (".csv", ".json")
    require(not refused, f"{path} cannot be read by row: streaming is for {BY_PLACE}")
    found: Sequence[Rows]
    if suffix in LINES:
        found = [Lines(file, LINES[suffix]) for file in files_of(path)]
    elif suffix == ".parquet":
        from datasets import load_dataset  # slow to import

        files = [str(file) for file in files_of(path)]
        found = [Mapped(load_dataset("parquet", data_files=files, split="train"), path)]
    else:
        found = [Mapped(saved_or_hub(path), path)]
    rows = Chain(found)
    require(len(rows) > 0, f"{path} holds no rows")
    return rows if source.limit is None else Some(rows, source.limit)


class StreamedPrompts(Dataset[PromptBatch]):
    """Prompts that are read, named and tokenized when their batch comes.

    A row that is left out, because it is too long or its prompt is in the validation set, gives its
    place to the next one of the data: so every batch is full, and what it holds depends on nothing
    but its numbers.

    Args:
        placed: the rows.
        held: the identities of the validation prompts, whose rows are left out.
        required: the fields that every row needs.
        table: how rows get their names.
        style: makes the texts.
        limit: of a prompt's tokens.
        tokenizer: with a pad token.
        pad_to_multiple_of: batches are as long as a multiple of this.

    Raises:
        ValueError: one of the rows that are looked at before training cannot be used.
    """

    def __init__(
        self,
        placed: Rows,
        held: set[str],
        required: set[str],
        *,
        table: Table,
        style: PromptStyle,
        limit: LengthLimit,
        tokenizer: PreTrainedTokenizerBase,
        pad_to_multiple_of: int,
    ) -> None:
        self.placed, self.held, self.required, self.table = placed, held, required, table
        self.style, self.limit, self.tokenizer = style, limit, tokenizer
        self.seen = self.looked_at()
        how: dict[str, Any] = {"style": style, "limit": limit, "tokenizer": tokenizer}
        role = f"train (looked at: {len(self.seen)} rows)"
        self.sample = tokenized_prompts(
            self.seen, role, pad_to_multiple_of=pad_to_multiple_of, **how
        )

    def __len__(self) -> int:
        """Number of rows, those included that will be left out."""
        return len(self.placed)

    @property
    def size(self) -> str:
        """Number of rows, in words."""
        return f"{len(self)}, rows are read when their batch comes"

    def looked_at(self) -> list[Row]:
        """A few rows, evenly spread."""
        count = min(len(self), LOOKED_AT)
        return [self.row(place * len(self) // count) for place in range(count)]

    @property
    def ids(self) -> list[list[int]]:
        """Token ids of the rows that were looked at."""
        return self.sample.ids

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt there may be."""
        return self.limit.tokens

    @property
    def columns(self) -> dict[str, list[Any]]:
        """Columns of the rows that were looked at."""
        return self.sample.columns

    def row(self, number: int) -> Row:
        """The row of this number under our names, whether it can be used or not."""
        values, place = self.placed[number]
        return self.table.named(Row(values, place, number), self.required)

    def usable(self, number: int) -> tuple[Row, str, list[int]]:
        """The first row from this number on that can be used, its text and its tokens."""
        for step in range(min(PATIENCE, len(self))):
            row = self.row((number + step) % len(self))
            shared = self.table.train_val_overlap != "keep" and identity(row) in self.held
            require(
                not shared or self.table.train_val_overlap == "drop",
                f"{row.place}: this training prompt is in the validation set; "
                "`train_val_overlap: drop` leaves it out",
            )
            (text,) = self.style.texts([row], self.tokenizer)
            (ids,) = self.style.encode([text], self.tokenizer, [row])
            require(bool(ids), f"{row.place}: the prompt has no tokens")
            if not shared and self.limit.admits(len(ids), row):
                return (
                    replace(row, index=number),
                    text,
                    end_of(ids, self.limit.tokens, self.tokenizer),
                )
        raise ValueError(
            f"{self.row(number).place}: from here on {PATIENCE} rows were left out, as too long "
            f"({self.limit.name} {self.limit.tokens}) or in the validation set"
        )

    def __getitem__(self, numbers: Sequence[int]) -> PromptBatch:
        """The batch of these rows, padded to the longest of them."""
        found = [self.usable(number) for number in numbers]
        rows = [row for row, _, _ in found]
        columns: dict[str, list[Any]] = {name: [None] * len(rows) for name in self.columns}
        batch = PromptSet(
            ids=[ids for *_, ids in found],
            texts=[text for _, text, _ in found],
            columns=columns | columns_of(rows) | self.style.columns(rows),
            index=[row.index for row in rows],
            rows=rows,
            pad_id=self.sample.pad_id,
            pad_to_multiple_of=self.sample.pad_to_multiple_of,
        )
        return batch[[*range(len(rows))]]
