"""Rewards for the length of a completion, alone and combined with correctness."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi

from litgrpo.arguments import at_least, at_most, require
from litgrpo.rewards.builtin.math import References, correctness
from litgrpo.text.answers import Completions


def length(
    prompts: Sequence[object],
    completions: Completions,
    completion_lengths: Sequence[int],
    *,
    min_tokens: int = 0,
    max_tokens: int,
    zero_tokens: int | None = None,
) -> list[float]:
    """Return 1 for `min_tokens` to `max_tokens` tokens, falling linearly to 0 on both sides.

    Args:
        min_tokens: shortest length with full reward; the reward falls to 0 at no tokens.
        max_tokens: longest length with full reward; the reward falls to 0 at `zero_tokens`.
        zero_tokens: shortest length without reward; default: twice `max_tokens`.

    Returns:
        N rewards in [0, 1].

    Example:
        >>> length(["?"] * 3, ["..."] * 3, [5, 100, 150], min_tokens=10, max_tokens=100)
        [0.5, 1.0, 0.5]
    """
    zero = 2 * max_tokens if zero_tokens is None else zero_tokens
    require(
        0 <= min_tokens <= max_tokens < zero,
        "length needs 0 <= min_tokens <= max_tokens < zero_tokens, got"
        f" min_tokens {min_tokens}, max_tokens {max_tokens}, zero_tokens {zero}",
    )
    # n / min                  if n < min
    # 1                        if min <= n <= max
    # (zero - n) / (zero - max), at least 0, above
    rising = [min(1.0, n / min_tokens) if min_tokens else 1.0 for n in completion_lengths]
    falling = [min(1.0, max(0.0, (zero - n) / (zero - max_tokens))) for n in completion_lengths]
    return [min(pair) for pair in zip(rising, falling, strict=True)]


def soft_overlong(
    prompts: Sequence[object],
    completions: Completions,
    completion_lengths: Sequence[int],
    *,
    max_completion_length: int,
    soft_punish_cache: int,
) -> list[float]:
    """Return 0 for short completions, falling to -1 over the last tokens before the limit.

    Same as TRL's `get_soft_overlong_punishment`.

    Args:
        max_completion_length: length that gets the full penalty.
        soft_punish_cache: number of tokens over which the penalty grows.

    Returns:
        N rewards in [-1, 0].

    Example:
        >>> settings = {"max_completion_length": 100, "soft_punish_cache": 20}
        >>> soft_overlong(["?"] * 3, ["..."] * 3, [80, 90, 100], **settings)
        [0.0, -0.5, -1.0]

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
    answer: Sequence[References],
    completion_lengths: Sequence[int],
    *,
    max_completion_length: int,
    correct_short: float = 1.0,
    correct_long: float = 0.5,
    incorrect_short: float = -1.0,
    incorrect_long: float = -0.5,
    exceed_length: float = -1.0,
    require_tags: bool = True,
) -> list[float | None]:
    """Reward correct answers more if they are short, and penalize incorrect ones less if long.

    From no tokens to `max_completion_length` the reward follows half a cosine, which is flat at
    both ends. No incorrect answer scores above a correct one, because `correct_long` must be at
    least `incorrect_long`.

    Args:
        max_completion_length: length at which completions are truncated.
        correct_short: reward of a correct answer of no tokens.
        correct_long: reward of a correct answer just below the limit.
        incorrect_short: reward of an incorrect answer of no tokens.
        incorrect_long: reward of an incorrect answer just below the limit.
        exceed_length: reward at the limit, correct or not.
        require_tags: as in `correctness`.

    Returns:
        N rewards between the given ones; None without a reference answer.

    Example:
        >>> texts = ["<answer>7</answer>", "<answer>8</answer>"]
        >>> cosine_length(["?"] * 2, texts, ["7", "7"], [50, 50], max_completion_length=100)
        [0.75, -0.75]

    Source: Yeo et al. 2025, arXiv:2502.03373, section 4.2; the defaults are Open-R1's.
    """
    at_least("max_completion_length", max_completion_length, 1)
    require(
        correct_long >= incorrect_long,
        "cosine_length needs correct_long >= incorrect_long, got"
        f" {correct_long} and {incorrect_long}",
    )
    correct = correctness(prompts, completions, answer, require_tags=require_tags)
    rewards: list[float | None] = []
    for score, num_tokens in zip(correct, completion_lengths, strict=True):
        if score is None:
            rewards.append(None)
        elif num_tokens >= max_completion_length:
            rewards.append(exceed_length)
        else:
            short, long = (
                (correct_short, correct_long) if score else (incorrect_short, incorrect_long)
            )
            # Half a cosine from `short` (at no tokens) to `long` (at the limit).
            cosine = cos(pi * num_tokens / max_completion_length)
            rewards.append(long + 0.5 * (short - long) * (1.0 + cosine))
    return rewards
