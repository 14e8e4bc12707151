"""A judge for answers that are formulas: the library math-verify, which is optional."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from litgrpo.rewards.builtin.math import Gold, One, committed_claims, judged
from litgrpo.rewards.runner.marks import isolated, pure
from litgrpo.text.answers import Completions

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
            "the reward litgrpo.rewards.builtin.verify.math_verify needs `pip install math-verify`"
        ) from error
    # It warns of time-outs that are off, once for every answer.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library
