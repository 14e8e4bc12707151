"""Texts of a model on a page: nothing in them acts, hides or reorders what stands around it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from litgrpo.callbacks.episodes import lines
from litgrpo.text.visible import visible as every_character_seen

LONGEST = 1200  # characters that are shown of a text


@dataclass(frozen=True)
class Said:
    """A message on the page.

    Args:
        who: policy, prompt, or who was heard.
        same: how it begins like the text that it is compared with.
        new: where it differs.
        rest: how it ends like that text.
        reward: of the turn; "" where there is none.
    """

    who: str
    same: str
    new: str
    rest: str
    reward: str = ""


def visible(text: object, longest: int = LONGEST) -> str:
    r"""A text of which every character can be seen, cut where it is long.

    Args:
        text: anything; what is no text is shown as one.
        longest: characters.

    Example:
        >>> visible("a\u202eb\x00"), visible("abcdef", 3)
        ('a[U+202E]b[U+0000]', 'abc ... [3 more characters]')
    """
    whole = str(text)
    more = len(whole) - longest
    return every_character_seen(whole[:longest]) + (
        f" ... [{more:,} more characters]" if more > 0 else ""
    )


def marked_difference(text: str, earlier: str | None) -> tuple[str, str, str]:
    """The text in three parts: as before, different, as before.

    Args:
        text: now.
        earlier: before; without one nothing is different.

    Example:
        >>> marked_difference("1+1 is 2.", "1+1 is 3.")
        ('1+1 is ', '2', '.')
    """
    if earlier is None or text == earlier:
        return text, "", ""
    start = sum(1 for _ in takewhile(_equal, zip(text, earlier, strict=False)))
    behind = zip(reversed(text[start:]), reversed(earlier[start:]), strict=False)
    end = len(text) - sum(1 for _ in takewhile(_equal, behind))
    return text[:start], text[start:end], text[end:]


def _equal(pair: tuple[str, str]) -> bool:
    return pair[0] == pair[1]


def dialogue(row: dict[str, Any], earlier: dict[str, Any] | None = None) -> list[Said]:
    """What was said in answer to a prompt: one message, or those of an episode.

    Args:
        row: a completion, with `messages` if it is an episode.
        earlier: another one to the same prompt, whose differences are marked.
    """
    before = [] if earlier is None else [text for _, text, _ in _lines(earlier)]
    said = []
    for place, (who, text, reward) in enumerate(_lines(row)):
        old = before[place] if place < len(before) else None if earlier is None else ""
        said.append(Said(who, *marked_difference(text, old), reward))
    return said


def _lines(row: dict[str, Any]) -> list[tuple[str, str, str]]:
    found = [*lines({**row, "prompt": ""})][1:]
    return [(visible(who), visible(text), reward) for who, text, reward in found]
