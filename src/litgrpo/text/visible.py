"""Texts of a model for a terminal or a page: nothing in them acts, hides or reorders."""

from __future__ import annotations

import unicodedata

from litgrpo.text.secrets import mask_text

MAX_EXCERPT = 200  # characters of a foreign text in a message
ACTING = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # categories of Unicode that are not seen
KEPT = "\n\t"
JOINERS = "\u200c\u200d"  # without these some scripts and emoji fall apart


def visible(text: object, max_chars: int | None = None) -> str:
    r"""Make every character of a text visible, and shorten it to `max_chars`, if given.

    Example:
        >>> visible("a\u202eb\x1b[2J"), visible("abcdef", 3)
        ('a[U+202E]b[U+001B][2J', 'abc ... [3 more characters]')
    """
    # Control characters (also those that command a terminal), marks that reverse the direction of
    # writing, and halves of characters stand as their numbers.
    full_text = str(text)
    more = 0 if max_chars is None else len(full_text) - max_chars
    visible_text = "".join(map(_seen, full_text[:max_chars].replace("\r\n", "\n")))
    return f"{visible_text} ... [{more:,} more characters]" if more > 0 else visible_text


def _seen(character: str) -> str:
    is_layout = character in KEPT or character in JOINERS
    acts = not is_layout and unicodedata.category(character) in ACTING
    return f"[U+{ord(character):04X}]" if acts else character


def excerpt(text: str, max_chars: int = MAX_EXCERPT) -> str:
    r"""Return the beginning of a foreign text as one visible line without keys.

    Example:
        >>> excerpt("a\nb\x1b[2J")
        'a b[U+001B][2J'
    """
    # Masked before it is cut: half a key is not recognized.
    text = mask_text(text[: 100 * max_chars])
    return visible(" ".join(text.split()))[:max_chars]
