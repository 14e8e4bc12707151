"""Stages of an iteration between rewards and advantages, which may change what is trained on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch

from litgrpo.rewards.scorer import Scorer
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.rollout.sampling import Sampling
from litgrpo.types import Experience


class Stage(ABC):
    """Changes the experience of an iteration after its rewards are known."""

    def connect(self, loader: Any) -> None:  # noqa: B027 (optional)
        """Use the training loader, before training starts."""

    @abstractmethod
    def __call__(self, experience: Experience, iteration: int) -> Experience:
        """Return the experience to train on.

        Every row has its log-probabilities: a stage that adds completions computes theirs.

        Args:
            experience: as it was sampled, or as earlier stages left it.
            iteration: number of finished iterations.
        """


@dataclass
class GreedyBaseline(Stage):
    """Adds the reward of one greedy completion per prompt, the baseline of ReMax.

    Args:
        rollouter: generates.
        scorer: computes rewards.

    Source: ReMax, arXiv:2310.10505, algorithm 1.
    """

    rollouter: Rollouter
    scorer: Scorer

    def __call__(self, experience: Experience, iteration: int) -> Experience:
        """Sample the greedy completions with the current weights, and score them."""
        greedy_sampling = Sampling(temperature=0.0)
        greedy = self.rollouter.generate(
            experience.prompts, "train", iteration, group_size=1, sampling=greedy_sampling
        )
        with self.rollouter.clock.phase("time/reward_s"):
            rewards = self.scorer.start(greedy, iteration).wait()
        baseline = rewards.scored.squeeze(1)
        mean = torch.stack([baseline.nansum(), (~baseline.isnan()).sum()])
        return replace(
            experience,
            rewards=replace(experience.rewards, greedy=baseline),
            stats=experience.stats | {"reward/greedy_mean": mean},
        )
