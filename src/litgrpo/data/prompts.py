"""Prompts for reinforcement learning: tokenized in memory or per batch, padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from litgrpo.arguments import require
from litgrpo.data.loader import compute_padded_length
from litgrpo.data.rendering import LengthLimit, PromptFormat
from litgrpo.data.rows import (
    RowReader,
    columns_of,
    identity,
    report_duplicates,
    warn_of_missing_answers,
)
from litgrpo.data.sources import RowsOnDisk, SourceRow
from litgrpo.data.tokenization import (
    keep_end,
    report_special_tokens,
    report_unknown_tokens,
)
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.types import REFERENCE_PROMPT, PromptBatch, pad_left

if TYPE_CHECKING:  # slow to import; used in annotations only
    from transformers import PreTrainedTokenizerBase

NUM_PREVIEWED = 256  # rows of a streamed source that are read before training, evenly spread
MAX_SKIPPED = 1000  # rows of a streamed source that may be left out one after the other


@dataclass(frozen=True)
class PromptSet(Dataset[PromptBatch]):
    """Tokenized prompts; indexing with row numbers returns a batch.

    Args:
        ids: token ids of each prompt.
        texts: the prompts as texts.
        columns: {name: one value per prompt}.
        index: position of each prompt in its source.
        rows: the row of each prompt, for weighted sources and named sets.
        pad_id: id of the pad token.
        pad_to_multiple_of: length of batches is a multiple of this.

    Example:
        Two prompts of a byte tokenizer (1 is the begin token)::

            PromptSet(
                ids=[[1, 69, 70], [1, 71]],
                texts=["ab", "c"],
                columns={"answer": ["1", "2"]},
                index=[0, 1],
                rows=[first, second],
                pad_id=0,
                pad_to_multiple_of=1,
            )[[0, 1]].prompt_ids  # [[1, 69, 70], [0, 1, 71]]
    """

    ids: list[list[int]]
    texts: list[str]
    columns: dict[str, list[Any]]
    index: list[int]
    rows: list[SourceRow]
    pad_id: int
    pad_to_multiple_of: int

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.ids)

    @property
    def set_names(self) -> list[str]:
        """Name of each prompt's set; "" for sets without names."""
        return [row.set_name for row in self.rows]

    @property
    def description(self) -> str:
        """Number of prompts, for the log."""
        return str(len(self))

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest prompt."""
        return max(map(len, self.ids), default=0)

    @property
    def sources(self) -> list[int]:
        """Number of each prompt's source."""
        return [row.source for row in self.rows]

    @cached_property
    def num_indices(self) -> int:
        """A number above every position of a prompt in its source."""
        return max(self.index) + 1

    def index_of(self, row: int) -> int:
        """Return the position in its source of the prompt of a row."""
        return self.index[row % len(self)]

    def __getitem__(self, rows: list[int]) -> PromptBatch:
        """Return the batch of these rows, padded to the longest of them.

        SourceRow number n + k * len(self) is the k-th repetition of row n within an epoch (see
        `loader.mix_sources`). Its index differs, so its completions use other random numbers.
        """
        repetitions = torch.tensor([row // len(self) for row in rows])
        rows = [row % len(self) for row in rows]
        ids = [self.ids[row] for row in rows]
        length = compute_padded_length(ids, self.pad_to_multiple_of)
        prompt_ids, prompt_mask = pad_left(ids, self.pad_id, length)
        index = torch.tensor([self.index[row] for row in rows])
        names = {self.rows[row].set_name for row in rows}
        return PromptBatch(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            prompts=[self.texts[row] for row in rows],
            columns={name: [values[row] for row in rows] for name, values in self.columns.items()},
            index=index + repetitions * self.num_indices,
            set_name=names.pop() if len(names) == 1 else "",
        )


def tokenize_prompts(
    rows: list[SourceRow],
    role: str,
    *,
    prompt_format: PromptFormat,
    limit: LengthLimit,
    tokenizer: PreTrainedTokenizerBase,
    pad_to_multiple_of: int,
) -> PromptSet:
    """Tokenize the prompts of rows, without those that the limit drops.

    Args:
        rows: the rows.
        role: name of the set, for messages.
        prompt_format: makes the texts.
        limit: limit of a prompt's tokens.
        tokenizer: tokenizer with a pad token.
        pad_to_multiple_of: length of batches is a multiple of this.

    Raises:
        ValueError: a prompt has no tokens.
    """
    texts = prompt_format.texts(rows, tokenizer)
    encoded, lengths = encode_prompts(
        texts,
        rows,
        limit.max_chars(tokenizer),
        prompt_format=prompt_format,
        limit=limit,
        tokenizer=tokenizer,
    )
    for line in prompt_format.remarks(rows):
        rank_zero_info(f"{role}: {line}")
    report_duplicates(role, rows, texts)
    for ids, row in zip(encoded, rows, strict=True):
        require(bool(ids), f"{row.place}: the prompt has no tokens")
    split = prompt_format.split_special_tokens
    report_special_tokens(role, map(prompt_format.texts_of_data, rows), tokenizer, split=split)
    report_unknown_tokens(role, encoded, tokenizer)
    reference = prompt_format.encode_for_reference(rows, tokenizer)
    if reference:  # one limit for both prompts of a row
        lengths = [max(n, len(ids)) for n, ids in zip(lengths, reference, strict=True)]
    kept = limit.select(lengths, rows, role)
    rows = [rows[number] for number in kept]
    columns = columns_of(rows) | prompt_format.reward_columns(rows)
    if reference:
        columns[REFERENCE_PROMPT] = [
            keep_end(reference[number], limit.tokens, tokenizer) for number in kept
        ]
    return PromptSet(
        ids=[keep_end(encoded[number], limit.tokens, tokenizer) for number in kept],
        texts=[texts[number] for number in kept],
        columns=columns,
        index=[row.index for row in rows],
        rows=rows,
        pad_id=tokenizer.pad_token_id,
        pad_to_multiple_of=pad_to_multiple_of,
    )


def encode_prompts(
    texts: list[str],
    rows: list[SourceRow],
    max_chars: int,
    *,
    prompt_format: PromptFormat,
    limit: LengthLimit,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[list[int]], list[int]]:
    """Return token ids and number of tokens of each prompt.

    Of a text with more than `max_chars` only the end is tokenized, and its number of tokens is a
    lower bound.

    Args:
        texts: see `PromptFormat.texts`.
        rows: their rows.
        max_chars: see `LengthLimit.max_chars`.
        prompt_format: format of the data.
        limit: limit of a prompt's tokens.
        tokenizer: tokenizer of the model.
    """
    fitting = [n for n, text in enumerate(texts) if len(text) <= max_chars]
    found = prompt_format.encode([texts[n] for n in fitting], tokenizer, [rows[n] for n in fitting])
    encoded = dict(zip(fitting, found, strict=True))
    lengths = {n: len(ids) for n, ids in encoded.items()}
    begin = str(tokenizer.bos_token or "")
    for n, text in enumerate(texts):
        if n not in encoded:
            end = text[-max_chars:]
            (encoded[n],) = prompt_format.encode(
                [begin + end if begin and text.startswith(begin) else end], tokenizer
            )
            least = len(text) * (limit.tokens + 1) // max_chars
            lengths[n] = max(len(encoded[n]), least)
    return [encoded[n] for n in range(len(texts))], [lengths[n] for n in range(len(texts))]


class StreamedPrompts(Dataset[PromptBatch]):
    """Prompts that are read, renamed and tokenized with their batch, for data larger than memory.

    A row that is left out, because it is too long or its prompt is in the validation set, is
    replaced by the next one of the data. So every batch is full, and its content depends only on
    its row numbers.

    Args:
        source_rows: the rows.
        held_out: the identities of the validation prompts, whose rows are left out.
        required: the columns that every row needs.
        reader: renames the columns.
        prompt_format: makes the texts.
        limit: limit of a prompt's tokens.
        tokenizer: tokenizer with a pad token.
        pad_to_multiple_of: length of batches is a multiple of this.

    Raises:
        ValueError: one of the rows that are read before training cannot be used.
    """

    def __init__(
        self,
        source_rows: RowsOnDisk,
        held_out: set[str],
        required: set[str],
        *,
        reader: RowReader,
        prompt_format: PromptFormat,
        limit: LengthLimit,
        tokenizer: PreTrainedTokenizerBase,
        pad_to_multiple_of: int,
    ) -> None:
        self.source_rows, self.held_out = source_rows, held_out
        self.required, self.reader = required, reader
        self.prompt_format, self.limit, self.tokenizer = prompt_format, limit, tokenizer
        self.max_chars = limit.max_chars(tokenizer)
        count = min(len(self), NUM_PREVIEWED)
        self.preview_rows = [self.row(place * len(self) // count) for place in range(count)]
        warn_of_missing_answers(self.preview_rows, reader.compared)
        self.preview = tokenize_prompts(
            self.preview_rows,
            f"train (first look: {count} rows)",
            prompt_format=prompt_format,
            limit=limit,
            tokenizer=tokenizer,
            pad_to_multiple_of=pad_to_multiple_of,
        )

    def __len__(self) -> int:
        """Number of rows, including those that will be left out."""
        return len(self.source_rows)

    @property
    def description(self) -> str:
        """Number of rows, for the log."""
        return f"{len(self)}, read batch by batch"

    @property
    def num_indices(self) -> int:
        """Number of rows."""
        return len(self)

    def index_of(self, row: int) -> int:
        """Return the position of a row, its number."""
        return row

    @property
    def ids(self) -> list[list[int]]:
        """Token ids of the rows that were read before training."""
        return self.preview.ids

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest prompt that is possible."""
        return self.limit.tokens

    @property
    def columns(self) -> dict[str, list[Any]]:
        """Columns of the rows that were read before training."""
        return self.preview.columns

    def row(self, number: int) -> SourceRow:
        """Read a row and rename its columns, even if it will be left out."""
        values, place = self.source_rows[number]
        return self.reader.rename(SourceRow(values, place, number), self.required)

    def find_usable(self, number: int) -> tuple[SourceRow, str, list[int], list[list[int]]]:
        """Return the first usable row from this number on, with its text and token ids.

        The last entry has the token ids for the reference; it is empty if that reads the same ones.

        Raises:
            ValueError: a row is an error, or too many rows are left out one after the other.
        """
        overlap = self.reader.train_val_overlap
        for step in range(min(MAX_SKIPPED, len(self))):
            row = self.row((number + step) % len(self))
            if overlap != "keep" and identity(row) in self.held_out:
                require(
                    overlap == "drop",
                    f"{row.place}: this training prompt is in the validation set; "
                    "`train_val_overlap: drop` leaves it out",
                )
                continue
            (text,) = self.prompt_format.texts([row], self.tokenizer)
            (ids,), (length,) = encode_prompts(
                [text],
                [row],
                self.max_chars,
                prompt_format=self.prompt_format,
                limit=self.limit,
                tokenizer=self.tokenizer,
            )
            require(bool(ids), f"{row.place}: the prompt has no tokens")
            reference = self.prompt_format.encode_for_reference([row], self.tokenizer)
            if self.limit.admits(max([length, *map(len, reference)]), row):
                ids, *reference = (
                    keep_end(each, self.limit.tokens, self.tokenizer) for each in (ids, *reference)
                )
                return replace(row, index=number), text, ids, reference
        raise ValueError(
            f"{self.row(number).place}: from here on {MAX_SKIPPED} rows were left out, as too long "
            f"({self.limit.name} {self.limit.tokens}) or in the validation set"
        )

    def __getitem__(self, numbers: Sequence[int]) -> PromptBatch:
        """Read the batch of these rows, padded to the longest of them."""
        found = [self.find_usable(number) for number in numbers]
        rows = [row for row, *_ in found]
        # Columns that only the previewed rows have are None here, so all batches have the same.
        columns: dict[str, list[Any]] = {name: [None] * len(rows) for name in self.columns}
        if self.prompt_format.reference is not None:
            columns[REFERENCE_PROMPT] = [ids for *_, (ids,) in found]
        batch = PromptSet(
            ids=[ids for _, _, ids, _ in found],
            texts=[text for _, text, _, _ in found],
            columns=columns | columns_of(rows) | self.prompt_format.reward_columns(rows),
            index=[row.index for row in rows],
            rows=rows,
            pad_id=self.preview.pad_id,
            pad_to_multiple_of=self.preview.pad_to_multiple_of,
        )
        return batch[[*range(len(rows))]]
