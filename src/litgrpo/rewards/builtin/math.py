"""Rewards for correct answers.

Numbers are compared exactly, so no correct answer fails, and only a committed answer gets credit.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from datetime import date, time
from decimal import Decimal
from fractions import Fraction
from functools import cache
from itertools import islice
from math import isfinite
from numbers import Real
from typing import Any

from litgrpo.arguments import above, require
from litgrpo.rewards.calls import UnusableReward, add_check, limit_rows
from litgrpo.text.answers import (
    Completions,
    answer_claims,
    extract_answer,
    find_nouns,
    find_tagged,
    list_answers,
    parse_number,
    same_text,
    text_of,
)
from litgrpo.text.normalization import normalize

MAX_ANSWER_WORDS = 20  # of an answer that is a number
MAX_QUESTION_WORDS = 3  # "72 clips?" is an answer; a longer question is a copy of the prompt
UNESCAPED_DOLLAR = re.compile(r"(?<!\\)\$")

# Data sets also hold Decimals, truth values and dates.
Reference = str | int | float | Decimal | date | time
Nouns = frozenset[str]  # words of a prompt that may follow a number, as in `find_nouns`
References = Reference | Sequence[Reference] | None  # several accepted answers: any is correct


def check_answers(answer: Sequence[References]) -> None:
    """Check before training that each reference answer can be parsed."""
    for row in answer:
        for reference in list_answers(row):
            try:
                parse_reference(reference)
            except ValueError as error:
                raise UnusableReward(str(error)) from error


@add_check(check_answers)
def correctness(
    prompts: Sequence[object],
    completions: Completions,
    answer: Sequence[References],
    *,
    require_tags: bool = True,
    answer_tag: str = "answer",
) -> list[float | None]:
    r"""Return 1 if the completion's answer equals the reference answer, else 0.

    Numbers are compared exactly, regardless of formatting (`$1,080.00`, `1080`,
    `\frac{2160}{2}`, `<answer>1080 feet</answer>`). A reference answer that is not a number is
    compared as text. Beside the number may stand units, currency, words of the prompt and the
    words of an answer ("the answer is", "she has"); with any other word or sign it is no answer
    ("twice 5", "5 or more", "5k"). The completion must commit to one answer: several different
    answers, several numbers inside one answer, a number in more than 20 words or in a question, an
    empty or unclosed tag get 0.

    Args:
        require_tags: take answers from `<answer>..</answer>` only. If false, also from `#### x`,
            `\boxed{x}` or the last line, in this order.
        answer_tag: name of the tag.

    Returns:
        N rewards in {0, 1}; None without a reference answer.

    Example:
        >>> texts = ["<answer>$1,080.00</answer>", "<answer>1080 or 1081</answer>", "1080"]
        >>> correctness(["?"] * 3, texts, [1080, 1080, 1080])
        [1.0, 0.0, 0.0]
    """

    def score(text: str, reference: Reference, nouns: Nouns) -> float | None:
        expected = parse_reference(reference, nouns)
        if expected == "":
            return None
        claims = find_claims(text, require_tags=require_tags, tag=answer_tag)
        return float(bool(claims) and all(_equals(claim, expected, nouns) for claim in claims))

    return score_rows(score, prompts, completions, answer)


def score_rows(
    score: Callable[[str, Reference, Nouns], float | None],
    prompts: Sequence[object],
    completions: Completions,
    answer: Sequence[References],
) -> list[float | None]:
    """Return `score(text, reference, nouns of the prompt)` of every row, the best of several.

    None, not scored, for rows without a reference answer, and if no reference can be parsed.
    """
    rewards = []
    for prompt, completion, references in zip(prompts, completions, answer, strict=True):
        nouns = find_nouns(prompt)
        scores = [score(text_of(completion), one, nouns) for one in list_answers(references)]
        rewards.append(max((one for one in scores if one is not None), default=None))
    return rewards


@add_check(check_answers)
def gsm8k(
    prompts: Sequence[object],
    completions: Completions,
    answer: Sequence[References],
) -> list[float | None]:
    r"""Return 1 if the answer equals that of a worked GSM8K solution, else 0; tags are optional.

    The answer is taken from `<answer>..</answer>`, else after `####`, else from `\boxed{}`, else
    it is the single number of the last line. For models that were not prompted for a format;
    `correctness` requires the tags.

    Returns:
        N rewards in {0, 1}; None without a reference answer.

    Example:
        >>> gsm8k(["?"], ["48 / 2 = 24 and 48 + 24 = 72, so she sold 72."], ["... #### 72"])
        [0.0]
        >>> gsm8k(["?"], ["48 / 2 = 24.\nShe sold 72 clips."], ["... #### 72"])
        [1.0]

    Source: Cobbe et al. 2021, arXiv:2110.14168.
    """
    return correctness(prompts, completions, answer, require_tags=False)


@add_check(check_answers)
def exact(
    prompts: Sequence[object],
    completions: Completions,
    answer: Sequence[References],
    *,
    answer_tag: str | None = "answer",
) -> list[float | None]:
    """Return 1 if the answer equals the reference answer character by character, else 0.

    For answers whose spelling matters: code, names, labels. Unicode spelling counts, too.
    Surrounding whitespace is ignored.

    Args:
        answer_tag: name of the tag around the answer, which must appear once; None compares the
            whole completion.

    Returns:
        N rewards in {0, 1}; None without a reference answer.

    Example:
        >>> exact(["?"] * 2, ["<answer>Paris</answer>", "<answer>paris</answer>"], ["Paris"] * 2)
        [1.0, 0.0]
    """

    def score(text: str, reference: Reference, nouns: Nouns) -> float:
        tagged = [text] if answer_tag is None else find_tagged(text, answer_tag)
        said = tagged[0].strip() if len(tagged) == 1 else ""
        return float(bool(said) and said in _spellings(reference))

    return score_rows(score, prompts, completions, answer)


@add_check(check_answers)
def closeness(
    prompts: Sequence[object],
    completions: Completions,
    answer: Sequence[References],
    *,
    tolerance: float = 0.1,
    require_tags: bool = True,
    answer_tag: str = "answer",
) -> list[float | None]:
    """Return 1 for the correct number, falling linearly to 0 at a relative error of `tolerance`.

    For estimates and measurements. A policy can get part of the reward by guessing; use
    `correctness` for arithmetic.

    Args:
        answer: N reference answers that are numbers.
        tolerance: relative error at which the reward is 0; the absolute error if the reference
            is 0.
        require_tags: as in `correctness`.
        answer_tag: name of the tag.

    Returns:
        N rewards in [0, 1]; None without a reference answer.

    Raises:
        ValueError: a reference answer is not a number.

    Example:
        >>> closeness(["?"] * 2, ["<answer>95</answer>", "<answer>50</answer>"], [100, 100])
        [0.5, 0.0]
    """
    above("tolerance", tolerance, 0)

    def score(text: str, reference: Reference, nouns: Nouns) -> float | None:
        expected = parse_reference(reference, nouns)
        if isinstance(expected, str):
            return None
        claims = find_claims(text, require_tags=require_tags, tag=answer_tag)
        numbers = {parse_number(claim, nouns) for claim in claims}
        if len(numbers) != 1:
            return 0.0
        number = numbers.pop()
        if number is None:
            return 0.0
        error = abs(number - expected) / (abs(expected) or 1)
        return float(max(Fraction(0), 1 - error / Fraction(str(tolerance))))

    for prompt, row in zip(prompts, answer, strict=True):
        references, nouns = list_answers(row), find_nouns(prompt)
        numbers = [one for one in references if not isinstance(parse_reference(one, nouns), str)]
        require(
            bool(numbers) or not references,
            f"closeness: answer must be a number, got {row!r}",
        )
    return score_rows(score, prompts, completions, answer)


@cache
def import_math_verify() -> Any:
    """Return math-verify, which has parsed a formula and so built its grammar."""
    try:
        import math_verify as library
    except ImportError as error:
        raise ImportError(
            "the reward litgrpo.rewards.math_verify needs `pip install math-verify`"
        ) from error

    # It warns of disabled timeouts, once for every answer.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    library.verify(_parse(library, "x+1"), _parse(library, "1+x"), timeout_seconds=None)
    return library


# Algebra can run forever and take any memory. The library's own time limits use signals, which do
# not interrupt C code.
@limit_rows(2.0, 1 << 30, import_math_verify)
def math_verify(
    prompts: Sequence[object],
    completions: Completions,
    answer: Sequence[References],
    *,
    require_tags: bool = True,
    answer_tag: str = "answer",
) -> list[float | None]:
    r"""Return 1 if math-verify finds the answer mathematically equal to the reference, else 0.

    For answers that are expressions, sets, intervals or equations in LaTeX; `correctness` is
    exact, fast and sufficient for numbers. Answers are extracted as in `correctness`, so several
    different ones get 0. Needs `pip install math-verify`.

    Algebra can run forever and take any memory, so each row is scored by a call of its own in a
    worker process. An answer that cannot be judged within 2 s or 1 GiB gets 0.

    Args:
        answer: N reference answers in LaTeX, with or without `$`, or lists of them.
        require_tags: as in `correctness`.
        answer_tag: name of the tag.

    Returns:
        N rewards in {0, 1}; None without a reference answer that math-verify can parse.

    Example:
        >>> answer = r"<answer>\frac{x}{2} + 1</answer>"
        >>> math_verify(["?"], [answer], [r"\frac{x + 2}{2}"])  # doctest: +SKIP
        [1.0]

    Source: https://github.com/huggingface/Math-Verify
    """
    library = import_math_verify()

    def score(text: str, reference: Reference, nouns: Nouns) -> float | None:
        claims = find_claims(text, require_tags=require_tags, tag=answer_tag)
        equal = [_equal_formulas(library, reference, claim, nouns) for claim in claims]
        if not equal:  # no answer: incorrect, if there is a reference
            return 0.0 if _parse(library, normalize(str(reference))) else None
        return None if None in equal else float(all(equal))

    return score_rows(score, prompts, completions, answer)


def _equal_formulas(library: Any, reference: Reference, claim: str, nouns: Nouns) -> bool | None:
    """Return True if a claim equals the reference; None if the reference cannot be parsed."""
    try:
        number = parse_reference(reference, nouns)
    except ValueError:
        return None
    # Numbers with units or currency, which the library may take for products of variables.
    if same_text(claim, str(reference)) or (
        isinstance(number, Fraction) and _equals(claim, number, nouns)
    ):
        return True
    expected = _parse(library, normalize(str(reference)))
    if not expected:
        return None
    try:
        parsed = _parse(library, normalize(claim))
        return bool(parsed) and bool(library.verify(expected, parsed, timeout_seconds=None))
    except (MemoryError, RecursionError):
        return False


def _parse(library: Any, text: str) -> Any:
    """Return math-verify's parse of a text; empty if it finds nothing."""
    dollars = len(UNESCAPED_DOLLAR.findall(text))
    if dollars % 2:  # a price, no formula between dollars
        text = UNESCAPED_DOLLAR.sub(r"\\$", text)
    formula = text if (dollars and not dollars % 2) or "\\boxed" in text else f"${text}$"
    return library.parse(formula, parsing_timeout=None)


