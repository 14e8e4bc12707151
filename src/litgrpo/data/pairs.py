"""Prompts with completions for supervised training: tokenized, and as right-padded batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from litgrpo.arguments import require
from litgrpo.data.conversations import Part, Turns, conversation_of, parts_of, spoken_and_heard
from litgrpo.data.rendering import ChatStyle, LengthLimit, PromptStyle, Template, tokenize
from litgrpo.data.sampler import padded_length
from litgrpo.data.sources import Row
from litgrpo.data.special_tokens import special_texts

if TYPE_CHECKING:  # slow to import; only named here
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PairBatch:
    """Prompts, each followed by its completion and the end token, padded on the right.

    Args:
        input_ids: [M, T] token ids.
        attention_mask: [M, T] bool, True marks a real token.
        loss_mask: [M, T] bool, True marks a token to predict: the completion and its end token.
        set_name: of the set that all of them belong to, where there are several; else "".
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    set_name: str = ""

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
            self.set_name,
        )


Span = tuple[int, int]  # from one token up to another, which is not part of it


@dataclass(frozen=True)
class PairSet(Dataset[PairBatch]):
    """Tokenized pairs; row numbers give a batch of them.

    Args:
        ids: token ids of each prompt with its completion.
        learned: the tokens to predict of each pair, as spans.
        pad_id: token that fills up.
        pad_to_multiple_of: batches are as long as a multiple of this.
        rows: where each came from, for sources with weights and for sets with names.
    """

    ids: list[list[int]]
    learned: list[list[Span]]
    pad_id: int
    pad_to_multiple_of: int
    rows: list[Row] = field(default_factory=list)

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.ids)

    @property
    def longest(self) -> int:
        """Tokens of the longest pair."""
        return max(map(len, self.ids), default=0)

    @cached_property
    def set_names(self) -> list[str]:
        """The name of each pair's set; "" where sets have none."""
        return [row.set_name for row in self.rows] or [""] * len(self)

    @property
    def sources(self) -> list[int]:
        """The number of each pair's source."""
        return [row.source for row in self.rows]

    @cached_property
    def lengths(self) -> Tensor:
        """[M] tokens of each pair."""
        return torch.tensor([len(ids) for ids in self.ids])

    def __getitem__(self, rows: list[int]) -> PairBatch:
        """The batch of these rows, padded to the longest of them."""
        rows = [row % len(self) for row in rows]  # one that comes again is numbered beyond the last
        ids = [self.ids[row] for row in rows]
        slots = torch.arange(padded_length(ids, self.pad_to_multiple_of))
        input_ids = torch.full((len(rows), len(slots)), self.pad_id)
        targets = torch.zeros_like(input_ids, dtype=torch.bool)
        for number, tokens in enumerate(ids):
            input_ids[number, : len(tokens)] = torch.tensor(tokens)
            for start, stop in self.learned[rows[number]]:
                targets[number, start:stop] = True
        real = slots < self.lengths[rows][:, None]
        return PairBatch(input_ids, real, targets & real, self.set_names[rows[0]])


TokenPart = tuple[list[int], bool]  # token ids, and whether they are learned


