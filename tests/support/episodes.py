"""Shared by tests of callbacks.episodes."""

from dataclasses import replace

import torch

from litgrpo.callbacks.completions import completion_rows
from litgrpo.types import Episode
from tests.support.standin import prompts, rewards_of, rollout_of

SAID = [
    {"role": "assistant", "content": "<call>2*3</call>"},
    {"role": "tool", "name": "multiply", "content": "6 | *six*"},
    {"role": "assistant", "content": "6"},
]


def rollout_of_episodes():
    """Two episodes: one of two turns, one that failed in its first."""
    rollout = rollout_of(prompts("2*3=?"))
    told = [
        Episode(
            SAID, turn_rewards=[0.0, 1.0], turn_states=[None, None], calls={"multiply": (1, 0)}
        ),
        Episode(
            SAID[:1],
            turn_rewards=[None],
            turn_states=[None],
            failed="timed out",
            observation_tokens_cut=7,
        ),
    ]
    turns = torch.zeros_like(rollout.completion_ids, dtype=torch.int16)
    return replace(rollout, episodes=told, turns=turns)


def rows_of_episodes():
    rollout = rollout_of_episodes()
    rewards = rewards_of(rollout)
    return completion_rows(3, rollout, rewards, rewards.total - 0.5)
