"""Shared by tests of algorithms.turns."""

import torch

from litgrpo.rollout.episodes import Episode
from litgrpo.types import PromptBatch, RewardTable, Rollout


def episode(calls, said=(), done=True):
    spoken = [{"role": "assistant", "content": text} for text in said]
    return Episode(messages=spoken, turn_calls=list(calls), done=done)


def rollout(number, rewards, states=None, episodes=None):
    """One group; `number` is the turn of each token, -1 for observations."""
    turns = torch.tensor(number, dtype=torch.int16)
    shape = turns.shape
    one = torch.ones(1, 1, dtype=torch.long)
    spoken = turns >= 0
    return Rollout(
        prompts=PromptBatch(one, one.bool(), ["?"], {}, torch.zeros(1, dtype=torch.long)),
        group_size=shape[0],
        completion_ids=torch.zeros(shape, dtype=torch.long),
        completion_mask=torch.ones(shape, dtype=torch.bool),
        sampler_logprobs=torch.zeros(shape),
        truncated=torch.zeros(shape[0], dtype=torch.bool),
        loss_mask=spoken,
        turns=turns,
        turn_rewards=torch.tensor(rewards, dtype=torch.float64),
        turn_states=states or [[] for _ in range(shape[0])],
        episodes=episodes or [episode([1] * 9, ["ok"]) for _ in range(shape[0])],
    )


def table(total, counted=None, weight=1.0, **others):
    total = torch.tensor([total], dtype=torch.float64)
    parts = {name: torch.tensor([part], dtype=torch.float64) for name, part in others.items()}
    if counted is not None:
        parts["environment"] = torch.tensor([counted], dtype=torch.float64)
    weights = dict.fromkeys(parts, weight)
    return RewardTable(parts, weights, total, torch.ones_like(total, dtype=torch.bool))
