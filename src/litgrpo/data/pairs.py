"""Prompts with completions for supervised training: tokenized, and as right-padded batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from litgrpo.arguments import require
from litgrpo.data.rendering import LengthLimit, PromptStyle, Template, tokenize
from litgrpo.data.sampler import padded_length
from litgrpo.data.sources import Row

if TYPE_CHECKING:  # slow to import; only named here
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PairBatch:
    """Prompts, each followed by its completion and the end token, padded on the right.

    Args:
        input_ids: [M, T] token ids.
        attention_mask: [M, T] bool, True marks a real token.
        loss_mask: [M, T] bool, True marks a token to predict: the completion and its end token.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor

    def __post_init__(self) -> None:
        """Check ranks and sizes."""
        rows, length = self.input_ids.shape
        for mask in (self.attention_mask, self.loss_mask):
            assert mask.shape == (rows, length), f"a mask has shape {tuple(mask.shape)}"
            assert mask.dtype == torch.bool, f"a mask is {mask.dtype}"

    def __len__(self) -> int:
        """Number of pairs, M."""
        return self.input_ids.shape[0]

    def to(self, device: torch.device | str, **kwargs: Any) -> PairBatch:
        """The same batch on `device`."""
        return PairBatch(
            self.input_ids.to(device, **kwargs),
            self.attention_mask.to(device, **kwargs),
            self.loss_mask.to(device, **kwargs),
        )


@dataclass(frozen=True)
class PairSet(Dataset[PairBatch]):
    """Tokenized pairs; row numbers give a batch of them.

    Args:
        ids: token ids of each prompt with its completion.
        prompt_lens: number of leading tokens that are the prompt.
        pad_id: token that fills up.
        pad_to_multiple: batches are as long as a multiple of this.
    """

    ids: list[list[int]]
    prompt_lens: list[int]
    pad_id: int
    pad_to_multiple: int

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.ids)

    @cached_property
    def lengths(self) -> Tensor:
        """[M] tokens of each pair."""
        return torch.tensor([len(ids) for ids in self.ids])

    def __getitem__(self, rows: list[int]) -> PairBatch:
        """The batch of these rows, padded to the longest of them."""
        ids = [self.ids[row] for row in rows]
        slots = torch.arange(padded_length(ids, self.pad_to_multiple))
        input_ids = torch.full((len(rows), len(slots)), self.pad_id)
        for number, tokens in enumerate(ids):
            input_ids[number, : len(tokens)] = torch.tensor(tokens)
        real = slots < self.lengths[rows][:, None]
        targets = real & (slots >= torch.tensor([self.prompt_lens[row] for row in rows])[:, None])
        return PairBatch(input_ids, real, targets)


def tokenized_pairs(
    rows: list[Row],
    role: str,
    *,
    style: PromptStyle,
    completion: Template,
    limit: LengthLimit,
    tokenizer: PreTrainedTokenizerBase,
    pad_to_multiple: int,
) -> PairSet:
    """The pairs of these rows, each with one end token, without those that the limit drops.

    Args:
        rows: the rows.
        role: name of the set, for messages.
        style: makes the prompts.
        completion: makes the completions.
        limit: of a pair's tokens; a truncated pair has no end token.
        tokenizer: with a pad and an end token.
        pad_to_multiple: batches are as long as a multiple of this.

    Raises:
        ValueError: a truncated pair has nothing to learn.
    """
    prompts = style.encode(style.texts(rows, tokenizer), tokenizer)
    # Apart from the prompt, because a generated completion begins behind a finished prompt too.
    texts = [completion.text(row) for row in rows]
    completions = tokenize(tokenizer, texts, add_special_tokens=False)
    end = [tokenizer.eos_token_id]
    ended = [ids if ids[-1:] == end else ids + end for ids in completions]
    pairs = [prompt + ids for prompt, ids in zip(prompts, ended, strict=True)]
    kept = limit.kept(list(map(len, pairs)), rows, role)
    for number in kept:
        length = len(prompts[number])
        require(
            length < limit.tokens,
            f"{rows[number].place}: the prompt alone has {length} tokens, "
            f"max_len={limit.tokens} leaves none to learn; say `overlong: drop`",
        )
    return PairSet(
        ids=[pairs[number][: limit.tokens] for number in kept],
        prompt_lens=[len(prompts[number]) for number in kept],
        pad_id=tokenizer.pad_token_id,
        pad_to_multiple=pad_to_multiple,
    )


def padding_frac(lengths: Tensor, batches: list[list[int]]) -> float:
    """Share of the token slots of all batches that hold no token.

    Args:
        lengths: [M] tokens of each row.
        batches: lists of row numbers.
    """
    slots = sum(len(rows) * int(lengths[rows].max()) for rows in batches)
    return 1 - sum(int(lengths[rows].sum()) for rows in batches) / slots
