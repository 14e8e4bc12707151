"""Prompts for reinforcement learning: tokenized, and as left-padded batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from litgrpo.arguments import require
from litgrpo.data.rendering import LengthLimit, PromptStyle, end_of
from litgrpo.data.rows import columns_of
from litgrpo.data.sampler import padded_length
from litgrpo.data.sources import Row
from litgrpo.data.special_tokens import report_special_tokens, report_unknown
from litgrpo.types import PromptBatch

if TYPE_CHECKING:  # slow to import; only named here
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptSet(Dataset[PromptBatch]):
    """Tokenized prompts; row numbers give a batch of them.

    Args:
        ids: token ids of each prompt.
        texts: the prompts as texts.
        columns: {name: one value per prompt}.
        index: position of each prompt in its source.
        rows: where each came from, for sources with weights and for sets with names.
        pad_id: token that fills up.
        pad_to_multiple_of: batches are as long as a multiple of this.
    """

    ids: list[list[int]]
    texts: list[str]
    columns: dict[str, list[Any]]
    index: list[int]
    rows: list[Row]
    pad_id: int
    pad_to_multiple_of: int

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.ids)

    @property
    def set_names(self) -> list[str]:
        """The name of each prompt's set; "" where sets have none."""
        return [row.set_name for row in self.rows]

    @property
    def size(self) -> str:
        """Number of prompts, in words."""
        return str(len(self))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.ids), default=0)

    @property
    def sources(self) -> list[int]:
        """The number of each prompt's source."""
        return [row.source for row in self.rows]

    @cached_property
    def _past_indices(self) -> int:
        """The first number behind all indices."""
        return max(self.index) + 1

    def __getitem__(self, rows: list[int]) -> PromptBatch:
        """The batch of these rows, padded to the longest of them.

        A number beyond the last row is a row that comes again in the same epoch (`mixing.mixed`):
        it has an index of its own, and with it random numbers of its own.
        """
        turns = [row // len(self) for row in rows]
        rows = [row % len(self) for row in rows]
        again = torch.tensor(turns) * self._past_indices
        ids = [self.ids[row] for row in rows]
        length = padded_length(ids, self.pad_to_multiple_of)
        prompt_ids, prompt_mask = pad_left(ids, self.pad_id, length)
        return PromptBatch(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            prompts=[self.texts[row] for row in rows],
            columns={name: [values[row] for row in rows] for name, values in self.columns.items()},
            index=torch.tensor([self.index[row] for row in rows]) + again,
            set_name=self.rows[rows[0]].set_name,
        )


def tokenized_prompts(
    rows: list[Row],
    role: str,
    *,
    style: PromptStyle,
    limit: LengthLimit,
    tokenizer: PreTrainedTokenizerBase,
    pad_to_multiple_of: int,
) -> PromptSet:
    """The prompts of these rows, without those that the limit drops.

    Args:
        rows: the rows.
        role: name of the set, for messages.
        style: makes the texts.
        limit: of a prompt's tokens.
        tokenizer: with a pad token.
        pad_to_multiple_of: batches are as long as a multiple of this.

    Raises:
        ValueError: a prompt has no tokens.
    """
    texts = style.texts(rows, tokenizer)
    encoded = style.encode(texts, tokenizer, rows)
    for ids, row in zip(encoded, rows, strict=True):
        require(bool(ids), f"{row.place}: the prompt has no tokens")
    split = style.split_special_tokens
    report_special_tokens(role, map(style.given, rows), tokenizer, split=split)
    report_unknown(role, encoded, tokenizer)
    kept = limit.kept(list(map(len, encoded)), rows, role)
    rows = [rows[number] for number in kept]
    return PromptSet(
        ids=[end_of(encoded[number], limit.tokens, tokenizer) for number in kept],
        texts=[texts[number] for number in kept],
        columns=columns_of(rows) | style.columns(rows),
        index=[row.index for row in rows],
        rows=rows,
        pad_id=tokenizer.pad_token_id,
        pad_to_multiple_of=pad_to_multiple_of,
    )


def pad_left(rows: list[list[int]], pad_id: int, length: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of token ids of unequal length, padded on the left.

    Args:
        rows: M lists of token ids.
        pad_id: the id that fills up.
        length: the least length of the result.

    Returns:
        [M, T] ids and [M, T] bool mask.

    Example:
        >>> pad_left([[5, 6], [7]], pad_id=0)[0]
        tensor([[5, 6],
                [0, 7]])
    """
    width = max([length, *map(len, rows)])
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for row, tokens in enumerate(rows):
        if tokens:
            ids[row, -len(tokens) :] = torch.tensor(tokens, dtype=torch.long)
            mask[row, -len(tokens) :] = True
    return ids, mask
