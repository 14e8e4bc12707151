"""What a judge that is a model reads: a conversation as token ids within the model's limit."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jinja2

log = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, str]]
Form = Literal["chat", "pair", "text"]
Overlong = Literal["truncate", "mask"]
Encoded = dict[str, list[int]]


@dataclass
class JudgeInput:
    """Turns what was asked and what was answered into what a model reads.

    Args:
        tokenizer: the model's.
        form: the tokenizer's `chat` format, a `pair` of texts, or one `text`.
        max_len: tokens at most; None for no limit.
        overlong: `truncate` cuts the start of what was asked, system messages excepted; `mask`
            gives up. What was answered is never cut.
        counts: how many were over the limit, and how many of these were masked.
    """

    tokenizer: Any
    form: Form
    max_len: int | None
    overlong: Overlong = "truncate"
    counts: Counter[str] = field(default_factory=Counter)

    def __call__(self, asked: Messages, answer: str) -> Encoded | None:
        """Token ids, and segment ids where the model has them; None for what does not fit."""
        encoded = self.encode(asked, answer)
        over = self._over(encoded)
        if over <= 0:
            return encoded
        shorter, excess = asked, 0
        while over > 0 and self.overlong == "truncate":
            excess += over  # a cut in the middle of a word may leave more tokens than expected
            left = without_start(asked, excess, self.tokenizer)
            if left is None:
                break
            shorter = left
            over = self._over(encoded := self.encode(shorter, answer))
        self._count(fits=over <= 0)
        return encoded if over <= 0 else None

    def encode(self, asked: Messages, answer: str) -> Encoded:
        """Token ids without a limit; special tokens as the tokenizer or its chat format says.

        Raises:
            ValueError: the chat format refuses the messages.
        """
        if self.form == "chat":
            messages = [*asked, {"role": "assistant", "content": answer}]
            try:
                text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            except jinja2.TemplateError as error:
                raise ValueError(
                    f"reward model: its chat template says: {error}; form: text or pair does"
                    " without it"
                ) from error
            # A chat format writes its begin token as text.
            encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        else:
            question = "\n".join(message["content"] for message in asked)
            texts = (question, answer) if self.form == "pair" else (question + answer,)
            encoded = self.tokenizer(*texts, verbose=False)
        names = ("input_ids", "token_type_ids")
        return {name: list(encoded[name]) for name in names if name in encoded}

    def _over(self, encoded: Encoded) -> int:
        return 0 if self.max_len is None else len(encoded["input_ids"]) - self.max_len

    def _count(self, *, fits: bool) -> None:
        self.counts["over the limit"] += 1
        self.counts["masked"] += not fits
        if self.counts["over the limit"].bit_count() == 1:  # each time that the number doubles
            log.warning(
                "reward model: so far %d inputs were over its limit of %d tokens: %d lost the start"
                " of the prompt, %d are masked",
                self.counts["over the limit"],
                self.max_len,
                self.counts["over the limit"] - self.counts["masked"],
                self.counts["masked"],
            )


def without_start(messages: Messages, num_tokens: int, tokenizer: Any) -> Messages | None:
    """The messages without that many tokens from the start, system messages left whole.

    Returns:
        None if there are no more tokens than that.
    """
    shorter = []
    for message in messages:
        if num_tokens <= 0 or message["role"] == "system":
            shorter.append(message)
            continue
        ids = tokenizer(message["content"], add_special_tokens=False, verbose=False)["input_ids"]
        rest = tokenizer.decode(ids[num_tokens:]) if len(ids) > num_tokens else ""
        num_tokens -= len(ids)
        shorter.append({**message, "content": rest})
    return None if num_tokens > 0 else shorter


def as_messages(asked: str | Messages) -> Messages:
    """What was asked as messages; a text is a user's.

    Example:
        >>> as_messages("Why?")
        [{'role': 'user', 'content': 'Why?'}]
    """
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else asked


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Row numbers in batches of about equal length, the longest first; empty rows in none.

    Args:
        lengths: tokens of each row.
        max_tokens: rows times the longest of them at most; a longer row goes alone.

    Example:
        >>> list(batches_by_length([2, 9, 3, 0, 2], max_tokens=6))
        [[1], [2, 0], [4]]
    """
    batch: list[int] = []
    for row in sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
