"""Per-turn credit: published advantages of episodes, one number for each turn of the policy.

A completion of one turn is an episode of one turn, whose reward is its turn's.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from litgrpo.algorithms.advantages import Advantages, Groups, Normalized
from litgrpo.algorithms.turns import Turns
from litgrpo.distributed.collectives import Comm
from litgrpo.types import RewardTable


class TurnAdvantages(Advantages):
    """How much better a turn is than expected."""

    def of_tokens(self, table: RewardTable, lengths: Tensor, comm: Comm, turns: Turns) -> Tensor:
        """[N, C] float64 advantage of each token's turn; see `Advantages.of_tokens`."""
        groups = Groups(table, lengths, comm, table.total).use(table.total, table.valid)
        return turns.per_token(self.known(groups, turns))

    def known(self, groups: Groups, turns: Turns) -> Tensor:
        """[B, G, K] advantages; 0 where there is no turn, or the episode teaches nothing."""
        known = turns.exist & ~groups.values.isnan()[..., None]
        return torch.where(known, self.by_turn(groups, turns, known), 0.0).nan_to_num(0.0)

    def estimate(self, groups: Groups) -> Tensor:
        """[B, G] advantages of completions of one turn."""
        rewards = groups.values[..., None]
        known, size = ~rewards.isnan(), len(groups.values.flatten())
        turns = Turns(
            number=torch.zeros(size, 1, dtype=torch.long),
            exist=known,
            rewards=rewards.nan_to_num(0.0),
            states=torch.full_like(rewards, -1, dtype=torch.long),
            void=torch.zeros_like(known[..., 0]),
            answers=[None] * size,
        )
        return self.by_turn(groups, turns, known)[..., 0]

    @abstractmethod
    def by_turn(self, groups: Groups, turns: Turns, known: Tensor) -> Tensor:
        """[B, G, K] advantages; NaN counts as 0.

        Args:
            groups: rewards of whole episodes.
            turns: what happened in their turns.
            known: [B, G, K] turns that exist, in episodes that teach something.
        """


def _normalized(groups: Groups, values: Tensor, known: Tensor, eps: float) -> Tensor:
    """Distance from the mean of the known values, in their standard deviations; per group.

    Args:
        groups: for the precision of rewards.
        values: [B, ...] numbers that are compared with each other in each of B groups.
        known: [B, ...] which count; the others get 0.
        eps: added to the standard deviation.
    """
    chosen = values.where(known, torch.nan).flatten(1)
    distance, std, _ = replace(groups, values=chosen).spread()
    return (distance / (std + eps)).nan_to_num(0.0).view_as(values)


@dataclass(frozen=True)
class GiGPO(TurnAdvantages):
    """GiGPO: how good the episode was, plus how good the turn was among turns in the same state.

    A_ik = A(R_i) + weight * A(R_ik); A(x) = (x - mean) / (std + eps), of R_i over the group, of the
    return R_ik over all turns of the group that were spoken in a state equal to that of turn k. A
    state that comes once adds 0. Without states, and in one turn: GRPO. Source: arXiv:2505.10978,
    equations 3 and 6 to 8; gamma and weight are those of its authors' ALFWorld run.

    Args:
        gamma: weight of the next turn's return, per turn.
        weight: of the comparison between turns.
        scale: standard deviation (n - 1) of what is compared, or `none`.
        eps: added to a standard deviation.
    """

    gamma: float = 0.95
    weight: float = 1.0
    scale: Literal["group", "none"] = "group"
    eps: float = 1e-4

    def __post_init__(self) -> None:
        """Check the discount."""
        _check_gamma(self.gamma)

    def by_turn(self, groups: Groups, turns: Turns, known: Tensor) -> Tensor:
        """[B, G, K] of the episode, and of each turn among those in its state."""
        episode = Normalized("group", self.scale, self.eps).estimate(groups)[..., None]
        returns, compared = turns.returns(self.gamma), torch.zeros_like(turns.rewards)
        for state in range(int(turns.states.max()) + 1):
            here = known & (turns.states == state)
            chosen = replace(groups, values=returns.where(here, torch.nan).flatten(1))
            among = Normalized("group", self.scale, self.eps).estimate(chosen)
            compared = compared + among.nan_to_num(0.0).view_as(compared)
        return episode + self.weight * compared