@dataclass(frozen=True)
class PairStyle:
    """How a row becomes what is read and what is learned.

    Args:
        prompt: makes the prompts.
        completion: makes the completions.
        turns: which answers of a conversation are learned.
    """

    prompt: PromptStyle
    completion: Template
    turns: Turns = "all"

    def conversation(self, row: Row) -> list[dict[str, str]] | None:
        """The messages of a row that holds a conversation, where the data are in chat format.

        None where a template says what the completion is.
        """
        style = self.prompt
        if self.completion.source is not None or not isinstance(style, ChatStyle):
            return None
        return conversation_of(row, style)

    def parts(self, row: Row) -> list[Part]:
        """The texts behind a prompt, and whether each is learned.

        A completion is one text, or a list of messages: those of the assistant are learned, what
        it heard in between is only read.
        """
        said = row.values.get("completion")
        if self.completion.source is not None or not isinstance(said, list):
            return [(self.completion.text(row), True)]
        return spoken_and_heard(row, said)

    def plain(self, rows: list[Row]) -> Iterator[str]:
        """What is read and learned as plain texts, for a tokenizer to be fitted to."""
        talks = [self.conversation(row) for row in rows]
        pairs = [row for row, talk in zip(rows, talks, strict=True) if talk is None]
        yield from self.prompt.plain(pairs)
        yield from (text for row in pairs for text, _ in self.parts(row))
        yield from (each["content"] for talk in talks for each in talk or [])

    def encode(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> list[list[TokenPart]]:
        """The token parts of each row, one after the other."""
        talks = [self.conversation(row) for row in rows]
        pairs = [row for row, talk in zip(rows, talks, strict=True) if talk is None]
        ready = iter(self._encoded_pairs(pairs, tokenizer))
        return [
            next(ready) if talk is None else self._encoded_talk(row, talk, tokenizer)
            for row, talk in zip(rows, talks, strict=True)
        ]

    def _encoded_pairs(
        self, rows: list[Row], tokenizer: PreTrainedTokenizerBase
    ) -> list[list[TokenPart]]:
        if not rows:
            return []
        prompts = self.prompt.encode(self.prompt.texts(rows, tokenizer), tokenizer, rows)
        # Apart from the prompt, because a generated completion begins behind a finished prompt too;
        # and turn by turn, because what is heard between two turns is encoded alone too.
        parts = list(map(self.parts, rows))
        flat = [text for row in parts for text, _ in row]
        ids = iter(tokenize(tokenizer, flat, add_special_tokens=False))
        encoded = [[(next(ids), learned) for _, learned in row] for row in parts]
        for row in encoded:
            last, learned = row[-1]
            ended = last[-1:] == [tokenizer.eos_token_id]
            row[-1] = (last + [tokenizer.eos_token_id] * (not ended), learned)
        return [[(p, False), *row] for p, row in zip(prompts, encoded, strict=True)]

    def _encoded_talk(
        self, row: Row, messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase
    ) -> list[TokenPart]:
        style = self.prompt
        assert isinstance(style, ChatStyle)
        parts = parts_of(row, messages, self.turns, style.chat, tokenizer)
        texts = [text for text, _ in parts]
        ids = tokenize(tokenizer, texts, add_special_tokens=False)
        # A template without a mark at the end of a turn: the end token is one.
        marked = texts[-1].endswith(tuple(special_texts(tokenizer)))
        ids[-1] = ids[-1] + [tokenizer.eos_token_id] * (not marked)
        return [(part, learned) for part, (_, learned) in zip(ids, parts, strict=True)]


def tokenized_pairs(
    rows: list[Row],
    role: str,
    *,
    style: PairStyle,
    limit: LengthLimit,
    tokenizer: PreTrainedTokenizerBase,
    pad_to_multiple_of: int,
) -> PairSet:
    """The pairs of these rows, each with one end token, without those that the limit drops.

    Args:
        rows: the rows.
        role: name of the set, for messages.
        style: makes prompts and completions.
        limit: of a pair's tokens; a truncated pair has no end token.
        tokenizer: with a pad and an end token.
        pad_to_multiple_of: batches are as long as a multiple of this.

    Raises:
        ValueError: a truncated pair has nothing to learn.
    """
    encoded = style.encode(rows, tokenizer)
    pairs = [[token for ids, _ in parts for token in ids] for parts in encoded]
    learned = list(map(spans, encoded))
    kept = limit.kept(list(map(len, pairs)), rows, role)
    for number in kept:
        length = learned[number][0][0]
        require(
            length < limit.tokens,
            f"{rows[number].place}: the prompt alone has {length} tokens, "
            f"max_length={limit.tokens} leaves none to learn; set `long_examples: drop`",
        )
    return PairSet(
        ids=[pairs[number][: limit.tokens] for number in kept],
        learned=[learned[number] for number in kept],
        pad_id=tokenizer.pad_token_id,
        pad_to_multiple_of=pad_to_multiple_of,
        rows=[rows[number] for number in kept],
    )


def spans(parts: list[TokenPart]) -> list[Span]:
    """Where the learned parts are.

    Example:
        >>> spans([([1, 7], False), ([8, 2], True), ([5], False), ([2], True)])
        [(2, 4), (5, 6)]
    """
    ends = list(accumulate((len(ids) for ids, _ in parts), initial=0))
    return [(ends[n], ends[n + 1]) for n, (_, learned) in enumerate(parts) if learned]


def padding_frac(lengths: Tensor, batches: list[list[int]]) -> float:
    """Share of the token slots of all batches that hold no token.

    Args:
        lengths: [M] tokens of each row.
        batches: lists of row numbers.
    """
    slots = sum(len(rows) * int(lengths[rows].max()) for rows in batches)
    return 1 - sum(int(lengths[rows].sum()) for rows in batches) / slots
