"""How a completion looks: its tags, its length in tokens, how often it repeats itself."""

from __future__ import annotations

from collections.abc import Sequence

from litgrpo.arguments import at_least, at_most, require
from litgrpo.text.answers import Completions, text_of
from litgrpo.text.overlap import distinct_share, ngrams


def reasoning_answer(
    prompts: Sequence[object],
    completions: Completions,
    *,
    reasoning_tag: str = "reasoning",
    answer_tag: str = "answer",
    partial: bool = False,
) -> list[float]:
    """1 for `<reasoning>..</reasoning><answer>..</answer>`, each tag once, in this order, else 0.

    Nothing but whitespace may stand around and between the two, and neither may be empty.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        reasoning_tag: name of the first tag.
        answer_tag: name of the second tag.
        partial: give a text that fails 0.1 for each of the four tags that it has exactly once: a
            slope for a policy that never finds the whole form by chance.

    Returns:
        N rewards in [0, 1].
    """
    tags = [f"<{reasoning_tag}>", f"</{reasoning_tag}>", f"<{answer_tag}>", f"</{answer_tag}>"]
    per_tag = 0.1 if partial else 0.0
    return [_tags_reward(text_of(completion), tags, per_tag) for completion in completions]


def _tags_reward(text: str, tags: Sequence[str], per_tag: float) -> float:
    once = sum(text.count(tag) == 1 for tag in tags)
    return 1.0 if once == len(tags) and _in_form(text, tags) else per_tag * once


def _in_form(text: str, tags: Sequence[str]) -> bool:
    """Whether the four tags, each of which is there once, stand in order around two texts."""
    pieces = []
    for tag in tags:
        piece, _, text = text.partition(tag)
        pieces.append(piece.strip())
    before, reasoning, between, answer = pieces
    # Tags out of order leave a piece of the wrong kind, or text behind the last tag.
    return bool(reasoning and answer) and not (before or between or text.strip())


def think_format(prompts: Sequence[object], completions: Completions) -> list[float]:
    """1 for a completion that starts with `<think>`, has it once and closes it, else 0.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.

    Returns:
        N rewards in {0, 1}.

    Source: TRL, `think_format_reward`.
    """
    texts = [text_of(completion) for completion in completions]
    return [
        float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text)
        for text in texts
    ]


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


def repetition(
    prompts: Sequence[object],
    completions: Completions,
    completion_ids: Sequence[Sequence[int]],
    *,
    ngram_size: int = 3,
    max_penalty: float = -1.0,
) -> list[float]:
    """`max_penalty` times the share of token n-grams that were said before.

    Args:
        prompts: N prompts; not read.
        completions: N completions; not read.
        completion_ids: N lists of token ids.
        ngram_size: n.
        max_penalty: what endless repetition costs; at most 0.

    Returns:
        N rewards in [max_penalty, 0]; 0 for a text without n-grams.

    Source: Yeo et al. 2025, arXiv:2502.03373, appendix C.2.
    """
    at_most("max_penalty", max_penalty, 0)
    return [
        max_penalty * (1.0 - distinct_share(ngrams(ids, ngram_size), of_none=1.0))
        for ids in completion_ids
    ]
