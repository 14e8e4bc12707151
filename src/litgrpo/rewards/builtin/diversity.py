"""Rewards for varied text, within a completion and within its group.

Random characters are as varied as text can be. Use these rewards with a small weight behind a
`gate`, or with weight 0 to log them only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from litgrpo.arguments import at_least, at_most
from litgrpo.rewards.calls import whole_batch
from litgrpo.text.answers import Completions, text_of
from litgrpo.text.overlap import distinct_n, distinct_share, ngrams


def repetition(
    prompts: Sequence[object],
    completions: Completions,
    completion_ids: Sequence[Sequence[int]],
    *,
    ngram_size: int = 3,
    max_penalty: float = -1.0,
) -> list[float]:
    """Penalize repeated token n-grams: `max_penalty` times the fraction that are repeats.

    Args:
        ngram_size: n.
        max_penalty: reward of endless repetition, 0 or less.

    Returns:
        N rewards in [max_penalty, 0]; 0 for a text shorter than n tokens.

    Example:
        >>> repetition(["?"] * 2, ["..."] * 2, [[1, 2, 3, 4], [5, 5, 5, 5]])
        [-0.0, -0.5]

    Source: Yeo et al. 2025, arXiv:2502.03373, appendix C.2.
    """
    at_most("max_penalty", max_penalty, 0)
    return [
        max_penalty * (1.0 - distinct_share(ngrams(ids, ngram_size), of_none=1.0))
        for ids in completion_ids
    ]


def distinct(
    prompts: Sequence[object],
    completions: Completions,
    *,
    n: int = 2,
    min_words: int = 8,
    ignore_case: bool = True,
) -> list[float]:
    """Return the fraction of a completion's word n-grams that are distinct (distinct-n).

    Args:
        n: words per n-gram.
        min_words: shorter texts get proportionally less, because a text of one n-gram cannot
            repeat itself; 1 disables this.
        ignore_case: treat `The` and `the` as the same word.

    Returns:
        N rewards in [0, 1]; 0 for fewer than n words.

    Example:
        >>> distinct(["?"] * 2, ["a b c", "a b a b a"], min_words=1)
        [1.0, 0.5]

    Source: Li et al. 2016, arXiv:1510.03055.
    """
    at_least("min_words", min_words, 1)
    texts = [text_of(completion) for completion in completions]
    if ignore_case:
        texts = [text.lower() for text in texts]
    return [distinct_n([text], n) * min(1.0, len(text.split()) / min_words) for text in texts]


@whole_batch
def group_diversity(
    prompts: Sequence[object], completions: Completions, group_size: int, *, n: int = 2
) -> list[float]:
    """Return the fraction of a completion's word n-grams that no other one of its group has.

    Args:
        n: words per n-gram.

    Returns:
        N rewards in [0, 1]; 0 for fewer than n words, and for a group of one.

    Example:
        >>> group_diversity(["?"] * 2, ["a b c", "a b d"], group_size=2)
        [0.5, 0.5]
    """
    words = [text_of(completion).lower().split() for completion in completions]
    grams = [set(ngrams(row, n)) for row in words]
    rewards = []
    for row, row_grams in enumerate(grams):
        start = row - row % group_size
        group = grams[start : start + group_size]
        counts = Counter(gram for one in group for gram in one)
        unique = sum(counts[gram] == 1 for gram in row_grams)
        rewards.append(unique / len(row_grams) if row_grams and group_size > 1 else 0.0)
    return rewards
