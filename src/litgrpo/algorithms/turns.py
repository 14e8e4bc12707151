"""Turn-level advantages of multi-turn episodes: one value for each turn of the policy.

A completion without an environment is an episode of one turn.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from litgrpo.algorithms.advantages import Advantages, Groups, Normalized
from litgrpo.argument_types import check_field_types
from litgrpo.distributed.collectives import Comm
from litgrpo.types import Episode, RewardTable, Rollout

ENVIRONMENT_REWARD = "environment"  # the component that is the sum of the turns' rewards


# --- the turns of a rollout ---


@dataclass(frozen=True)
class Turns:
    """The turns of B * G episodes, at most K in each.

    Args:
        number: [N, C] turn in which a token was generated, -1 for other tokens.
        exist: [B, G, K] True for a turn in which the policy generated tokens.
        rewards: [B, G, K] float64 reward of each turn; they add up to the episode's reward.
        states: [B, G, K] number of the state before a turn; equal numbers in a group are equal
            states, -1 is unknown.
        void: [B, G] True if a turn neither called a tool nor ended the episode.
        answers: N last turns that called no tool; None if they did.

    Example:
        One group of two episodes; the first one calls a tool and answers, the second answers::

            Turns(
                number=tensor([[0, 0, -1, 1], [0, 0, 0, -1]]),
                exist=tensor([[[True, True], [True, False]]]),
                rewards=tensor([[[0.1, 1.0], [0.0, 0.0]]]),
                states=tensor([[[0, 1], [0, -1]]]),
                void=tensor([[False, False]]),
                answers=["12", "I do not know."],
            )
    """

    number: Tensor
    exist: Tensor
    rewards: Tensor
    states: Tensor
    void: Tensor
    answers: list[str | None]

    @classmethod
    def from_rollout(cls, rollout: Rollout, table: RewardTable) -> Turns:
        """The turns of N episodes with the rewards [B, G]."""
        assert rollout.turns is not None
        shape = (*table.total.shape, rollout.turn_rewards.shape[1])
        number = rollout.turns.long().to(table.total.device)
        num_turns = number.amax(1).view(shape[:2]) + 1
        exist = torch.arange(shape[2], device=num_turns.device) < num_turns[..., None]
        # Each turn has its own reward from the environment if that reward is an unmodified
        # component of the total. Everything else (rewards of the whole text; the environment's
        # reward if a gate or a normalization changed it) belongs to the last turn.
        rewards = torch.where(exist, _turn_rewards(rollout, table).view(shape), 0.0)
        last_turn = (num_turns - 1).clamp(min=0)[..., None]
        rest, size = table.total - rewards.sum(2), table.total.abs() + rewards.abs().sum(2)
        # A difference of this size is rounding, one for each turn, not a reward of the last turn.
        rest = rest.where(rest.abs() > 4 * shape[2] * torch.finfo(rest.dtype).eps * size, 0.0)
        rewards = rewards.scatter_add(2, last_turn, rest[..., None])
        counts = num_turns.flatten().tolist()
        pairs = list(zip(rollout.episodes, counts, strict=True))
        void = torch.tensor([_is_void(*pair) for pair in pairs]).view(shape[:2]).to(exist.device)
        answers = [_last_answer(*pair) for pair in pairs]
        return cls(number, exist, rewards, _number_states(rollout, exist), void, answers)

    def returns(self, gamma: float) -> Tensor:
        """[B, G, K] discounted return from each turn on: R_k = r_k + gamma * R_(k+1)."""
        returns, after = torch.zeros_like(self.rewards), torch.zeros_like(self.rewards[..., 0])
        for turn in reversed(range(self.rewards.shape[2])):
            after = self.rewards[..., turn] + gamma * after
            returns[..., turn] = after
        return returns

    def per_token(self, values: Tensor) -> Tensor:
        """[N, C] value [B, G, K] of the turn in which each token was generated; 0 for others."""
        tokens = values.flatten(0, 1).gather(1, self.number.clamp(min=0))
        return tokens.masked_fill(self.number < 0, 0.0)


def _turn_rewards(rollout: Rollout, table: RewardTable) -> Tensor:
    """[N, K] contribution of the environment's reward of each turn to the total reward."""
    earned = rollout.turn_rewards.to(table.total).nan_to_num(0.0)
    if ENVIRONMENT_REWARD not in table.weights:
        return torch.zeros_like(earned)
    episode_rewards = earned.sum(1).view_as(table.total)
    unmodified = table.processed[ENVIRONMENT_REWARD].isclose(episode_rewards)
    return torch.where(unmodified.view(-1, 1), table.weights[ENVIRONMENT_REWARD] * earned, 0.0)


