"""Similarity of a reply to a reference reply: word overlap, n-grams, and LAPDOG's sum of them.

The column `answers` of the data set holds the reference replies of each prompt: a list of texts,
or one text. The most similar of several counts. Whitespace around a reply is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from litgrpo.rewards.calls import whole_batch
from litgrpo.text import overlap
from litgrpo.text.answers import Completions, list_answers, text_of

Answers = Sequence[str | Sequence[str] | None]
Rewards = list[float | None]


def f1(prompts: Sequence[object], completions: Completions, answers: Answers) -> Rewards:
    """Return the harmonic mean of precision and recall over whitespace tokens.

    Case and punctuation count; only the Unicode spelling is normalized.

    Returns:
        N rewards in [0, 1]; None without a reference reply.

    Example:
        >>> f1(["Hi"], ["I like tea"], [["I like it a lot", "I like tea"]])
        [1.0]
    """
    return [
        max((overlap.token_f1(text, reference) for reference in references), default=None)
        for text, references in _pair(completions, answers)
    ]


def rouge_l(prompts: Sequence[object], completions: Completions, answers: Answers) -> Rewards:
    """Return the F-measure of the longest common subsequence of words (ROUGE-L).

    Needs the package rouge-score.

    Returns:
        N rewards in [0, 1]; None without a reference reply.

    Example:
        >>> rouge_l(["Hi"], ["I like tea"], ["I like tea"])  # doctest: +SKIP
        [1.0]

    Source: Lin 2004, ROUGE: A Package for Automatic Evaluation of Summaries.
    """
    return [
        overlap.rouge_f(text, references) if references else None
        for text, references in _pair(completions, answers)
    ]


def bleu(prompts: Sequence[object], completions: Completions, answers: Answers) -> Rewards:
    """Return the sentence BLEU of each reply divided by 100 (effective order).

    Needs the package sacrebleu.

    Returns:
        N rewards in [0, 1]; None without a reference reply.

    Example:
        >>> bleu(["Hi"], ["I like tea a lot"], ["I like tea a lot"])  # doctest: +SKIP
        [1.0]

    Source: Post 2018, arXiv:1804.08771.
    """
    return [
        overlap.bleu(overlap.bleu_counts(text, references), effective_order=True) / 100
        if references
        else None
        for text, references in _pair(completions, answers)
    ]


@whole_batch
def lapdog(prompts: Sequence[object], completions: Completions, answers: Answers) -> Rewards:
    """Return LAPDOG's reward: F1 + ROUGE-L + BLEU divided by the L2 norm of the batch's BLEUs.

    The third term depends on the batch: a reply that is the only one with a BLEU above 0 gets 1,
    one of several gets less. If no reply of the batch has a BLEU above 0, the term is 0 (0 / 0 in
    the released code). For a sum that does not depend on the batch, weight `f1`, `rouge_l` and
    `bleu` separately.

    Returns:
        N rewards in [0, 3]; None without a reference reply.

    Example:
        >>> lapdog(["Hi"], ["I like tea a lot"], ["I like tea a lot"])  # doctest: +SKIP
        [3.0]

    Source: LAPDOG, arXiv:2310.18940 and its released code (`f1rougebleudist`, where `dist` means
    distillation).
    """
    arguments = (prompts, completions, answers)
    bleus = bleu(*arguments)
    norm = sqrt(sum(score * score for score in bleus if score is not None)) or 1.0
    terms = zip(f1(*arguments), rouge_l(*arguments), bleus, strict=True)
    return [
        None
        if word_f1 is None or subsequence is None or score is None
        else word_f1 + subsequence + score / norm
        for word_f1, subsequence, score in terms
    ]


def _pair(completions: Completions, answers: Answers) -> list[tuple[str, list[str]]]:
    """Pair each reply with its references, none if the row has none."""
    pairs = zip(completions, answers, strict=True)
    return [(text_of(completion).strip(), list_answers(answer)) for completion, answer in pairs]
