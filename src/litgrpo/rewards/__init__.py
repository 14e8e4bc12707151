"""How good a completion is: reward functions, how they are weighted, and how they are run.

Every reward function that litgrpo brings is here by name, such as `litgrpo.rewards.correctness`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from litgrpo.arguments import import_by_path
from litgrpo.rewards.public import PATHS

if TYPE_CHECKING:
    from litgrpo.rewards.llm_judge import LLMJudge
    from litgrpo.rewards.parts import Reward
    from litgrpo.rewards.reward_model import Judge, RewardModel
    from litgrpo.rewards.rubric import Criterion, Rubric
    from litgrpo.rewards.runner.in_process import InProcessRunner
    from litgrpo.rewards.runner.marks import pure, whole_batch
    from litgrpo.rewards.runner.process_runner import ProcessRunner
    from litgrpo.rewards.runner.runner import RewardRunner
    from litgrpo.rewards.runner.troubles import RewardFailure
    from litgrpo.rewards.scorer import Scorer

__all__ = [
    "Criterion",
    "InProcessRunner",
    "Judge",
    "LLMJudge",
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
    """Import a public name."""
    if name not in PATHS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_by_path(PATHS[name])
