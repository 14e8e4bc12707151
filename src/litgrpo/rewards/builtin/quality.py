"""Rewards for text quality: conciseness, repetition, sentences that look like language, tone.

These measure form only, and nonsense can satisfy them. Use them with a small weight behind a
`gate`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from litgrpo.arguments import require
from litgrpo.text.answers import Completions, reasonings, text_of
from litgrpo.text.overlap import distinct_share, ngrams

TAG = re.compile(r"</?[A-Za-z_]{1,30}>")
SENTENCE_END = re.compile(r"(?<![.!?\n])[.!?\n]+(?=\s|$)")
MAX_WORD_CHARS, MAX_SENTENCE_WORDS = 25, 40
NGRAM = 3


def explanation_quality(
    prompts: Sequence[object],
    completions: Completions,
    *,
    min_words: int = 10,
    max_words: int = 120,
    reasoning_tag: str = "reasoning",
) -> list[float]:
    """Return 1 for an explanation of `min_words` to `max_words` words that does not repeat itself.

    The length term falls to 0 at no words and at three times `max_words`. It is multiplied by the
    squared fraction of word triples that are not repeats.

    Args:
        min_words: fewest words with full reward.
        max_words: most words with full reward.
        reasoning_tag: name of the tag around the explanation.

    Returns:
        N rewards in [0, 1].

    Example:
        >>> text = "<reasoning>Add three and four to get seven.</reasoning>"
        >>> explanation_quality(["3 + 4?"], [text], min_words=14)
        [0.5]
    """
    require(
        1 <= min_words <= max_words,
        "explanation_quality needs 1 <= min_words <= max_words, got"
        f" min_words {min_words}, max_words {max_words}",
    )
    # n / min                   if n < min
    # 1                         if min <= n <= max
    # (3 max - n) / (2 max)     above, at least 0
    rewards = []
    for text in reasonings(completions, reasoning_tag):
        n = len(text.split())
        concise = max(0.0, min(1.0, n / min_words, (3 * max_words - n) / (2 * max_words)))
        rewards.append(concise * new_share(text) ** 2)
    return rewards


def new_share(text: str) -> float:
    """Return the fraction of a text's word triples that are not repeats; 1 for a short text."""
    return distinct_share(ngrams(text.lower().split(), NGRAM), of_none=1.0)


def quality(prompts: Sequence[object], completions: Completions) -> list[float]:
    """Score how much a text looks like language: the minimum of five properties.

    Letters and digits among its characters; words of ordinary length; sentences of ordinary
    length; words that do not repeat; an end that is not cut off. The minimum, not the mean: doing
    well in one property does not make up for another.

    Returns:
        N rewards in [0, 1]; 0 for a text without words.

    Example:
        >>> quality(["Why?"] * 2, ["Three and four make seven.", "Three and four make"])
        [1.0, 0.5]
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
    ordinary = sum(len(word) <= MAX_WORD_CHARS for word in words) / len(words)
    finished = closed or plain[-1] in ".!?)\"'" or plain[-1].isdigit()
    return min(
        1.0,
        readable / 0.7,  # the rest is punctuation and symbols, of which mathematics has many
        ordinary,
        MAX_SENTENCE_WORDS / max(longest, 1),
        new_share(plain),
        1.0 if finished else 0.5,
    )


def cheerful(
    prompts: Sequence[object],
    completions: Completions,
    truncated: Sequence[bool],
) -> list[float]:
    """Score how positive a completion is, from 0 to 1; 0 if it is empty or truncated.

    This is VADER's compound score shifted to [0, 1]: 0.5 is neutral. VADER adds up word scores and
    ignores the meaning: a list of happy words gets nearly 1. Keep the policy near the initial
    policy with `objective.kl_coef`. Needs `pip install vaderSentiment`.

    Returns:
        N rewards in [0, 1].

    Example:
        >>> cheerful(["How are you?"], ["I am happy!"], [False])  # doctest: +SKIP
        [0.8]

    Source: Hutto and Gilbert 2014, VADER, ICWSM; the package vaderSentiment.
    """
    rewards = []
    for completion, cut in zip(completions, truncated, strict=True):
        text = text_of(completion).strip()
        if cut or not text:
            rewards.append(0.0)
        else:
            rewards.append((float(_vader().polarity_scores(text)["compound"]) + 1) / 2)
    return rewards


@cache
def _vader() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise ValueError("cheerful needs vaderSentiment: pip install vaderSentiment.") from error
    return SentimentIntensityAnalyzer()
