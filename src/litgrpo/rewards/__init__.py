"""How good a completion was: plain functions, named, weighted and guarded."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from litgrpo.rewards.models import Judge, RewardModel
    from litgrpo.rewards.rubric import Criterion, Rubric
    from litgrpo.rewards.runner.calls import pure, whole_batch
    from litgrpo.rewards.runner.in_process import InProcessRunner, RewardFailure, RewardRunner
    from litgrpo.rewards.runner.process_guard import ProcessRunner
    from litgrpo.rewards.scorer import Reward, Scorer

# Imported when asked for, because a worker process needs `calls` and a user's function needs `math`
# without torch, which takes a second.
HOMES = {
    "Scorer": "scorer",
    "Reward": "scorer",
    "RewardRunner": "runner.in_process",
    "InProcessRunner": "runner.in_process",
    "RewardFailure": "runner.in_process",
    "ProcessRunner": "runner.process_guard",
    "Judge": "models",
    "RewardModel": "models",
    "Criterion": "rubric",
    "Rubric": "rubric",
    "pure": "runner.calls",
    "whole_batch": "runner.calls",
}
__all__ = [
    "Criterion",
    "InProcessRunner",
    "Judge",
    "ProcessRunner",
    "Reward",
    "RewardFailure",
    "RewardModel",
    "RewardRunner",
    "Rubric",
    "Scorer",
    "pure",
    "whole_batch",
]


def __getattr__(name: str) -> Any:
    """Find one of the public names."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.{HOMES[name]}"))[name]
