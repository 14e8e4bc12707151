"""Tokenize texts: special tokens that data write as text, placeholders, unknown tokens."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from litgrpo.arguments import first_line, require
from litgrpo.data.messages import Messages
from litgrpo.distributed.messages import rank_zero_info

if TYPE_CHECKING:  # slow to import; used in annotations only
    from transformers import PreTrainedTokenizerBase

# Placeholders are a number between characters of the private use area, which chat templates and
# data do not contain. Equally long ones leave a template's line lengths alone.
FIRST_ADDED = 100_000


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hub id or folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of the library, of many types for a damaged file
        reason = first_line(error)
        raise ValueError(f"data tokenizer {name!r} could not be loaded: {reason}") from error


def require_pad_and_eos(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer; ValueError if it has no pad token or no end token."""
    ids = {"pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id}
    for name, token_id in ids.items():
        hint = f"set tokenizer.{name}_token to a token that no text contains and save it"
        require(
            token_id is not None,
            f"the tokenizer ({tokenizer.name_or_path}) has no {name} token; {hint}",
        )
    return tokenizer


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return the token ids of each text, not truncated, without tokens that are added to texts."""
    if not texts:
        return []
    encoded: Any = tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        verbose=False,
    )
    return list(encoded["input_ids"])


# Texts before which a piece is encoded if a token would span the boundary before it.
ANCHORS = (".", "\n", "0", "a", ")")


def encode_pieces(
    rows: list[list[str]], tokenizer: PreTrainedTokenizerBase
) -> list[list[list[int]]]:
    """Return, for each row, the token ids of pieces of text that follow each other."""
    # A text that is encoded alone can get other tokens than within a longer text: tokenizers such
    # as Llama 2's write a space before every text. So the ids of a piece are those that it adds to
    # the text before it. If a token would span the boundary, the piece begins with its own token,
    # as a generated text does; else the ids together are those of the whole text.
    special = special_token_texts(tokenizer)
    pattern = re.compile("|".join(map(re.escape, special))) if special else None
    windows = [window for row in rows for window in _windows(row, pattern)]
    ids = iter(tokenize(tokenizer, [text for pair in windows for text in pair]))
    encoded = iter(list(zip(ids, ids, strict=True)))
    return [[_continue_with(*next(encoded), piece, tokenizer) for piece in row] for row in rows]


def _windows(pieces: list[str], special: re.Pattern[str] | None) -> Iterator[tuple[str, str]]:
    """Yield each piece's text before it, from the last special token on, and both together.

    Special tokens split a text: what is before one does not change the tokens after it.
    """
    before = ""
    for piece in pieces:
        matches = [*special.finditer(before)] if special else []
        before = before[matches[-1].start() :] if matches else before
        yield before, before + piece
        before += piece


def _continue_with(
    before: list[int], both: list[int], piece: str, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    if both[: len(before)] == before:
        return both[len(before) :]
    for anchor in ANCHORS:
        alone, together = tokenize(tokenizer, [anchor, anchor + piece])
        if together[: len(alone)] == alone:
            return together[len(alone) :]
    return tokenize(tokenizer, [piece])[0]


def added_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens, such as an end token, that are added before and after every text."""
    bare, complete = tokenize(tokenizer, ["a"])[0], list(tokenizer("a").input_ids)
    starts = (n for n in range(len(complete)) if complete[n : n + len(bare)] == bare)
    start = next(starts, 0)
    return complete[:start], complete[start + len(bare) :]


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def special_token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts that the tokenizer encodes as one special token each, longest first."""
    added = tokenizer.added_tokens_decoder.values()
    texts = {str(token) for token in added if token.special} | {*tokenizer.all_special_tokens}
    return sorted(filter(None, texts), key=lambda text: (-len(text), text))


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of special tokens, except the unknown token, which any text may need."""
    numbers: Any = tokenizer.convert_tokens_to_ids(special_token_texts(tokenizer))
    return set(numbers) - {tokenizer.unk_token_id}


def encode_as_plain_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return token ids of a text without any special token, even if the text writes one."""
    # Added tokens that are not special are encoded as usual. A special token that is also a word of
    # the vocabulary, and cannot be spelled otherwise, is left out.
    special = special_token_ids(tokenizer)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    return [token for token in ids if token not in special]


def encode_with_placeholders(
    text: str, placeholders: dict[str, str], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Return token ids of a text with {placeholder: text}, whose special tokens are plain text."""
    ids: list[int] = []
    for piece in filter(None, re.split("(\ue000[0-9]+\ue001)", text)):
        if piece in placeholders:
            ids += encode_as_plain_text(placeholders[piece], tokenizer)
        else:
            ids += tokenize(tokenizer, [piece])[0]
    return ids


class Placeholders:
    """Placeholders of texts that others wrote, for a chat template to render.

    A template must not see special tokens of such texts: it renders placeholders, which are then
    encoded as the plain text that they represent.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, texts: Mapping[str, str] | None = None
    ) -> None:
        self.texts = dict(texts or {})
        self._placeholders = {text: placeholder for placeholder, text in self.texts.items()}
        marks = [*special_token_texts(tokenizer), "\ue000"]
        self._special = re.compile("|".join(map(re.escape, marks)))

    def finds_special(self, value: Any) -> bool:
        """True if a text in a JSON value, or the name of a field, writes a special token."""
        return any(self._special.search(text) for text in texts_in(value))

    def hide(self, value: Any) -> Any:
        """Return a JSON value with placeholders for the special tokens in its texts and names."""
        if isinstance(value, str):
            return self._special.sub(lambda special: self._placeholder_of(special[0]), value)
        if isinstance(value, Mapping):
            return {self.hide(name): self.hide(inner) for name, inner in value.items()}
        return [self.hide(inner) for inner in value] if isinstance(value, list | tuple) else value

    def hide_text(self, text: str) -> str:
        """Return a text, or one placeholder for the whole of it if it writes a special token."""
        return self._placeholder_of(text) if self._special.search(text) else text

    def hide_messages(self, messages: Messages) -> Messages:
        """Return messages with placeholders for contents and parts that write a special token."""
        return [
            {
                self.hide(name): self.hide_text(value)
                if name == "content" and isinstance(value, str)
                else self.hide(value)
                for name, value in message.items()
            }
            for message in messages
        ]

    def _placeholder_of(self, text: str) -> str:
        if text not in self._placeholders:
            placeholder = f"\ue000{FIRST_ADDED + len(self.texts)}\ue001"
            self._placeholders[text], self.texts[placeholder] = placeholder, text
        return self._placeholders[text]


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts of a JSON value and the names of its fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from texts_in(name)
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


class TokenCounts:
    """Counts prompts that write special tokens as text, and unknown tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.special = tokenizer, special_token_texts(tokenizer)
        self.num_rows = self.num_tokens = self.num_unknown = self.num_with_unknown = 0
        self.num_marked, self.marks = 0, set[str]()

    def add(self, texts: list[str], ids: list[int]) -> None:
        """Count a prompt, with the texts that come from the data and its token ids."""
        marks = [mark for mark in self.special if any(mark in text for text in texts)]
        unknown = self.tokenizer.unk_token_id
        num_unknown = 0 if unknown is None else ids.count(unknown)
        self.marks.update(marks)
        self.num_marked += bool(marks)
        self.num_rows += 1
        self.num_tokens += len(ids)
        self.num_unknown += num_unknown
        self.num_with_unknown += num_unknown > 0

    def report(self, role: str, *, split: bool) -> None:
        """Log the counts that are not zero; `split` says that special tokens become plain text."""
        if self.num_marked:
            effect = (
                "read as plain text (split_special_tokens)"
                if split
                else "read as those tokens; `split_special_tokens: true` reads them as plain text"
            )
            examples = ", ".join(map(repr, sorted(self.marks)[:3]))
            rank_zero_info(
                f"{role}: {self.num_marked} of {self.num_rows} prompts write special tokens as "
                f"text ({examples}): {effect}"
            )
        if self.num_unknown:
            rank_zero_info(
                f"{role}: {self.num_unknown / self.num_tokens:.1%} of the prompt tokens are "
                f"unknown to the tokenizer ({self.tokenizer.unk_token!r}), in "
                f"{self.num_with_unknown} of {self.num_rows} prompts: the model cannot read these "
                "characters; use a tokenizer that was trained on such texts, or one of bytes"
            )


class TokenFingerprint:
    """Hash of the token ids of rows in their order: all that a model reads.

    Example:
        >>> first, second = TokenFingerprint(), TokenFingerprint()
        >>> first.add([1, 2], [3])
        >>> second.add([1], [2, 3])
        >>> str(first) == str(second)
        False
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, *rows: Sequence[int]) -> None:
        """Add rows."""
        for ids in rows:
            self._digest.update(array("q", [len(ids), *ids]).tobytes())

    def __str__(self) -> str:
        """Return the hash of what was added so far."""
        return self._digest.hexdigest()[:16]
