"""Is the answer correct?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from numbers import Real
from typing import Any

from litgrpo.arguments import above, require
from litgrpo.rewards.calls import isolated, pure
from litgrpo.text.answers import (
    Completions,
    answer_claims,
    extract_answer,
    parse_number,
    same_text,
    tagged,
    text_of,
)

MOST_WORDS = 20  # of an answer that is a number
MOST_WORDS_OF_DOUBT = 3  # "72 clips?" is an answer; a longer question is a copy

One = str | int | float
Gold = One | Sequence[One] | None  # several accepted answers: any of them is right


def correctness(
    prompts: Sequence[object],
    completions: Completions,
    answer: Sequence[Gold],
    *,
    require_tags: bool = True,
    answer_tag: str = "answer",
) -> list[float | None]:
    r"""1 where the completion's answer equals the gold answer, else 0.

    Numbers are compared exactly, whatever their dress (`$1,080.00`, `1080`, `\frac{2160}{2}`,
    `<answer>1080 feet</answer>`); a gold answer that is not a number is compared as text. A
    completion must commit itself: several different answers, several numbers inside one answer, a
    number in more than 20 words or in a question, an empty or unclosed tag earn nothing.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        answer: N gold answers: a number, its text, or a worked answer that ends in `#### 72` or
            `\boxed{72}`; or a list of these, any of which is right. A row whose gold is None is not
            judged.
        require_tags: take answers from `<answer>..</answer>` only. Otherwise also from `#### x`,
            `\boxed{x}` or the last line, in this order.
        answer_tag: name of the tag.

    Returns:
        N rewards in {0, 1}; None where there is no gold answer.
    """

    def is_right(text: str, gold: One) -> float:
        wanted = read_gold(gold)
        claims = committed_claims(text, require_tags=require_tags, tag=answer_tag)
        return float(bool(claims) and all(_equals(claim, wanted) for claim in claims))

    return judged(completions, answer, is_right)


def judged(
    texts: Completions,
    golds: Sequence[Gold],
    score: Callable[[str, One], float | None],
) -> list[float | None]:
    """`score(text, gold)` of every row, the best of several golds.

    None, not judged, for rows without a gold answer, and where none can be read.
    """
    scored = (
        [score(text_of(text), gold) for gold in accepted(golds_of_row)]
        for text, golds_of_row in zip(texts, golds, strict=True)
    )
    return [max((s for s in row if s is not None), default=None) for row in scored]


def accepted(gold: Gold) -> list[One]:
    """The accepted answers of a row.

    Example:
        >>> accepted("7"), accepted(["7", "seven"]), accepted(None)
        (['7'], ['7', 'seven'], [])
    """
    if isinstance(gold, str) or not isinstance(gold, Sequence):
        return [] if gold is None else [gold]
    return [one for one in gold if one is not None]


def gsm8k(
    prompts: Sequence[object],
    completions: Completions,
    answer: Sequence[Gold],
) -> list[float | None]:
    r"""1 where the answer equals that of a worked GSM8K solution, however it is marked.

    The answer is what `<answer>..</answer>` holds, else what follows `####`, else what `\boxed{}`
    holds, else the one number of the last line. For models that were not told a format;
    `correctness` also asks for the tags.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        answer: N gold answers, worked solutions that end in `#### 72` or numbers.

    Returns:
        N rewards in {0, 1}; None where there is no gold answer.

    Source: Cobbe et al. 2021, arXiv:2110.14168.
    """
    return correctness(prompts, completions, answer, require_tags=False)


def exact(
    prompts: Sequence[object],
    completions: Completions,
    answer: Sequence[Gold],
    *,
    answer_tag: str | None = "answer",
) -> list[float | None]:
    """1 where the answer is the gold answer character by character, else 0.

    For answers whose spelling matters: code, names, labels. Spaces around them do not count.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        answer: N gold answers; a row whose gold is None is not judged.
        answer_tag: name of the tag around the answer, which must stand there once; None compares
            the whole completion.

    Returns:
        N rewards in {0, 1}; None where there is no gold answer.
    """

    def matches(text: str, gold: One) -> float:
        found = [text] if answer_tag is None else tagged(text, answer_tag)
        return float(len(found) == 1 and found[0].strip() == str(gold).strip() != "")

    return judged(completions, answer, matches)


def closeness(
    prompts: Sequence[object],
    completions: Completions,
    answer: Sequence[Gold],
    *,
    tolerance: float = 0.1,
    require_tags: bool = True,
    answer_tag: str = "answer",
) -> list[float | None]:
    """1 for the right number, falling linearly to 0 at a relative error of `tolerance`.

    For estimates and measurements. A policy can earn part of it by guessing well: for arithmetic
    take `correctness`.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        answer: N gold answers that are numbers; a row whose gold is None is not judged.
        tolerance: relative error without reward; for a gold of 0 the absolute one.
        require_tags: as in `correctness`.
        answer_tag: name of the tag.

    Returns:
        N rewards in [0, 1]; None where there is no gold answer.
    """
    above("tolerance", tolerance, 0)

    def score(text: str, gold: One) -> float | None:
        wanted = read_gold(gold)
        if isinstance(wanted, str):
            return None
        claims = committed_claims(text, require_tags=require_tags, tag=answer_tag)
        found, *others = {parse_number(claim) for claim in claims} or {None}
        if found is None or others:
            return 0.0
        error = abs(found - wanted) / (abs(wanted) or 1)
        return float(max(Fraction(0), 1 - error / Fraction(str(tolerance))))

    for row in answer:
        golds = accepted(row)
        numbers = [one for one in golds if not isinstance(read_gold(one), str)]
        require(
            bool(numbers) or not golds,
            f"closeness needs gold answers that are numbers, got {row!r}",
        )
    return judged(completions, answer, score)


def read_gold(gold: One) -> Fraction | str:
    r"""The gold answer as an exact number, or as text if it is not one.

    Example:
        >>> read_gold("48 + 24 = 72\n#### 72")
        Fraction(72, 1)
    """
    if isinstance(gold, Real):
        return Fraction(str(gold))  # 0.1 means one tenth, not the nearest double
    if not isinstance(gold, str) or not gold.strip():
        raise ValueError(f"a gold answer must be a number or a text with one, got {gold!r}")
    marked = extract_answer(gold)
    text = gold if marked is None else marked
    number = parse_number(text)
    return text if number is None else number


def committed_claims(completion: str, *, require_tags: bool, tag: str) -> set[str]:
    """Every answer that the completion commits itself to; none where its tags are broken."""
    opened, closed = completion.count(f"<{tag}>"), completion.count(f"</{tag}>")
    whole = opened == closed == len(tagged(completion, tag))
    if not whole or (require_tags and not opened):
        return set()
    return set(answer_claims(completion, tag=tag) or completion.strip().splitlines()[-1:])


def _equals(claim: str, gold: Fraction | str) -> bool:
    if isinstance(gold, str):
        return same_text(claim, gold)
    return _states(claim) and parse_number(claim) == gold


def _states(claim: str) -> bool:
    """Whether a claim is an answer, not a text (such as the question) with one number in it."""
    words = len(claim.split())
    asks = words > MOST_WORDS_OF_DOUBT and claim.rstrip(" \n\"'").endswith("?")
    return words <= MOST_WORDS and not asks


LONGEST_ANSWER = 500  # characters


@isolated
@pure
def math_verify(
    prompts: Sequence[object],
    completions: Completions,
    answer: Sequence[Gold],
    *,
    require_tags: bool = True,
    answer_tag: str = "answer",
) -> list[float | None]:
    r"""1 where the answer is mathematically the same as the gold answer, by math-verify, else 0.

    For answers that are expressions, sets, intervals or equations in LaTeX; `correctness` is exact,
    quick and enough for numbers. Answers are found as `correctness` finds them, so several
    different ones earn nothing. Needs `pip install math-verify`.

    Algebra can take forever, and the library's own time-outs use signals, which work in the main
    thread only. They are switched off; the worker process that this runs in ends what hangs.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        answer: N gold answers in LaTeX, with or without `$`, or lists of them; without one a row is
            not judged.
        require_tags: as in `correctness`.
        answer_tag: name of the tag.

    Returns:
        N rewards in {0, 1}; None where there is no gold answer or math-verify cannot read it.

    Source: https://github.com/huggingface/Math-Verify
    """

    def is_same(text: str, gold: One) -> float | None:
        wanted = _parsed(str(gold))
        claims = committed_claims(text, require_tags=require_tags, tag=answer_tag)
        return float(_all_same(wanted, claims)) if wanted else None

    return judged(completions, answer, is_same)


def _all_same(gold: Any, claims: Collection[str]) -> bool:
    verify = _library().verify
    if not claims or any(len(claim) > LONGEST_ANSWER for claim in claims):
        return False
    return all(
        found and verify(gold, found, timeout_seconds=None) for found in map(_parsed, claims)
    )


def _parsed(text: str) -> Any:
    """What math-verify reads in a text; empty if it reads nothing."""
    inside = text if "$" in text or "\\boxed" in text else f"${text}$"
    return _library().parse(inside, parsing_timeout=None)


def _library() -> Any:
    try:
        import math_verify as library
    except ImportError as error:
        raise ImportError(
            "the reward litgrpo.rewards.builtin.math.math_verify needs `pip install math-verify`"
        ) from error
    # It warns of time-outs that are off, once for every answer.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library
