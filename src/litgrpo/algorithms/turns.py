"""What the turns of episodes earned, found and did: what per-turn advantages are made of."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from litgrpo.types import RewardTable, Rollout

OWN = "environment"  # the reward that is the sum of the turns' own


@dataclass(frozen=True)
class Turns:
    """The turns of B * G episodes, at most K in each.

    Args:
        number: [N, C] turn that a token was spoken in, -1 elsewhere.
        exist: [B, G, K] True for a turn in which the policy spoke.
        rewards: [B, G, K] float64 what each turn earned; they add up to the episode's reward.
        states: [B, G, K] number of the state that a turn was spoken in; equal numbers in a group
            are equal states, and -1 is a state that nobody told.
        void: [B, G] True where a turn had neither a call nor ended the episode.
        answers: N last turns, where they called no tool; None where they did.
    """

    number: Tensor
    exist: Tensor
    rewards: Tensor
    states: Tensor
    void: Tensor
    answers: list[str | None]

    @classmethod
    def of(cls, rollout: Rollout, table: RewardTable) -> Turns:
        """The turns of a rollout.

        Where the environment's own reward is part of the total as it is, each turn has its share
        of it. All else (rewards of the whole text; the environment's, where a gate or a
        normalization changed it) is known at the end, and is the last turn's.

        Args:
            rollout: N episodes.
            table: [B, G] theirs.
        """
        assert rollout.turns is not None
        assert rollout.turn_rewards is not None
        shape = (*table.total.shape, rollout.turn_rewards.shape[1])
        number = rollout.turns.long().to(table.total.device)
        played = number.amax(1).view(shape[:2]) + 1
        exist = torch.arange(shape[2], device=played.device) < played[..., None]
        rewards = torch.where(exist, _own(rollout, table).view(shape), 0.0)
        last = (played - 1).clamp(min=0)[..., None]
        rest, size = table.total - rewards.sum(2), table.total.abs() + rewards.abs().sum(2)
        # What is left of equal numbers is rounding, one for each turn.
        rest = rest.where(rest.abs() > 4 * shape[2] * torch.finfo(rest.dtype).eps * size, 0.0)
        rewards = rewards.scatter_add(2, last, rest[..., None])
        counts = played.flatten().tolist()
        pairs = list(zip(rollout.episodes, counts, strict=True))
        void = torch.tensor([_void(*pair) for pair in pairs]).view(shape[:2]).to(exist.device)
        answers = [_answer(*pair) for pair in pairs]
        return cls(number, exist, rewards, _states(rollout, exist), void, answers)

    def returns(self, gamma: float) -> Tensor:
        """[B, G, K] what is earned from each turn on: R_k = r_k + gamma * R_(k+1).

        Args:
            gamma: weight of the next turn's return.
        """
        returns, after = torch.zeros_like(self.rewards), torch.zeros_like(self.rewards[..., 0])
        for turn in reversed(range(self.rewards.shape[2])):
            after = self.rewards[..., turn] + gamma * after
            returns[..., turn] = after
        return returns

    def per_token(self, values: Tensor) -> Tensor:
        """[N, C] the value [B, G, K] of the turn that each token was spoken in; 0 elsewhere."""
        found = values.flatten(0, 1).gather(1, self.number.clamp(min=0))
        return found.masked_fill(self.number < 0, 0.0)


def _own(rollout: Rollout, table: RewardTable) -> Tensor:
    """[N, K] what the environment's reward of each turn adds to the total."""
    earned = rollout.turn_rewards
    assert earned is not None
    earned = earned.to(table.total).nan_to_num(0.0)
    if OWN not in table.weights:
        return torch.zeros_like(earned)
    as_it_is = table.counted[OWN].isclose(earned.sum(1).view_as(table.total))
    return torch.where(as_it_is.view(-1, 1), table.weights[OWN] * earned, 0.0)


def _states(rollout: Rollout, exist: Tensor) -> Tensor:
    """[B, G, K] number of the state before each turn; -1: unknown.

    All episodes of a group begin in one state (number 0), which counts only where the environment
    tells of states at all.

    Raises:
        ValueError: a state cannot be compared.
    """
    try:
        hash(tuple(map(tuple, rollout.turn_states)))
    except TypeError as error:
        raise ValueError(
            f"an environment's state (StepResult.state) cannot be compared with others: "
            f"{error}. Give a "
            "text, a number or a tuple of them, or None."
        ) from error
    found, size = torch.full(exist.shape, -1, dtype=torch.long), exist.shape[1]
    for group in range(len(found)):
        after = rollout.turn_states[group * size : (group + 1) * size]
        told = {state: None for states in after for state in states if state is not None}
        numbers: dict[Hashable, int] = {None: -1} | {s: n for n, s in enumerate(told, 1)}
        for row, states in enumerate(after):
            first = 0 if told else -1
            before = [first, *(numbers[state] for state in states)][: exist.shape[2]]
            found[group, row, : len(before)] = torch.tensor(before)
    return found.to(exist.device).masked_fill(~exist, -1)


def _called(episode: Any, turns: int) -> list[bool]:
    """Whether each turn called a tool; one that a limit cut off was not even asked."""
    return [calls > 0 for calls in [*episode.turn_calls, *[0] * turns][:turns]]


def _void(episode: Any, turns: int) -> bool:
    """Whether a turn neither called a tool nor was the end that the environment saw."""
    called = _called(episode, turns)
    return not all(called[:-1]) or not (all(called[-1:]) or episode.done)


def _answer(episode: Any, turns: int) -> str | None:
    """The last turn, where it called no tool."""
    called = _called(episode, turns)
    return None if all(called[-1:]) else episode.assistant_texts[-1]
