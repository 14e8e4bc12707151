"""Show texts of a model safely: nothing in them acts, hides or reorders the page."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from litgrpo.callbacks.completions import episode_messages
from litgrpo.text.visible import visible

MAX_CHARS = 1200  # shown of a text


@dataclass(frozen=True)
class MessageDiff:
    """A message, with the part that differs from an earlier one.

    Args:
        role: policy, prompt, or the source of an observation.
        same: its beginning, as in the earlier text.
        new: the part that differs.
        rest: its end, as in the earlier text.
        reward: reward of the turn; "" if it has none.
    """

    role: str
    same: str
    new: str
    rest: str
    reward: str = ""


def mark_difference(text: str, earlier: str | None) -> tuple[str, str, str]:
    """Split a text into three parts: unchanged, changed, unchanged.

    Args:
        text: the text.
        earlier: the text to compare with; None marks nothing.
    """
    if earlier is None or text == earlier:
        return text, "", ""
    start = _common_prefix_length(text, earlier)
    end = len(text) - _common_prefix_length(text[start:][::-1], earlier[start:][::-1])
    return text[:start], text[start:end], text[end:]


def _common_prefix_length(left: str, right: str) -> int:
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def diff_messages(row: dict[str, Any], earlier: dict[str, Any] | None = None) -> list[MessageDiff]:
    """Return the messages of a completion: one, or those of an episode.

    Args:
        row: a completion, with `messages` if it is an episode.
        earlier: another one of the same prompt; differences to it are marked.
    """
    earlier_texts = [text for _, text, _ in _messages(earlier)] if earlier is not None else []
    diffs = []
    for number, (role, text, reward) in enumerate(_messages(row)):
        if earlier is None:
            old = None
        else:
            old = earlier_texts[number] if number < len(earlier_texts) else ""
        diffs.append(MessageDiff(role, *mark_difference(text, old), reward))
    return diffs


def _messages(row: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return role, text and reward of each message after the prompt."""
    _, *messages = episode_messages({**row, "prompt": ""})
    return [
        (visible(role, MAX_CHARS), visible(text, MAX_CHARS), reward)
        for role, text, reward in messages
    ]
