"""Reading completions: where the answer is, and which number it is.

Pure Python and linear time: no function here can be made slow by what a policy writes.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Container, Mapping, Sequence, Sized
from fractions import Fraction
from itertools import islice, pairwise
from typing import Any

from litgrpo.text.normalization import fold, normalize
from litgrpo.text.number_words import (
    BEHIND_IS,
    CHANGES_BEFORE,
    ENDS_BEFORE,
    ENDS_BEHIND,
    ENDS_BEHIND_A_UNIT,
    MARKS_END_BEFORE,
    MARKS_END_BEHIND,
    MARKS_THROUGH_BEFORE,
    MARKS_THROUGH_BEHIND,
    NEVER_UNITS,
    THROUGH_BEFORE,
    THROUGH_BEHIND,
    UNITS,
)

Message = Mapping[str, object]
Completions = Sequence[str | Sequence[Message]]  # N texts, or N lists of chat messages

MAX_PROMPT = 20_000  # characters of a prompt whose words may name what an answer counts
MAX_DIGITS = 100  # longer digit strings are noise; converting them would take quadratic time

# One number without its sign: 1,080 or 1 080 or 1080, with or without decimals and exponent; .5
# The dot of ".5" must not end a word ("Rs.72") or continue a number ("1.2.3").
MAGNITUDE = re.compile(
    r"(?:(?:[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"|(?<![\w.])\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
)
FRACTION_BAR = re.compile(r" ?/ ?")
LATEX_FRACTION = re.compile(r"\\[dtc]?frac *(?:\{([^{}]*)\} *\{([^{}]*)\}|([0-9]) *([0-9]))")
# 2.5 * 10^3, 2.5 x 10**3, and 10^3 alone
POWER_OF_TEN = re.compile(
    r"( ?[*xX] ?|(?<![\w.,^*]))10 ?(?:\^|\*\*) ?([+-]?[0-9]{1,3})(?!\w|\.[0-9])"
)
# The 2 of "72 m2" or "feet^2" is not a number, but that of "7e2", "5C2" or "x^2" is.
UNIT_EXPONENT = re.compile(r"(?<=[dhimnst])\^?[23](?![0-9])")
# Text around a number that makes it another claim: "x > 5", "at least 5", "5i", "5x", "5 < x".
ARROW_OR_TAG = re.compile(r"[-=]{1,3}>|</?[A-Za-z]{1,10}>")
COMPARISON = "<>\u2264\u2265\u2260"
A_PART = re.compile(r"\b(?:a|an|one) ?$", re.IGNORECASE)  # "a 5th"
ORDINAL = re.compile(r"(?:st|nd|rd|th)\b", re.IGNORECASE)
REPEATED = re.compile(r" times (?!(?:a|an|per|each|every|in|on|more)\b)", re.IGNORECASE)
TIMES = re.compile(r"[\w)] ?[*/] ?[($]*$")
TOKEN = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|\S")
CURRENCY = tuple("$\u20ac\u00a3\u00a5\u20b9\u20bd")
NEARBY = 200  # characters beside a number that are read
# An operation with a letter: "x + 1", "n * 5", "1 - x"; but "a -5" and "72 - I think" may be prose,
# "answer - 5" a sign, and "72/h" a unit.
OPERATION_BEFORE = re.compile(
    r"(?:[A-Za-z)] \+ |(?<![A-Za-z])(?:[A-Za-z] [-*/] |[b-hj-zB-HJ-Z] [-+*/]))[$(]*$"
)
OPERATION_AFTER = re.compile(r" ?(?:[-+*] ?(?:[b-hj-zB-HJ-Z](?!\w)|[aAiI](?! ?\w))|/ ?[xyz](?!\w))")
LATEX_COMMAND = re.compile(r"\\([A-Za-z]+) ?")
WORD = re.compile(r"[A-Za-z]+")
NOUN = re.compile(r"[^\W\d_]+")
SIGN_WORD = re.compile(r"\b(?:minus|negative)[ $(*_`]*$", re.IGNORECASE)
SPACED_SIGN = re.compile(r" ?([^\w ]) ?")
SPACES = re.compile(r"\s+")
BOX_OR_BRACE = re.compile(r"\\boxed *\{|[{}]")
BRACE_DEPTH = {"{": 1, "}": -1}

SIGNS = {"": 1, "+": 1, "-": -1}

# Commands that say how a number looks, not which it is. Any other command left in the text makes it
# unreadable.
LAYOUT = {
    *("left", "right", "text", "textbf", "textit", "mathrm", "mathbf", "mathit", "mathsf", "boxed"),
    *("fbox", "displaystyle", "approx", "quad", "qquad", "circ", "degree", "pounds", "euro"),
}
NEGATION = re.compile(r"\b(?:not|never|cannot|neither|nor)\b|n't\b", re.IGNORECASE)
# Behind a number: "5 is wrong", "5 in total or six", "5. Wait, six", "5 - no".
DENIAL = re.compile(r"\b(?:wrong|incorrect|false|instead|or)\b", re.IGNORECASE)
CORRECTION = re.compile(r"[-.,;:!?\u2014] ?(?:no|wait|actually|sorry|hmm)\b", re.IGNORECASE)
CLAUSE_END = re.compile(r"[.,;!?] ")
SENTENCE_END = re.compile(r"[.;!?](?: |$)")
# The left side of an equation that is no name: "x^2 = 5", "-x = 5", "sqrt(x) = 5", "x != 5".
EXPRESSION = re.compile(r"[!/<>^|+%]|\w\(|(?<!\w)- ?\w")
ODD_SIGN = re.compile(r"^\u2014 ?$|\( ?- ?\)[ $(]*$")  # a dash alone, a minus in brackets

# LaTeX for characters that numbers are written with.
SYMBOLS = (("{,}", ","), ("\\!", ""), ("\\$", "$"), ("\\%", "%"), ("\\times", "*"), ("\\cdot", "*"))
# The spaces of LaTeX, line breaks, and the marks around formulas.
SPACINGS = ("\\,", "\\;", "\\:", "\\ ", "\\\\", "\\(", "\\)", "\\[", "\\]")


def text_of(message: str | Sequence[Message]) -> str:
    """The text of a completion: itself, or the content of its last chat message.

    Example:
        >>> text_of([{"role": "assistant", "content": "Hello"}])
        'Hello'
    """
    return message if isinstance(message, str) else str(message[-1]["content"])


def prompt_text_of(prompt: str | Sequence[Message]) -> str:
    """The text of a prompt: itself, the content of its only message, or its messages with roles.

    Example:
        >>> prompt_text_of([{"role": "user", "content": "1+1?"}])
        '1+1?'
    """
    if isinstance(prompt, str) or len(prompt) == 1:
        return text_of(prompt)
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def list_answers(answer: object) -> list[Any]:
    """Return the accepted reference answers of a row; [] if the row has no answer.

    None, NaN, a blank text, one whose marked answer is empty (`#### `), and an empty list or
    mapping are no answer, alone and in a list of several.

    Example:
        >>> list_answers("7"), list_answers(["7", "", "seven"]), list_answers(" ")
        (['7'], ['7', 'seven'], [])
    """
    several = isinstance(answer, Sequence) and not isinstance(answer, str | bytes)
    return [item for item in (answer if several else [answer]) if _is_answer(item)]  # type: ignore[attr-defined]


def _is_answer(item: object) -> bool:
    if isinstance(item, str):
        marked = extract_answer(item)
        return bool(normalize(item if marked is None else marked).strip())
    if isinstance(item, Sized):
        return len(item) > 0
    return item is not None and bool(item == item)  # noqa: PLR0124 (NaN and NaT differ from themselves)


def find_tagged(text: str, tag: str) -> list[str]:
    """Return the text between each `<tag>` and the next `</tag>`; skip unclosed tags."""
    parts = (part.partition(f"</{tag}>") for part in text.split(f"<{tag}>")[1:])
    return [inside for inside, close, _ in parts if close]


def find_hashed(text: str) -> list[str]:
    """Return the text after each `####` on its line, as in GSM8K answers."""
    return [part.partition("\n")[0].strip() for part in text.split("####")[1:]]


def find_boxed(text: str) -> list[str]:
    r"""Return the argument of every `\boxed{...}`, with balanced braces; skip an unclosed box."""
    boxes, start, depth = [], 0, 0
    for brace in BOX_OR_BRACE.finditer(text):
        if depth:
            depth += BRACE_DEPTH[brace[0][-1]]
            if not depth:
                boxes.append(text[start : brace.start()])
        elif len(brace[0]) > 1:  # a box, not a bare brace
            start, depth = brace.end(), 1
    return boxes


def answer_claims(text: str, *, tag: str = "answer") -> list[str]:
    r"""Everything that the text puts forward as its answer.

    Only the strongest kind of mark counts: `<answer>..</answer>`, else `#### x`, else `\boxed{x}`.
    A mark inside a tag (`<answer>so \boxed{7}</answer>`) narrows the claim.

    Args:
        text: a completion, or a worked reference answer.
        tag: name of the answer tag.

    Returns:
        The claims in order of appearance, stripped; empty if nothing is marked.
    """
    claims = find_tagged(text, tag)
    if claims:
        return [
            inner.strip()
            for claim in claims
            for inner in (find_hashed(claim) or find_boxed(claim) or [claim])
        ]
    return [claim.strip() for claim in find_hashed(text) or find_boxed(text)]


def extract_answer(text: str, *, tag: str = "answer") -> str | None:
    r"""The last marked answer of a text, or None if nothing is marked.

    Example:
        >>> extract_answer("48 + 24 = 72\n#### 72")
        '72'
    """
    claims = answer_claims(text, tag=tag)
    return claims[-1] if claims else None


def extract_reasoning(text: str, *, tag: str = "reasoning", answer_tag: str = "answer") -> str:
    """The last tagged reasoning, else the text before the answer tag; stripped.

    Example:
        >>> extract_reasoning("<reasoning>40 + 32</reasoning><answer>72</answer>")
        '40 + 32'
    """
    tagged = find_tagged(text, tag)
    return (tagged[-1] if tagged else text.partition(f"<{answer_tag}>")[0]).strip()


def reasonings(completions: Completions, tag: str = "reasoning") -> list[str]:
    """The reasoning of each of N completions; see `extract_reasoning`."""
    return [extract_reasoning(text_of(completion), tag=tag) for completion in completions]


def parse_number(text: str, nouns: Container[str] = ()) -> Fraction | None:
    r"""The one number that a text states, exactly; None if it states none or several.

    Reads signs (Unicode minus too), thousands separators, decimals, exponents, fractions, mixed
    numbers, LaTeX. Beside the number may stand what `text/number_words.py` lists: currency, units,
    things that are counted, the words of "the answer is": "about $1,080.50 per week" is 2161/2.
    Beside any other word or sign it is no number: "twice 5", "5 or more", "5k", "2 million". Units
    are not converted: "70%" is 70.

    Args:
        text: an answer.
        nouns: further words, in lower case, that may follow the number like a unit; see
            `find_nouns`.

    Example:
        >>> parse_number("-1 3/4 cups")
        Fraction(-7, 4)
        >>> parse_number("72 or 73") is None
        True
    """
    plain = _plain(text)
    if plain is None:
        return None
    magnitudes = list(islice(MAGNITUDE.finditer(plain), 4))
    if not magnitudes or any(len(match[0]) > MAX_DIGITS for match in magnitudes):
        return None
    gaps = [plain[a.end() : b.start()] for a, b in pairwise(magnitudes)]
    size = _size([match[0] for match in magnitudes], gaps)
    before, after = plain[: magnitudes[0].start()], plain[magnitudes[-1].end() :]
    sign = _sign(before)
    if size is None or sign is None or _is_another_claim(before, after):
        return None
    if NEGATION.search(before + after[:20]) or _is_denied(before, after):
        return None
    has_price = before.rstrip(" (*_")[-1:] in CURRENCY
    if not (
        _may_precede(before) and _may_follow(after, nouns, has_unit=bool(before) and has_price)
    ):
        return None
    return sign * size


def _is_another_claim(before: str, after: str) -> bool:
    """Return True for a bound (x > 5), an operation (x + 5, 5 - x), a factorial or a fifth."""
    if OPERATION_BEFORE.search(before[-20:]) or OPERATION_AFTER.match(after):
        return True
    factorial = after.startswith("!") and not WORD.search(before + after)
    compared = before.rstrip(" =").endswith(tuple(COMPARISON))
    part = ORDINAL.match(after) and A_PART.search(before[-20:])
    product = TIMES.search(before[-20:]) or REPEATED.match(after)
    return bool(factorial or compared or part or product)


def _is_denied(before: str, after: str) -> bool:
    """Return True if the clause around a number makes another one of it, or denies it."""
    clause = SIGN_WORD.sub("", CLAUSE_END.split(before)[-1])
    if not CHANGES_BEFORE.isdisjoint(map(str.casefold, WORD.findall(clause))):
        return True
    left, equals, _ = clause.rpartition("=")
    if ODD_SIGN.search(before) or (equals and EXPRESSION.search(left.rstrip("= "))):
        return True
    sentence = SENTENCE_END.split(after[:NEARBY])[0]
    return bool(DENIAL.search(sentence) or CORRECTION.search(after[:NEARBY]))


def _may_precede(before: str) -> bool:
    """Return True if a number behind this text is the number that the text states."""
    for token in reversed(TOKEN.findall(SIGN_WORD.sub("", before[-NEARBY:]))):
        word = token.casefold()
        if word in MARKS_END_BEFORE:
            return True
        if not (word in MARKS_THROUGH_BEFORE or word in THROUGH_BEFORE or _is_picture(word)):
            return word in ENDS_BEFORE
    return True


def _is_picture(token: str) -> bool:
    return unicodedata.category(token[0]) == "So"


def _may_follow(after: str, nouns: Container[str], has_unit: bool) -> bool:
    """Return True if a number before this text is the number that the text states."""
    if after.startswith(" - "):
        return True
    wants_unit = after[:1].isalpha()  # 5km, but not 5a
    for token, following in pairwise([*TOKEN.findall(after[:NEARBY]), ""]):
        word = token.casefold()
        ends = word in ENDS_BEHIND and (word != "is" or following.casefold() in BEHIND_IS)
        if has_unit and (ends or word in ENDS_BEHIND_A_UNIT):
            return True
        if token in UNITS or (len(word) > 1 and _is_noun(word, nouns)):
            has_unit, wants_unit = True, False
        elif wants_unit:
            return False
        elif word in MARKS_END_BEHIND or ends:
            return True
        elif word in ("/", "-"):
            wants_unit = True  # 5/h, 5-hour
        elif not (word in MARKS_THROUGH_BEHIND or word in THROUGH_BEHIND or _is_picture(word)):
            return False
    return not wants_unit


def _is_noun(word: str, nouns: Container[str]) -> bool:
    forms = {word, word.removesuffix("s"), word.removesuffix("es"), f"{word}s"}
    forms |= {f"{form[:-1]}y" for form in forms if form.endswith("i")}
    return any(form in UNITS or form in nouns for form in forms)


def find_nouns(prompt: object) -> frozenset[str]:
    """Return the words of a prompt that may follow a number like a unit."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        prompt = " ".join(str(message.get("content")) for message in prompt)
    words = {word.casefold() for word in NOUN.findall(normalize(str(prompt)[:MAX_PROMPT]))}
    return frozenset(word for word in words - NEVER_UNITS if len(word) > 2)  # noqa: PLR2004


