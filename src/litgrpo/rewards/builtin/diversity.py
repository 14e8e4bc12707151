"""How varied completions are, each in itself and within its group.

Random characters are as varied as can be: meant as a small part behind a gate, or to be watched
with weight 0.
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


def distinct(
    prompts: Sequence[object],
    completions: Completions,
    *,
    n: int = 2,
    shortest: int = 8,
    ignore_case: bool = True,
) -> list[float]:
    """The share of a completion's word n-grams that are different.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        n: words of an n-gram.
        shortest: words below which the reward is reduced in proportion, since a text of one n-gram
            cannot repeat itself; 1 reduces none.
        ignore_case: `The` and `the` are one word.

    Returns:
        N rewards in [0, 1]; 0 for fewer than n words.

    Source: Li et al. 2016, arXiv:1510.03055.
    """
    at_least("shortest", shortest, 1)
    read = str.lower if ignore_case else str
    texts = [read(text_of(completion)) for completion in completions]
    return [distinct_n([text], n) * min(1.0, len(text.split()) / shortest) for text in texts]


@whole_batch
def group_diversity(
    prompts: Sequence[object], completions: Completions, group_size: int, *, n: int = 2
) -> list[float]:
    """The share of a completion's word n-grams that no other completion of its group has.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages; row r is of group r // G.
        group_size: G.
        n: words of an n-gram.

    Returns:
        N rewards in [0, 1]; 0 for fewer than n words, and for a group of one.
    """
    words = [text_of(completion).lower().split() for completion in completions]
    grams = [set(ngrams(row, n)) for row in words]
    rewards = []
    for row, own in enumerate(grams):
        start = row - row % group_size
        group = grams[start : start + group_size]
        holders = Counter(gram for one in group for gram in one)
        alone = sum(holders[gram] == 1 for gram in own)
        rewards.append(alone / len(own) if own and group_size > 1 else 0.0)
    return rewards
