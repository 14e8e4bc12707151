"""Evaluation on held-out prompts, with intervals."""

from litgrpo.evaluation.intervals import (
    PairedDifference,
    compute_paired_difference,
    mean_interval,
    proportion_interval,
    wilson_interval,
)
from litgrpo.evaluation.metrics import (
    CorpusMetrics,
    DialogueScores,
    pass_at_k,
)

__all__ = [
    "CorpusMetrics",
    "DialogueScores",
    "PairedDifference",
    "compute_paired_difference",
    "mean_interval",
    "pass_at_k",
    "proportion_interval",
    "wilson_interval",
]
