"""How good a completion was: plain functions, named, weighted and guarded."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from litgrpo.rewards.calls import pure, whole_batch
    from litgrpo.rewards.composite import Composite, Reward
    from litgrpo.rewards.guard import Guard, InProcessGuard, RewardFailure
    from litgrpo.rewards.models import Judge, RewardModel
    from litgrpo.rewards.process_guard import ProcessGuard
    from litgrpo.rewards.rubric import Criterion, Rubric

# Imported when asked for, because a worker process needs `calls` and a user's function needs `math`
# without torch, which takes a second.
HOMES = {
    "Composite": "composite",
    "Reward": "composite",
    "Guard": "guard",
    "InProcessGuard": "guard",
    "RewardFailure": "guard",
    "ProcessGuard": "process_guard",
    "Judge": "models",
    "RewardModel": "models",
    "Criterion": "rubric",
    "Rubric": "rubric",
    "pure": "calls",
    "whole_batch": "calls",
}
__all__ = [
    "Composite",
    "Criterion",
    "Guard",
    "InProcessGuard",
    "Judge",
    "ProcessGuard",
    "Reward",
    "RewardFailure",
    "RewardModel",
    "Rubric",
    "pure",
    "whole_batch",
]


def __getattr__(name: str) -> Any:
    """Find one of the public names."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.{HOMES[name]}"))[name]
