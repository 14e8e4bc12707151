"""Length of a completion."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi

from litgrpo.arguments import at_least, at_most, require
from litgrpo.rewards.builtin.math import Gold, correctness
from litgrpo.text.answers import Completions


def length(
    prompts: Sequence[object],
    completions: Completions,
    completion_lengths: Sequence[int],
    *,
    low: int = 0,
    high: int,
    zero: int | None = None,
) -> list[float]:
    """1 for `low` to `high` tokens, falling linearly to 0 at no tokens and at `zero` tokens.

    Args:
        prompts: N prompts; not read.
        completions: N completions; not read.
        completion_lengths: N lengths in tokens.
        low: shortest length with full reward.
        high: longest length with full reward.
        zero: length from which on there is no reward; default is twice `high`.

    Returns:
        N rewards in [0, 1].
    """
    zero = 2 * high if zero is None else zero
    require(
        0 <= low <= high < zero,
        f"length needs 0 <= low <= high < zero, got low {low}, high {high}, zero {zero}",
    )
    # n / low              if n < low
    # 1                    if low <= n <= high
    # (zero - n) / (zero - high), at least 0, above
    rising = [min(1.0, n / low) if low else 1.0 for n in completion_lengths]
    falling = [min(1.0, max(0.0, (zero - n) / (zero - high))) for n in completion_lengths]
    return [min(pair) for pair in zip(rising, falling, strict=True)]


def soft_overlong(
    prompts: Sequence[object],
    completions: Completions,
    completion_lengths: Sequence[int],
    *,
    max_completion_length: int,
    soft_punish_cache: int,
) -> list[float]:
    """0 for a short completion, falling to -1 over the last tokens before the limit.

    Args:
        prompts: N prompts; not read.
        completions: N completions; not read.
        completion_lengths: N lengths in tokens.
        max_completion_length: length that costs the whole punishment.
        soft_punish_cache: number of tokens over which the punishment grows.

    Returns:
        N rewards in [-1, 0].

    Source: DAPO, arXiv:2503.14476, equation 13.
    """
    at_least("soft_punish_cache", soft_punish_cache, 1)
    at_most("soft_punish_cache", soft_punish_cache, max_completion_length)
    # 0                     if n <= start
    # (start - n) / cache   between, down to -1 at the limit
    start = max_completion_length - soft_punish_cache
    return [max(-1.0, min(0.0, (start - n) / soft_punish_cache)) for n in completion_lengths]


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