def _plain(text: str) -> str | None:
    """The text without LaTeX and odd characters; None where an unreadable command remains."""
    text = ARROW_OR_TAG.sub(" ", normalize(text).replace("~", " "))
    for old, new in SYMBOLS:
        text = text.replace(old, new)
    for spacing in SPACINGS:
        text = text.replace(spacing, " ")
    text = SPACES.sub(" ", text)
    text = LATEX_FRACTION.sub(_plain_fraction, text)
    text = LATEX_COMMAND.sub(lambda match: " " if match[1] in LAYOUT else match[0], text)
    if "\\" in text:
        return None
    text = text.translate(str.maketrans("", "", "{}"))
    text = POWER_OF_TEN.sub(lambda match: f"{'' if match[1] else 1}e{match[2]}", text)
    return SPACES.sub(" ", UNIT_EXPONENT.sub("", text).replace("^ ", " ")).strip()


def _plain_fraction(match: re.Match[str]) -> str:
    r"""`\frac{-3}{4}` as ` -3/4 `; left alone where a part is not a plain number."""
    above, below = (match[1] or match[3] or "").strip(), (match[2] or match[4] or "").strip()
    readable = MAGNITUDE.fullmatch(above.removeprefix("-")) and MAGNITUDE.fullmatch(below)
    return f" {above}/{below} " if readable else match[0]


