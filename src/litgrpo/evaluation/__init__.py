"""How good the policy is, and how sure that is."""

from litgrpo.evaluation.accuracy import GreedyAccuracy, RewardMeans, SampledAccuracy, pass_at_k
from litgrpo.evaluation.dialogue import CorpusScores, DialogueScores
from litgrpo.evaluation.intervals import (
    PairedDifference,
    clustered_mean,
    clustered_proportion,
    paired_difference,
    wilson,
)

__all__ = [
    "CorpusScores",
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