@dataclass(frozen=True)
class MTGRPO(TurnAdvantages):
    """MT-GRPO: the outcome for all turns, plus what a turn and those after it earned on the way.

    A_ik = A(r_iK) + weight * sum of A(r_il) over turns l = k ... K - 1, with K the last turn of the
    episode, whose reward is the outcome; A(x) = (x - mean) / (std + eps) over the episodes of the
    group that have a turn l before their last one. In one turn: GRPO. Source: arXiv:2505.11821.
    As in its authors' code the histories before a turn differ; the paper's later form compares
    turns of one history only, which takes a tree of rollouts.

    Args:
        weight: of the turns before the last.
        eps: added to a standard deviation.
    """

    weight: float = 1.0
    eps: float = 1e-4

    def by_turn(self, groups: Groups, turns: Turns, known: Tensor) -> Tensor:
        """[B, G, K] of the outcome, and of the turns from here to the one before the last."""
        before = known & torch.nn.functional.pad(turns.exist, (0, 1))[..., 1:]
        last = (turns.rewards * (turns.exist & ~before)).sum(2)
        outcome = _normalized(groups, last, ~groups.values.isnan(), self.eps)
        single = [
            _normalized(groups, turns.rewards[..., k], before[..., k], self.eps)
            for k in range(before.shape[2])
        ]
        to_come = torch.stack(single, 2).flip(2).cumsum(2).flip(2)
        return outcome[..., None] + self.weight * to_come


@dataclass(frozen=True)
class GTPO(TurnAdvantages):
    """GTPO: discounted return of each turn, normalized over all turns of the group.

    A_ik = (R_ik - mean) / (std + eps), R_ik = r_ik + gamma * R_i(k+1). In one turn: GRPO. Source:
    arXiv:2511.14846; of the paper only the abstract was at hand: that all turns of the group share
    one mean is our reading, and its reward shaping is a matter of the environment.

    Args:
        gamma: weight of the next turn's return, per turn.
        eps: added to the standard deviation.
    """

    gamma: float = 0.9
    eps: float = 1e-4

    def __post_init__(self) -> None:
        """Check the discount."""
        _check_gamma(self.gamma)

    def by_turn(self, groups: Groups, turns: Turns, known: Tensor) -> Tensor:
        """[B, G, K] normalized returns."""
        return _normalized(groups, turns.returns(self.gamma), known, self.eps)


@dataclass(frozen=True)
class ReBN(TurnAdvantages):
    """REINFORCE with return batch normalization: returns of turns over all turns of the batch.

    A_ik = (R_ik - mean) / (std + eps), R_ik = r_ik + gamma * R_i(k+1), over all turns of all
    processes. In one turn: REINFORCE with the batch's mean and deviation. Source: GEM,
    arXiv:2510.01051; its authors' code divides by n where this takes n - 1.

    Args:
        gamma: weight of the next turn's return, per turn.
        eps: added to the standard deviation.
    """

    gamma: float = 0.9
    eps: float = 1e-4

    def __post_init__(self) -> None:
        """Check the discount."""
        _check_gamma(self.gamma)

    @property
    def compares(self) -> bool:
        """The baseline is the batch's."""
        return False

    def by_turn(self, groups: Groups, turns: Turns, known: Tensor) -> Tensor:
        """[B, G, K] normalized returns."""
        chosen = turns.returns(self.gamma).where(known, torch.nan).flatten(1)
        distance, std = replace(groups, values=chosen).batch()
        return (distance / (std + self.eps)).view_as(turns.rewards)


@dataclass(frozen=True)
class WithoutVoid(TurnAdvantages):
    """SimpleTIR: episodes with a void turn leave the update; they stay in the baseline.

    A turn is void if it neither calls a tool nor ends the episode with an answer. A completion of
    one turn has no turn to look at: `of`. Source: arXiv:2509.02479.

    Args:
        answer: regular expression that a last turn must hold to be an answer; the default is any
            text at all.
        of: advantages of whole episodes.
    """

    answer: str = r"\S"
    of: Advantages = field(default_factory=Normalized)

    def __post_init__(self) -> None:
        """Check the expression."""
        try:
            re.compile(self.answer)
        except re.error as error:
            raise ValueError(f"answer is {self.answer!r}, no regular expression: {error}") from None

    def by_turn(self, groups: Groups, turns: Turns, known: Tensor) -> Tensor:
        """[B, G, K] the episode's advantage; 0 in those with a void turn."""
        given = [each is None or re.search(self.answer, each) is not None for each in turns.answers]
        void = turns.void | ~torch.tensor(given, device=known.device).view_as(turns.void)
        return self.of.estimate(groups).masked_fill(void, 0.0)[..., None].expand_as(known)


def _check_gamma(gamma: float) -> None:
    """Refuse a discount that is none."""
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}; it must be from 0 to 1, per turn")
