"""Rollouts of a policy whose weights are divided over processes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from litgrpo.distributed.fsdp.units import gathered
from litgrpo.rollout.engines.base import RolloutEngine
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.types import PromptBatch, Rollout


@dataclass
class GatheredRollouter(Rollouter):
    """Gathers the whole weights for a rollout, and lets them go after it.

    Rows end when they end: no process waits for another between two tokens. An engine with weights
    of its own (`sync_weights`) takes them over from the shards instead.
    """

    def generate(self, prompts: PromptBatch, *args: Any, **kwargs: Any) -> Rollout:
        """Sample completions; see `Rollouter.generate`. Every process must take part."""
        own_weights = type(self.engine).sync_weights is not RolloutEngine.sync_weights
        with nullcontext() if own_weights else gathered(self.policy):
            return super().generate(prompts, *args, **kwargs)