def _number_states(rollout: Rollout, exist: Tensor) -> Tensor:
    """[B, G, K] number of the state before each turn; -1: unknown."""
    try:
        hash(tuple(tuple(episode.turn_states) for episode in rollout.episodes))
    except TypeError as error:
        raise ValueError(
            f"StepResult.state must be a text, a number, a tuple of them, or None, so that states "
            f"can be compared: {error}"
        ) from error
    numbers, size = torch.full(exist.shape, -1, dtype=torch.long), exist.shape[1]
    for group in range(len(numbers)):
        episodes = rollout.episodes[group * size : (group + 1) * size]
        after = [episode.turn_states for episode in episodes]
        group_states = {state: None for states in after for state in states if state is not None}
        number_of: dict[Hashable, int] = {None: -1} | {s: n for n, s in enumerate(group_states, 1)}
        # All episodes of a group begin in the same state, number 0. It counts only if the
        # environment returns states at all.
        first = 0 if group_states else -1
        for row, states in enumerate(after):
            before = [first, *(number_of[state] for state in states)][: exist.shape[2]]
            numbers[group, row, : len(before)] = torch.tensor(before)
    return numbers.to(exist.device).masked_fill(~exist, -1)


def _tool_calls(episode: Episode, num_turns: int) -> list[bool]:
    """Return True for each turn that called a tool; False if a limit cut it off."""
    called = [calls > 0 for calls in episode.turn_calls[:num_turns]]
    return called + [False] * (num_turns - len(called))


def _is_void(episode: Episode, num_turns: int) -> bool:
    """Return True if a turn neither called a tool nor ended the episode."""
    called = _tool_calls(episode, num_turns)
    if not called:
        return False
    *before, last_call = called
    return not all(before) or not (last_call or episode.done)


def _last_answer(episode: Episode, num_turns: int) -> str | None:
    """The last turn if it called no tool."""
    called = _tool_calls(episode, num_turns)
    return episode.assistant_texts[-1] if called and not called[-1] else None


# --- advantages ---


class TurnAdvantages(Advantages):
    """Advantage estimator of single turns.

    Example:
        Each turn's own reward, minus the mean over all turns of the group::

            @dataclass(frozen=True)
            class TurnReward(TurnAdvantages):
                def by_turn(self, groups, turns, valid):
                    rewards = turns.rewards.where(valid, torch.nan)
                    return rewards - rewards.flatten(1).nanmean(1)[:, None, None]
    """

    granularity = "turn"

    def per_token(
        self,
        table: RewardTable,
        mask: Tensor,
        comm: Comm,
        turns: Turns | None = None,
        score_norms: Tensor | None = None,
    ) -> Tensor:
        if turns is None:
            return super().per_token(table, mask, comm)
        groups = Groups.from_table(table, mask.sum(1).view_as(table.total), comm)
        return turns.per_token(self.per_turn(groups, turns))

    def per_turn(self, groups: Groups, turns: Turns) -> Tensor:
        """[B, G, K] advantages; 0 if there is no turn, or the episode has no valid reward."""
        valid = turns.exist & ~groups.values.isnan()[..., None]
        return torch.where(valid, self.by_turn(groups, turns, valid), 0.0).nan_to_num(0.0)

    def estimate(self, groups: Groups) -> Tensor:
        rewards = groups.values[..., None]
        valid, size = ~rewards.isnan(), len(groups.values.flatten())
        turns = Turns(
            number=torch.zeros(size, 1, dtype=torch.long),
            exist=valid,
            rewards=rewards.nan_to_num(0.0),
            states=torch.full_like(rewards, -1, dtype=torch.long),
            void=torch.zeros_like(valid[..., 0]),
            answers=[None] * size,
        )
        return self.by_turn(groups, turns, valid)[..., 0]

    @abstractmethod
    def by_turn(self, groups: Groups, turns: Turns, valid: Tensor) -> Tensor:
        """[B, G, K] advantages; NaN counts as 0.

        Args:
            groups: rewards of whole episodes.
            turns: of the episodes.
            valid: [B, G, K] turns that exist, in episodes with a valid reward.
        """


