"""A test subject: what LAPDOG's released code does when it learns by reinforcement.

It is not a choice of the library. Four things are as released: the sign (it minimizes minus reward
times cross-entropy, which makes rewarded replies less likely), greedy decoding, padding learned as
if it were said, and neither a baseline nor a reference. `OVERLAY` sets what YAML can.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from litgrpo.algorithms.advantages import Advantages, Groups
from litgrpo.training.grpo import GRPO
from litgrpo.training.learner import Learner
from litgrpo.types import RewardTable, Rollout, RolloutLogprobs, TrainingBatch

OVERLAY: dict[str, Any] = {
    "model": {
        "class_path": "tests.benchmarks.lapdog_released.Released",
        "init_args": {
            "group_size": 1,
            "sampling": {"temperature": 0.0},
            "objective": {
                "advantages": {"class_path": "tests.benchmarks.lapdog_released.WrongSign"},
                "surrogate": {"class_path": "PolicyGradient"},
                "loss_aggregation": "sequence_mean",
                "kl_coef": 0.0,
            },
            "check_invariants": False,  # they reject it: see tests/benchmarks/test_dialogue.py
        },
    },
    "data": {"init_args": {"batch_size": 64}},  # as many replies as 8 groups of 8
}


@dataclass(frozen=True)
class WrongSign(Advantages):
    """Minus the reward, so that descending on -A log p descends on -R * CE = R log p."""

    @property
    def needs_group(self) -> bool:
        """One completion is enough."""
        return False

    def estimate(self, groups: Groups) -> Tensor:
        """[B, G] minus the rewards."""
        return -groups.values


class PaddingLearner(Learner):
    """A learner that takes the padding behind a reply for a part of it."""

    def build_batch(
        self, rollout: Rollout, rewards: RewardTable, logprobs: RolloutLogprobs
    ) -> TrainingBatch:
        """The mean of a reply is over every column of the batch."""
        everything = torch.ones_like(rollout.completion_mask)
        filled = replace(rollout, completion_mask=everything, loss_mask=everything)
        return super().build_batch(filled, rewards, logprobs)


class Released(GRPO):
    """GRPO, with the padding behind a reply learned too."""

    def configure_model(self) -> None:
        """Load the policy, and let it learn from padding."""
        super().configure_model()
        self.learner = PaddingLearner(**vars(self.learner))
