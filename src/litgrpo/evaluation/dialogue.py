"""How near the replies to a whole data set are to the given ones: the metrics of dialogue work."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import nan
from typing import Any

from torch import Tensor, tensor

from litgrpo.arguments import require
from litgrpo.evaluation.accuracy import PerPrompt
from litgrpo.evaluation.intervals import clustered_mean
from litgrpo.text.overlap import bleu, bleu_counts, rouge_f, token_f1, without_articles

ROUGES = ("rouge1", "rouge2", "rougeL")
BLEU_COUNTS = 10


class CorpusScores(PerPrompt):
    """Judges one reply to every held-out prompt, all of them together."""

    @abstractmethod
    def update(self, index: Tensor, replies: Sequence[str], columns: dict[str, list[Any]]) -> None:
        """Add a batch.

        Args:
            index: [B] position of each prompt in its data set.
            replies: B texts, the most likely ones where these are sampled at all.
            columns: {name: list of B} of the data set.
        """

    @abstractmethod
    def compute(self) -> dict[str, Tensor]:
        """{name: number}; `_low` and `_high` are the ends of its interval."""


class DialogueScores(CorpusScores):
    """F1, ROUGE-1, ROUGE-2, ROUGE-L and corpus BLEU of replies, all times 100, as LAPDOG counts.

    F1 after SQuAD's normalization (lower case, no punctuation, no articles), ROUGE F-measures of
    the package rouge-score, BLEU of the package sacrebleu; means over prompts with their
    intervals. Exact over processes: every prompt leaves its counts, and counts once.

    Args:
        answers: column of the reference replies, texts or lists of texts; the nearest counts.
        strip: text that is taken away from the start of a reply.
        confidence: coverage of the intervals.
    """

    def __init__(
        self, answers: str = "answers", strip: str = "R:", confidence: float = 0.95
    ) -> None:
        super().__init__()
        self.answers = answers
        self.strip = strip
        self.confidence = confidence

    def update(self, index: Tensor, replies: Sequence[str], columns: dict[str, list[Any]]) -> None:
        """Add a batch; see `CorpusScores.update`."""
        require(
            self.answers in columns,
            f"evaluation.corpus: there is no column {self.answers!r} with the reference "
            f"replies; there are {sorted(columns)}. Name it by `answers`.",
        )
        pairs = zip(replies, columns[self.answers], strict=True)
        counts = [reply_counts(reply, answer, self.strip) for reply, answer in pairs]
        self.collect(index, tensor(counts, device=index.device))

    def compute(self) -> dict[str, Tensor]:
        """{corpus_bleu, and with intervals corpus_f1, corpus_rouge1, _rouge2, _rougeL}; or NaN."""
        names = ("f1", *ROUGES)
        rows = self.rows(BLEU_COUNTS + len(names))
        if not rows:
            return {f"corpus_{name}": tensor(nan, device=self.device) for name in ("bleu", *names)}
        sums = [sum(column) for column in zip(*rows, strict=True)]
        report = {"corpus_bleu": bleu(sums[:BLEU_COUNTS], effective_order=False)}
        for place, name in enumerate(names, start=BLEU_COUNTS):
            values = [100 * row[place] for row in rows]
            low, high = clustered_mean(values, self.confidence)
            report[f"corpus_{name}"] = sum(values) / len(values)
            report |= {f"corpus_{name}_low": low, f"corpus_{name}_high": high}
        return {name: tensor(value, device=self.device) for name, value in report.items()}


def reply_counts(reply: str, answer: str | Sequence[str], strip: str = "R:") -> list[float]:
    """What one reply adds to the scores of a corpus.

    Args:
        reply: the text.
        answer: its reference, or several.
        strip: text to take away from its start.

    Returns:
        The counts of BLEU, then F1, ROUGE-1, ROUGE-2 and ROUGE-L from 0 to 1.
    """
    reply = reply.strip().removeprefix(strip).strip()
    references = [answer] if isinstance(answer, str) else list(answer)
    bare = [without_articles(reference) for reference in references]
    f1 = max(token_f1(without_articles(reply), reference) for reference in bare)
    rouges = [rouge_f(reply, references, kind) for kind in ROUGES]
    return [*map(float, bleu_counts(reply, references)), f1, *rouges]