def _spellings(reference: Reference) -> set[str]:
    """Return the texts of a reference answer: 72.0 is also 72, and True also true."""
    texts = {str(reference).strip()}
    if isinstance(reference, bool):
        texts.add(str(reference).lower())
    elif isinstance(reference, Real | Decimal) and isfinite(reference) and reference % 1 == 0:
        texts.add(str(int(reference)))
    return texts


def parse_reference(reference: Reference, nouns: Nouns = frozenset()) -> Fraction | str:
    """Parse a reference answer into an exact number, or its text if it is not a number.

    A worked solution whose marked answer is empty (`#### `) gives "", no answer.
    """
    if type(reference).__name__ in ("bool", "bool_") or isinstance(reference, date | time):
        return str(reference)
    if isinstance(reference, Real | Decimal) and isfinite(reference):
        return Fraction(str(reference))  # 0.1 means one tenth, not the nearest double
    if not isinstance(reference, str) or not reference.strip():
        raise ValueError(f"answer must be a number or a text, got {reference!r}")
    marked = extract_answer(reference)
    text = reference if marked is None else marked
    number = parse_number(text, nouns)
    return text if number is None else number


def find_claims(completion: str, *, require_tags: bool, tag: str) -> set[str]:
    """Return every answer that the completion commits to; none if its tags are malformed."""
    opened, closed = completion.count(f"<{tag}>"), completion.count(f"</{tag}>")
    is_well_formed = opened == closed == len(find_tagged(completion, tag))
    if not is_well_formed or (require_tags and not opened):
        return set()
    return set(answer_claims(completion, tag=tag) or _last_line(completion))


def _last_line(completion: str) -> list[str]:
    """Return the last line with a visible character, if there is one."""
    lines = reversed(completion.splitlines())
    return list(islice((line for line in lines if normalize(line).strip()), 1))


def _equals(claim: str, reference: Fraction | str, nouns: Nouns) -> bool:
    if isinstance(reference, str):
        return same_text(claim, reference)
    return _is_answer(claim) and parse_number(claim, nouns) == reference


def _is_answer(claim: str) -> bool:
    """Return True for an answer, False for a text (such as the prompt) with one number in it."""
    words = len(claim.split())
    is_question = words > MAX_QUESTION_WORDS and claim.rstrip(" \n\"'").endswith("?")
    return words <= MAX_ANSWER_WORDS and not is_question
