"""Evaluation on held-out prompts, with intervals."""

from litgrpo.evaluation.intervals import (
    PairedDifference,
    clustered_mean,
    clustered_proportion,
    paired_difference,
    wilson,
)
from litgrpo.evaluation.metrics import (
    CorpusMetrics,
    DialogueScores,
    GreedyAccuracy,
    RewardMeans,
    SampledAccuracy,
    pass_at_k,
)

__all__ = [
    "CorpusMetrics",
    "DialogueScores",
    "GreedyAccuracy",
    "PairedDifference",
    "RewardMeans",
    "SampledAccuracy",
    "clustered_mean",
    "clustered_proportion",
    "paired_difference",
    "pass_at_k",
    "wilson",
]
