"""How long a completion may be, given how good it is."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi

from litgrpo.arguments import at_least, require
from litgrpo.rewards.builtin.math import Gold, correctness
from litgrpo.text.answers import Completions


def cosine_length(  # noqa: PLR0913 (five levels and a limit)
    prompts: Sequence[object],
    completions: Completions,
    answer: Sequence[Gold],
    completion_lengths: Sequence[int],
    *,
    max_completion_length: int,
    right_short: float = 1.0,
    right_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    too_long: float = -1.0,
    require_tags: bool = True,
) -> list[float | None]:
    """Right answers earn more when they are short, wrong ones lose less when they are long.

    Between no token and `max_completion_length` the reward follows half a cosine: it changes
    little at
    both ends. With `right_long` above `wrong_long` no wrong answer beats a right one.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        answer: N gold answers, as in `litgrpo.rewards.builtin.math.correctness`.
        completion_lengths: N lengths in tokens.
        max_completion_length: length at which a completion is cut off.
        right_short: reward of a right answer in no tokens.
        right_long: reward of a right answer just below the limit.
        wrong_short: reward of a wrong answer in no tokens.
        wrong_long: reward of a wrong answer just below the limit.
        too_long: reward at the limit, right or wrong.
        require_tags: as in `correctness`.

    Returns:
        N rewards between the given ones; None where there is no gold answer.

    Source: Yeo et al. 2025, arXiv:2502.03373, section 4.2; the defaults are Open-R1's.
    """
    at_least("max_completion_length", max_completion_length, 1)
    require(
        right_long >= wrong_long,
        f"cosine_length needs right_long >= wrong_long, got {right_long} and {wrong_long}",
    )
    right = correctness(prompts, completions, answer, require_tags=require_tags)
    ends = {1.0: (right_short, right_long), 0.0: (wrong_short, wrong_long)}
    return [
        None
        if is_right is None
        else too_long
        if length >= max_completion_length
        else _cosine(length / max_completion_length, *ends[is_right])
        for is_right, length in zip(right, completion_lengths, strict=True)
    ]


def _cosine(share: float, start: float, end: float) -> float:
    """From start (at 0) to end (at 1) along half a cosine."""
    return end + 0.5 * (start - end) * (1.0 + cos(pi * share))