def _normalize(groups: Groups, values: Tensor, valid: Tensor, eps: float) -> Tensor:
    """(x - mean) / (std + eps) of the valid values [B, ...] of each of B groups; 0 for others."""
    compared = values.where(valid, torch.nan).flatten(1)
    deviation, std, _ = replace(groups, values=compared).group_statistics()
    return (deviation / (std + eps)).nan_to_num(0.0).view_as(values)


@check_field_types
@dataclass(frozen=True)
class GiGPO(TurnAdvantages):
    """GiGPO: advantage of the episode plus that of the turn among turns in the same state.

    A_ik = A(R_i) + turn_weight * A(R_ik); A(x) = (x - mean) / (std + eps), of R_i over the group,
    of the return R_ik over all turns of the group whose state equals that of turn k. A state that
    occurs once adds 0. Without states, and in one turn, this is GRPO. Source: arXiv:2505.10978,
    equations 3 and 6 to 8; gamma and turn_weight are those of its authors' ALFWorld run.

    Args:
        gamma: weight of the next turn's return, per turn.
        turn_weight: weight of the turn's advantage (verl-agent: step_advantage_w).
        scale: standard deviation (n - 1) over the same values as the mean, or `none`.
        eps: added to a standard deviation.
    """

    gamma: float = 0.95
    turn_weight: float = 1.0
    scale: Literal["group", "none"] = "group"
    eps: float = 1e-4

    def __post_init__(self) -> None:
        _check_gamma(self.gamma)

    def by_turn(self, groups: Groups, turns: Turns, valid: Tensor) -> Tensor:
        episode = Normalized("group", self.scale, self.eps).estimate(groups)[..., None]
        returns, compared = turns.returns(self.gamma), torch.zeros_like(turns.rewards)
        for state in range(int(turns.states.max()) + 1):
            in_state = valid & (turns.states == state)
            of_state = replace(groups, values=returns.where(in_state, torch.nan).flatten(1))
            among = Normalized("group", self.scale, self.eps).estimate(of_state)
            compared = compared + among.nan_to_num(0.0).view_as(compared)
        return episode + self.turn_weight * compared


@check_field_types
@dataclass(frozen=True)
class MTGRPO(TurnAdvantages):
    """MT-GRPO: advantage of the outcome for all turns, plus those of the rewards from a turn on.

    A_ik = A(r_iK) + turn_weight * sum of A(r_il) over turns l = k ... K - 1, with K the last turn
    of the episode, whose reward is the outcome; A(x) = (x - mean) / (std + eps) over the episodes
    of the group that have a turn l before their last one. In one turn this is GRPO. Source:
    arXiv:2505.11821. As in its authors' code the histories before a turn differ; the paper's later
    form compares turns of one history only, which takes a tree of rollouts.

    Args:
        turn_weight: weight of the rewards of turns before the last.
        eps: added to a standard deviation.
    """

    turn_weight: float = 1.0
    eps: float = 1e-4

    def by_turn(self, groups: Groups, turns: Turns, valid: Tensor) -> Tensor:
        before = valid & torch.nn.functional.pad(turns.exist, (0, 1))[..., 1:]
        last_rewards = (turns.rewards * (turns.exist & ~before)).sum(2)
        outcome = _normalize(groups, last_rewards, ~groups.values.isnan(), self.eps)
        single = [
            _normalize(groups, turns.rewards[..., k], before[..., k], self.eps)
            for k in range(before.shape[2])
        ]
        to_come = torch.stack(single, 2).flip(2).cumsum(2).flip(2)
        return outcome[..., None] + self.turn_weight * to_come


