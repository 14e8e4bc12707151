"""The options of a run that its parts check against each other, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from litgrpo.algorithms.objective import Objective
    from litgrpo.rewards.reward import Reward
    from litgrpo.rollout.engines.base import RolloutEngine
    from litgrpo.rollout.sampling import Sampling


@dataclass(frozen=True)
class RunOptions:
    """Options of `GRPO`, as an option that depends on others reads them in its `check`."""

    objective: Objective
    sampling: Sampling
    engine: RolloutEngine
    rewards: Mapping[str, Reward]
    environment: Any
    has_segments: bool  # an agent plays the episodes, in conversations of its own
    group_size: int
    dynamic_sampling_attempts: int
