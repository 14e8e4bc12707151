"""What happens between a prompt and a finished completion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from litgrpo.rollout.engines.interface import Requests, RolloutEngine
from litgrpo.types import Rollout


class Environment(ABC):
    """Lets an engine complete prompts and may answer on the way.

    A row of the rollout holds everything that was said in it, one after the other. What the policy
    sampled is marked by `Rollout.loss_mask`; what the environment said is in `completion_mask`
    only, so it is read and not learned from, and its `sampler_logprobs` are 0.
    """

    @abstractmethod
    def play(self, engine: RolloutEngine, requests: Requests) -> Rollout:
        """Complete the prompts.

        Args:
            engine: samples.
            requests: prompts, group size, random numbers and sampling of the whole rollout.

        Returns:
            A rollout of N = B * G rows, texts not yet decoded.
        """


@dataclass(frozen=True)
class SingleTurn(Environment):
    """The policy answers once."""

    def play(self, engine: RolloutEngine, requests: Requests) -> Rollout:
        """Sample completions."""
        return engine.generate(requests)
