"""Special tokens that data write as text, and tokens that a tokenizer does not know: said once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from litgrpo.distributed.messages import rank_zero_info

if TYPE_CHECKING:  # slow to import; only named here
    from transformers import PreTrainedTokenizerBase


def special_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts that the tokenizer reads as one special token each, longest first."""
    added = tokenizer.added_tokens_decoder.values()
    marked = {str(token) for token in added if token.special} | {*tokenizer.all_special_tokens}
    return sorted(filter(None, marked), key=lambda text: (-len(text), text))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The numbers of these tokens, without that of the unknown token, which a text may be."""
    numbers: Any = tokenizer.convert_tokens_to_ids(special_texts(tokenizer))
    return set(numbers) - {tokenizer.unk_token_id}


def plain_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text in which no special token stands, whatever it writes.

    Added tokens that are not special are read as they are. A special token that is a word of the
    tokenizer, too, and cannot be spelled otherwise is left out.

    Args:
        text: of a stranger.
        tokenizer: of the model.
    """
    never = special_ids(tokenizer)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    return [token for token in ids if token not in never]


def report_special_tokens(
    role: str, given: Iterable[list[str]], tokenizer: PreTrainedTokenizerBase, *, split: bool
) -> None:
    """Say how many rows write a special token, and what becomes of it.

    Args:
        role: name of the set.
        given: the texts of each row that come from the data.
        tokenizer: of the model.
        split: whether they are read as plain text.
    """
    known, rows = special_texts(tokenizer), [*given]
    found = [[mark for mark in known if any(mark in text for text in texts)] for texts in rows]
    number, marks = sum(map(bool, found)), sorted({mark for marks in found for mark in marks})
    becomes = {
        True: "read as plain text (split_special_tokens)",
        False: "read as those tokens; `split_special_tokens: true` reads them as plain text",
    }[split]
    if number:
        named = ", ".join(map(repr, marks[:3]))
        rank_zero_info(
            f"{role}: {number} of {len(rows)} prompts write special tokens as text ({named}): "
            f"{becomes}"
        )


def report_unknown(role: str, ids: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> None:
    """Say what share of the tokens of a set is the unknown token, if any is."""
    unknown = tokenizer.unk_token_id
    number = sum(row.count(unknown) for row in ids) if unknown is not None else 0
    total, rows = sum(map(len, ids)), sum(unknown in row for row in ids)
    if number:
        rank_zero_info(
            f"{role}: {number / total:.1%} of the prompt tokens are unknown to the tokenizer "
            f"({tokenizer.unk_token!r}), in {rows} of {len(ids)} prompts: the model cannot see what"
            " stands there; take a tokenizer that knows these texts (its own training, or one of "
            "bytes)"
        )