@check_field_types
@dataclass(frozen=True)
class GTPO(TurnAdvantages):
    """GTPO: discounted return of each turn, normalized over all turns of the group.

    A_ik = (R_ik - mean) / (std + eps), R_ik = r_ik + gamma * R_i(k+1). In one turn this is GRPO.
    Source: the abstract of arXiv:2511.14846; one mean over all turns of the group is an
    interpretation of it, and its reward shaping belongs to the environment.

    Args:
        gamma: weight of the next turn's return, per turn.
        eps: added to the standard deviation.
    """

    gamma: float = 0.9
    eps: float = 1e-4

    def __post_init__(self) -> None:
        _check_gamma(self.gamma)

    def by_turn(self, groups: Groups, turns: Turns, valid: Tensor) -> Tensor:
        return _normalize(groups, turns.returns(self.gamma), valid, self.eps)


@check_field_types
@dataclass(frozen=True)
class ReBN(TurnAdvantages):
    """REINFORCE with return batch normalization: returns normalized over all turns of the batch.

    A_ik = (R_ik - mean) / (std + eps), R_ik = r_ik + gamma * R_i(k+1), over all turns of all
    processes. In one turn: REINFORCE with the batch's mean and standard deviation. Source: GEM,
    arXiv:2510.01051; its authors' code divides by n, this by n - 1.

    Args:
        gamma: weight of the next turn's return, per turn.
        eps: added to the standard deviation.
    """

    gamma: float = 0.9
    eps: float = 1e-4

    def __post_init__(self) -> None:
        _check_gamma(self.gamma)

    @property
    def needs_group(self) -> bool:
        return False

    def by_turn(self, groups: Groups, turns: Turns, valid: Tensor) -> Tensor:
        returns = turns.returns(self.gamma).where(valid, torch.nan).flatten(1)
        deviation, std = replace(groups, values=returns).batch_statistics()
        return (deviation / (std + self.eps)).view_as(turns.rewards)


@check_field_types
@dataclass(frozen=True)
class SimpleTIR(TurnAdvantages):
    """SimpleTIR: episodes with a void turn get zero advantage; they stay in the baseline.

    A turn is void if it neither calls a tool nor ends the episode with an answer. A completion of
    one turn without an environment is never void. Void episodes count in the denominators of the
    loss, too; the authors' code removes them from the loss mask. Source: arXiv:2509.02479.

    Args:
        answer_pattern: regular expression that a last turn must match (anywhere) to be an answer;
            the default matches any text.
        advantages: advantage estimator of whole episodes.
    """

    answer_pattern: str = r"\S"
    advantages: Advantages = field(default_factory=Normalized)

    def __post_init__(self) -> None:
        self.check_contained()
        try:
            re.compile(self.answer_pattern)
        except re.error as error:
            setting = f"answer_pattern is {self.answer_pattern!r}"
            raise ValueError(f"{setting}, not a regular expression: {error}") from None

    def by_turn(self, groups: Groups, turns: Turns, valid: Tensor) -> Tensor:
        pattern = re.compile(self.answer_pattern)
        answered = [answer is None or bool(pattern.search(answer)) for answer in turns.answers]
        void = turns.void | ~torch.tensor(answered, device=valid.device).view_as(turns.void)
        advantages = self.advantages.estimate(groups).masked_fill(void, 0.0)
        return advantages[..., None].expand_as(valid)


def _check_gamma(gamma: float) -> None:
    """Reject a discount outside of [0, 1]."""
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}; it must be from 0 to 1, per turn")
