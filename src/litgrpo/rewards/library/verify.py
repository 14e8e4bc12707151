"""A judge for answers that are formulas: the library math-verify, which is optional."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from litgrpo.rewards.library.math import Gold, committed_claims
from litgrpo.rewards.runner.calls import isolated, pure
from litgrpo.text import Message, text_of

LONGEST_ANSWER = 500  # characters


@isolated
@pure
def math_verify(
    prompts: Sequence[object],
    completions: Sequence[str | Sequence[Message]],
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
    thread only. They are switched off; the guard's workers end what hangs.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        answer: N gold answers in LaTeX, with or without `$`; without one a row is not judged.
        require_tags: as in `correctness`.
        answer_tag: name of the tag.

    Returns:
        N rewards in {0, 1}; None where there is no gold answer or math-verify cannot read it.

    Source: https://github.com/huggingface/Math-Verify
    """
    golds = [None if gold is None else _parsed(str(gold)) for gold in answer]
    return [
        float(_same(text_of(completion), gold, require_tags, answer_tag)) if gold else None
        for completion, gold in zip(completions, golds, strict=True)
    ]


def _same(completion: str, gold: Any, require_tags: bool, tag: str) -> bool:
    verify = _library().verify
    claims = committed_claims(completion, require_tags=require_tags, tag=tag)
    if not claims or any(len(claim) > LONGEST_ANSWER for claim in claims):
        return False
    return all(
        bool(found := _parsed(claim)) and verify(gold, found, timeout_seconds=None)
        for claim in claims
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
            "the reward litgrpo.rewards.library.verify.math_verify needs `pip install math-verify`"
        ) from error
    # It warns of time-outs that are off, once for every answer.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library