def _size(numbers: Sequence[str], gaps: Sequence[str]) -> Fraction | None:
    """The number that magnitudes and the text between them make: 72, 3/4 or 1 3/4; or None."""
    values = [Fraction(number.replace(",", "").replace(" ", "")) for number in numbers]
    if not gaps:
        return values[0]
    *whole_number, above, below = values
    # 3/4, or 1 3/4: a whole number, one space, and a fraction below 1.
    mixed = gaps[:-1] == [" "] and whole_number[0].denominator == 1 and above < below
    readable = below and FRACTION_BAR.fullmatch(gaps[-1]) and (mixed or not whole_number)
    return sum(whole_number, above / below) if readable else None


def _sign(before: str) -> int | None:
    """1 or -1 by the text before a number; None where that is an expression ("x-72", "x/72")."""
    before = before.lower().rstrip(" $\u20ac\u00a3\u00a5\u20b9(*_`")
    if before.endswith(("minus", "negative")):
        return -1
    mark = before[-1:] if before.endswith(tuple("+-")) else ""
    rest = before.removesuffix(mark)
    # A sign right behind a letter or digit is an operator, and so is one before another sign.
    subtracts = mark and rest[-1:].isalnum()
    operand = rest.rstrip(" $(").endswith(tuple("+-/^\u221a\u00b1"))
    return None if subtracts or operand else SIGNS[mark]


def same_text(left: str, right: str) -> bool:
    """Compare two answers, ignoring case, surrounding markup and a final full stop."""
    # The Unicode spelling (see `normalize`) and the number of spaces do not matter, nor do spaces
    # beside a sign: `(3, 4)` is `(3,4)`.
    return _bare(left) == _bare(right)


def _bare(text: str) -> str:
    words = " ".join(fold(text).split())
    bare = words.strip("$*`_.\u3002 ") or words  # the answer may be a full stop
    return SPACED_SIGN.sub(r"\1", bare)
