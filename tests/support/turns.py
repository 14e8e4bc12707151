"""Shared by tests of algorithms.turns."""

from dataclasses import replace

import torch

from litgrpo.types import Episode, PromptBatch, RewardTable, Rollout


def episode(calls, said=(), done=True):
    spoken = [{"role": "assistant", "content": text} for text in said]
    return Episode(messages=spoken, turn_calls=list(calls), done=done)


def rollout(number, rewards, states=None, episodes=None):
    """One group; `number` is the turn of each token, -1 for observations."""
    turns = torch.tensor(number, dtype=torch.int16)
    shape = turns.shape
    one = torch.ones(1, 1, dtype=torch.long)
    episodes = episodes or [episode([1] * 9, ["ok"]) for _ in turns]
    states = states or [[] for _ in turns]
    return Rollout(
        prompts=PromptBatch(one, one.bool(), ["?"], {}, torch.zeros(1, dtype=torch.long)),
        group_size=shape[0],
        completion_ids=torch.zeros(shape, dtype=torch.long),
        completion_mask=torch.ones(shape, dtype=torch.bool),
        sampler_logprobs=torch.zeros(shape),
        truncated=torch.zeros(shape[0], dtype=torch.bool),
        turns=turns,
        episodes=[
            replace(each, turn_rewards=earned, turn_states=seen)
            for each, earned, seen in zip(episodes, rewards, states, strict=True)
        ],
    )


def table(total, counted=None, weight=1.0, **others):
    total = torch.tensor([total], dtype=torch.float64)
    parts = {name: torch.tensor([part], dtype=torch.float64) for name, part in others.items()}
    if counted is not None:
        parts["environment"] = torch.tensor([counted], dtype=torch.float64)
    weights = dict.fromkeys(parts, weight)
    return RewardTable(parts, weights, total, torch.ones_like(total, dtype=torch.bool))
