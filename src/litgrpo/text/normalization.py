"""One Unicode spelling of a text, for comparisons that do not depend on it."""

from __future__ import annotations

import re
import unicodedata

RAISED = re.compile("[\u00b2\u00b3\u00b9\u2070\u2071\u2074-\u207f]+")  # digits, signs, i and n
SIMPLE_POWER = re.compile("[+-]?[0-9]+|.")
LOWERED = re.compile("([^\\W\\d_])([\u2080-\u2089]+)(?![0-9\u2080-\u2089])|[\u2080-\u2089]+")
# What has no width and no meaning, beside the characters of the category Cf.
INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
# Characters that people write for one another, beyond those of NFKC.
SAME = {
    # minus signs, hyphens and the en dash; not the em dash, which separates
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\u2796\ufe63\uff0d", "-"),
    **dict.fromkeys("\u2018\u2019\u201b\u2032\u00b4", "'"),
    **dict.fromkeys("\u201c\u201d\u201f", '"'),
    **dict.fromkeys("\u00d7\u22c5\u00b7\u2217\u2062", "*"),  # the last is LaTeX's invisible times
    **{"\u2044": "/", "\u2215": "/", "\u2236": ":", "\u2063": ",", "\u2064": "+"},
    **{"\u066a": "%", "\u066b": ".", "\u066c": ",", "\u00ba": "\u00b0"},
}
# A character, and what combines with it. Longer pieces are cut, because sorting the marks of one
# letter takes quadratic time.
COMBINING = re.compile(r"[\x00-\x7f]?[^\x00-\x7f]{1,300}")


class _Spellings(dict[int, str]):
    """{code point: its spelling}, which fills itself."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = spelling = _spell(character)
        return spelling


def normalize(text: str) -> str:
    r"""Return a text in the one Unicode spelling in which texts are compared.

    That is NFKC: letters of one or several code points, full-width forms, ligatures and special
    spaces. Also, decimal digits of all scripts become ASCII digits, characters without width
    (byte-order mark, soft hyphen, joiners) are removed, and minus signs, quotation marks and
    multiplication signs have one form each. Where NFKC would make another number, the notation is
    written out: a raised 2 becomes `^2`, a half ` 1/2`, a lowered 2 `_2` (but `2` behind a letter,
    as in the formula of water); circled digits stay. Case stays. Takes linear time.

    Example:
        >>> normalize("\ufeff\uff17\u0662 clips"), normalize("10\u00b2"), normalize("2\u00bd")
        ('72 clips', '10^2', '2 1/2')
    """
    if text.isascii():
        return text
    text = RAISED.sub(_power, text)
    text = LOWERED.sub(_index, text).translate(_spellings)
    return COMBINING.sub(lambda match: unicodedata.normalize("NFC", match[0]), text)


def fold(text: str) -> str:
    """Return a text in the one spelling, without the difference of upper and lower case."""
    return normalize(normalize(text).casefold())


def _power(match: re.Match[str]) -> str:
    raised = unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")
    return f"^{raised}" if SIMPLE_POWER.fullmatch(raised) else f"^({raised})"


def _index(match: re.Match[str]) -> str:
    if match[1]:
        return match[1] + unicodedata.normalize("NFKC", match[2])
    return "_" + unicodedata.normalize("NFKC", match[0])


def _spell(character: str) -> str:
    if character in SAME:
        return SAME[character]
    if INVISIBLE.match(character) or unicodedata.category(character) == "Cf":
        return ""
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    kind = unicodedata.decomposition(character).partition(" ")[0]
    # A label, no digit of the number before it.
    if kind == "<circle>":
        return character
    spelling = "".join(
        SAME.get(letter, letter) for letter in unicodedata.normalize("NFKC", character)
    )
    return f" {spelling}" if kind == "<fraction>" else spelling


_spellings = _Spellings()
