"""The tone of a text, by VADER's word list and rules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from litgrpo.arguments import require
from litgrpo.text.answers import Completions, text_of


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
