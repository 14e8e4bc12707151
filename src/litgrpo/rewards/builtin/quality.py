"""Text quality: conciseness, repetition, sentences that look like language, tone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from litgrpo.arguments import require
from litgrpo.text.answers import Completions, reasonings, text_of
from litgrpo.text.overlap import distinct_share, ngrams

TAG = re.compile(r"</?[A-Za-z_]{1,30}>")
SENTENCE_END = re.compile(r"[.!?\n]+(?=\s|$)")
LONGEST_WORD, LONGEST_SENTENCE = 25, 40
NGRAM = 3


def explanation_quality(
    prompts: Sequence[object],
    completions: Completions,
    *,
    low: int = 10,
    high: int = 120,
    reasoning_tag: str = "reasoning",
) -> list[float]:
    """1 for an explanation of `low` to `high` words that does not repeat itself.

    The reward of its length (less for fewer words, down to 0 at none; less for more, down to 0 at
    three times `high`) times the square of the share of its word triples that are new.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        low: fewest words with full reward.
        high: most words with full reward.
        reasoning_tag: name of the tag around the explanation.

    Returns:
        N rewards in [0, 1].
    """
    require(1 <= low <= high, f"explanation_quality needs 1 <= low <= high, got {low} and {high}")
    texts = reasonings(completions, reasoning_tag)
    return [_concise(len(text.split()), low, high) * new_share(text) ** 2 for text in texts]


def _concise(num_words: int, low: int, high: int) -> float:
    # n / low                    if n < low
    # 1                          if low <= n <= high
    # (3 high - n) / (2 high)    above, at least 0
    return max(0.0, min(1.0, num_words / low, (3 * high - num_words) / (2 * high)))


def new_share(text: str) -> float:
    """The share of a text's word triples that are said for the first time; 1 for a short text.

    Example:
        >>> new_share("a b c a b c")
        0.75
    """
    return distinct_share(ngrams(text.lower().split(), NGRAM), of_none=1.0)


def quality(prompts: Sequence[object], completions: Completions) -> list[float]:
    """Whether a text looks like language: as good as the worst of five properties.

    Letters and digits among its characters; words of ordinary length; sentences of ordinary length;
    words that are not always the same; an end that is not broken off. The minimum, not the mean:
    being very good at one does not make up for another.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.

    Returns:
        N rewards in [0, 1]; 0 for a text without words.
    """
    return [_quality(text_of(completion)) for completion in completions]


def _quality(text: str) -> float:
    closed = text.rstrip().endswith(">")
    plain = TAG.sub(" ", text).strip()
    words = plain.split()
    if not words:
        return 0.0
    sentences = [part for part in SENTENCE_END.split(plain) if part.strip()]
    longest = max((len(sentence.split()) for sentence in sentences), default=0)
    readable = sum(c.isalnum() or c.isspace() for c in plain) / len(plain)
    ordinary = sum(len(word) <= LONGEST_WORD for word in words) / len(words)
    finished = closed or plain[-1] in ".!?)\"'" or plain[-1].isdigit()
    return min(
        1.0,
        readable / 0.7,  # the rest is punctuation and signs, of which mathematics has many
        ordinary,
        LONGEST_SENTENCE / max(longest, 1),
        new_share(plain),
        1.0 if finished else 0.5,
    )


def cheerful(
    prompts: Sequence[object],
    completions: Completions,
    truncated: Sequence[bool],
) -> list[float]:
    """How positive a completion is, from 0 to 1; 0 for one that is empty or cut off.

    VADER's compound score, shifted: 0.5 is neutral. It adds up words and knows nothing of sense:
    a list of happy words earns nearly 1, so hold the policy near its start (`objective.kl_coef`).
    Needs `pip install "litgrpo[real]"`.

    Args:
        prompts: N prompts; not read.
        completions: N completions.
        truncated: N; whether the length limit cut a completion off.

    Returns:
        N rewards in [0, 1].

    Source: Hutto and Gilbert 2014, VADER, ICWSM; the package vaderSentiment.
    """
    texts = [text_of(each).strip() for each in completions]
    return [
        0.0 if cut or not text else (_compound(text) + 1) / 2
        for text, cut in zip(texts, truncated, strict=True)
    ]


def _compound(text: str) -> float:
    """VADER's compound score in [-1, 1]."""
    return float(_vader().polarity_scores(text)["compound"])


@cache
def _vader() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        require(False, 'cheerful needs vaderSentiment: pip install "litgrpo[real]".')
    return SentimentIntensityAnalyzer()
