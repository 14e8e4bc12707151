"""What rewards are told of episodes, and what becomes of those that failed."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from typing import Any

import torch

from litgrpo.types import RewardTable, Rollout

OF_EPISODES = ("messages", "turns", "turn_rewards")


def columns(rollout: Rollout) -> dict[str, list[Any]]:
    """What functions may ask for by name; `completion_ids` are those of the last turn alone."""
    assert rollout.turns is not None
    assert rollout.turn_rewards is not None
    last = rollout.turns == rollout.turns.amax(1, keepdim=True)
    rewards = [
        [None if isnan(reward) else reward for reward in row[: len(states)]]
        for row, states in zip(rollout.turn_rewards.tolist(), rollout.turn_states, strict=True)
    ]
    ids = zip(rollout.completion_ids, last, strict=True)
    return {
        "completion_ids": [row[mine].tolist() for row, mine in ids],
        "messages": [each.messages for each in rollout.episodes],
        "turns": [each.spoken for each in rollout.episodes],
        "turn_rewards": rewards,
    }


def without_failed(rewards: RewardTable, rollout: Rollout) -> RewardTable:
    """The table in which episodes that failed are no valid rows and have no reward."""
    failed = torch.tensor([bool(each.failed) for each in rollout.episodes])
    failed = failed.view_as(rewards.valid)

    def hidden(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: part.masked_fill(failed, torch.nan) for name, part in parts.items()}

    return replace(
        rewards,
        parts=hidden(rewards.parts),
        counted=hidden(rewards.counted),
        total=rewards.total.masked_fill(failed, 0.0),
        valid=rewards.valid & ~failed,
    )
