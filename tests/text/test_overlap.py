"""Likeness and variety of texts, worked out by hand, and against the packages that define them."""

import pytest
from sacrebleu import corpus_bleu, sentence_bleu

from litgrpo.text.overlap import (
    bleu,
    bleu_counts,
    distinct_n,
    distinct_share,
    ngrams,
    rouge_f,
    token_f1,
    without_articles,
)


def test_ngrams_are_all_runs_in_order() -> None:
    assert ngrams([1, 2, 3], 2) == [(1, 2), (2, 3)]
    assert ngrams(["a", "b", "a", "b"], 3) == [("a", "b", "a"), ("b", "a", "b")]
    assert ngrams([1, 2], 3) == ngrams([], 1) == []
    with pytest.raises(ValueError, match="n is 0; it must be at least 1"):
        ngrams([1], 0)


def test_the_share_of_different_ngrams_by_hand() -> None:
    assert distinct_share([(1,), (2,), (1,), (1,)], of_none=0.0) == 0.5
    assert distinct_share([], of_none=1.0) == 1.0
    assert distinct_n(["a b a b"], 1) == 0.5
    assert distinct_n(["a b", "a b"], 2) == 0.5
    assert distinct_n(["a"], 2) == distinct_n([], 1) == 0.0
    with pytest.raises(ValueError, match="n is 0"):
        distinct_n(["a"], 0)


def test_token_f1_by_hand() -> None:
    # shared: a, b = 2; precision 2/3, recall 2/4
    assert token_f1("a b b", "a b c d") == pytest.approx(4 / 7)
    assert token_f1("a", "b") == token_f1("", "b") == token_f1("a", "") == token_f1("", "") == 0.0
    assert token_f1("x y", " y  x ") == 1.0


def test_squad_compares_without_case_punctuation_and_articles() -> None:
    assert without_articles("The cat, a DOG!") == "cat dog"


def test_rouge_takes_the_nearest_reference() -> None:
    # the longest common subsequence is "a c": 2 of 3 and 2 of 2
    assert rouge_f("a b c", ["x", "a c"]) == pytest.approx(0.8)
    assert rouge_f("a b", ["b a"], "rouge1") == 1.0


def test_counts_of_single_texts_add_up_to_the_bleu_of_the_corpus() -> None:
    said = ["i have two dogs and a cat", "no , i do not like it"]
    given = ["i have two big dogs and a cat", "i do not like it"]
    counts = [bleu_counts(text, [reference]) for text, reference in zip(said, given, strict=True)]
    summed = [sum(column) for column in zip(*counts, strict=True)]
    expected = corpus_bleu(said, [given]).score
    assert bleu(summed, effective_order=False) == pytest.approx(expected)
    expected = sentence_bleu(said[0], given[:1]).score
    assert bleu(counts[0], effective_order=True) == pytest.approx(expected)
