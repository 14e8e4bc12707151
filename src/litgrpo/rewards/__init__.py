"""How good a completion was: plain functions, named, weighted and guarded."""

from litgrpo.rewards.composite import Composite, Reward
from litgrpo.rewards.guard import Guard, InProcessGuard, RewardFailure, whole_batch

__all__ = ["Composite", "Guard", "InProcessGuard", "Reward", "RewardFailure", "whole_batch"]
