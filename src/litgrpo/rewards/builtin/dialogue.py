"""How near a reply is to the one that was given: word overlap, n-grams, and LAPDOG's sum of them.

The data set's column `answers` holds the reference replies of each prompt: a list of texts, or one
text. The nearest of several counts. Blank space around a reply does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from litgrpo.rewards.calls import whole_batch
from litgrpo.text import overlap
from litgrpo.text.answers import Completions, text_of

Answers = Sequence[str | Sequence[str]]


def f1(prompts: Sequence[object], completions: Completions, answers: Answers) -> list[float]:
    """Harmonic mean of precision and recall over whitespace tokens, nothing normalized.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        answers: N references, or lists of them.

    Returns:
        N rewards in [0, 1].
    """
    return [
        max(overlap.token_f1(text, reference) for reference in references)
        for text, references in _pairs(completions, answers)
    ]


def rouge_l(prompts: Sequence[object], completions: Completions, answers: Answers) -> list[float]:
    """F-measure of the longest common subsequence of words (ROUGE-L, package rouge-score).

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        answers: N references, or lists of them.

    Returns:
        N rewards in [0, 1].

    Source: Lin 2004, ROUGE: A Package for Automatic Evaluation of Summaries.
    """
    return [overlap.rouge_f(text, references) for text, references in _pairs(completions, answers)]


def bleu(prompts: Sequence[object], completions: Completions, answers: Answers) -> list[float]:
    """BLEU of each reply alone over 100 (package sacrebleu, effective order).

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        answers: N references, or lists of them.

    Returns:
        N rewards in [0, 1].

    Source: Post 2018, arXiv:1804.08771.
    """
    return [
        overlap.bleu(overlap.bleu_counts(text, references), effective_order=True) / 100
        for text, references in _pairs(completions, answers)
    ]


@whole_batch
def lapdog(prompts: Sequence[object], completions: Completions, answers: Answers) -> list[float]:
    """LAPDOG's reward: F1 + ROUGE-L + BLEU in units of the batch's BLEUs (their L2 norm).

    The third term depends on who else is in the batch: a reply that alone has any BLEU gets 1, one
    of many gets less. Where no reply of the batch has any, the term is 0 (0 / 0 in the released
    code). `bleu` does not depend on the batch; weights add it to `f1` and `rouge_l` likewise.

    Args:
        prompts: N prompts; not read.
        completions: N completions of one batch, texts or lists of chat messages.
        answers: N references, or lists of them.

    Returns:
        N rewards in [0, 3].

    Source: LAPDOG, arXiv:2310.18940 and its released code (`f1rougebleudist`, where `dist` stands
    for distillation).
    """
    arguments = (prompts, completions, answers)
    bleus = bleu(*arguments)
    norm = sqrt(sum(score * score for score in bleus)) or 1.0
    terms = zip(f1(*arguments), rouge_l(*arguments), bleus, strict=True)
    return [word_f1 + subsequence + score / norm for word_f1, subsequence, score in terms]


def _pairs(completions: Completions, answers: Answers) -> list[tuple[str, list[str]]]:
    """Each reply with its references, of which there must be one."""
    pairs = []
    for completion, answer in zip(completions, answers, strict=True):
        references = [answer] if isinstance(answer, str) else list(answer)
        if not references:
            raise ValueError("a row of the column answers is empty; a reply needs a reference")
        pairs.append((text_of(completion).strip(), references))
    return pairs
