"""Similarity of two texts and diversity of one: F1, ROUGE, BLEU, n-grams.

A text and its reference are compared in the one Unicode spelling of `normalize`. ROUGE and BLEU
come from the packages rouge-score and sacrebleu, which are imported on first use.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

from litgrpo.text.normalization import normalize

Token = TypeVar("Token")

PUNCTUATION = set(string.punctuation)


def ngrams(tokens: Sequence[Token], n: int) -> list[tuple[Token, ...]]:
    """All runs of n tokens, in order; none where there are fewer tokens."""
    if n < 1:
        raise ValueError(f"n is {n}; it must be at least 1.")
    return list(zip(*(tokens[start:] for start in range(n)), strict=False))


def distinct_share(grams: Sequence[object], of_none: float) -> float:
    """Share of different n-grams among all n-grams; `of_none` where there is none."""
    return len(set(grams)) / len(grams) if grams else of_none


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Share of different word n-grams among those of all texts; 0 where there is no n-gram.

    Source: Li et al. 2016, arXiv:1510.03055.
    """
    return distinct_share([gram for text in texts for gram in ngrams(text.split(), n)], of_none=0.0)


def token_f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over whitespace tokens; 0 for an empty text.

    Source: SQuAD, arXiv:1606.05250, section 6.1, without its normalization.
    """
    predicted, expected = normalize(prediction).split(), normalize(reference).split()
    shared = (Counter(predicted) & Counter(expected)).total()
    return 2 * shared / (len(predicted) + len(expected)) if shared else 0.0


def without_articles(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces: what SQuAD compares."""
    bare = "".join(letter for letter in normalize(text).lower() if letter not in PUNCTUATION)
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))


def rouge_f(prediction: str, references: Sequence[str], kind: str = "rougeL") -> float:
    """ROUGE F-measure against the reference that it is highest for, from 0 to 1."""
    scores = _rouge(kind).score_multi(list(map(normalize, references)), normalize(prediction))
    return float(scores[kind].fmeasure)


@cache
def _rouge(kind: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind])


def bleu_counts(prediction: str, references: Sequence[str]) -> list[int]:
    """Counts from which BLEU is computed; sums over texts give the BLEU of a corpus.

    Length, reference length, and for n = 1 to 4 first the matched and then all n-grams.
    """
    references = list(map(normalize, references))
    score = _sentence_bleu().sentence_score(normalize(prediction), references)
    return [score.sys_len, score.ref_len, *score.counts, *score.totals]


def bleu(counts: Sequence[float], *, effective_order: bool) -> float:
    """BLEU from 0 to 100, as the package sacrebleu computes it from its counts.

    `effective_order` leaves out n-grams that are longer than the text: for single texts.
    """
    lengths, grams = [int(n) for n in counts[:2]], [int(n) for n in counts[2:]]
    score = _sentence_bleu().compute_bleu(
        grams[:4], grams[4:], *lengths, smooth_method="exp", effective_order=effective_order
    )
    return float(score.score)


@cache
def _sentence_bleu() -> Any:
    from sacrebleu.metrics import BLEU

    return BLEU(effective_order=True)
