"""The options of a run that its parts check against each other, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from litgrpo.algorithms.objective import Objective
    from litgrpo.learning.controllers import Controllers
    from litgrpo.learning.update_config import UpdateConfig
    from litgrpo.rollout.engines.base import RolloutEngine
    from litgrpo.rollout.sampling import Sampling


@dataclass(frozen=True)
class RunOptions:
    """Options of `GRPO`, as an option that depends on others reads them in its `check`."""

    objective: Objective
    sampling: Sampling
    engine: RolloutEngine
    update: UpdateConfig
    controllers: Controllers
    environment: Any
    group_size: int
    dynamic_sampling_attempts: int
