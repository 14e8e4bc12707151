"""Dynamic sampling (DAPO): replace zero-variance groups by groups of other prompts.

A group is informative if it has a gradient: the rewards of its completions differ, or its turns
have advantages. All others are zero-variance groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from litgrpo.algorithms.advantages import Groups
from litgrpo.algorithms.turn_credit import TurnAdvantages, Turns
from litgrpo.distributed.collectives import Comm, SingleProcess
from litgrpo.rollout.groups import put_rows, with_groups
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.types import PromptBatch, RewardTable, Rollout, Stats


@runtime_checkable
class PromptSource(Protocol):
    """Training data that can yield extra prompts."""

    def draw(self, count: int) -> PromptBatch:
        """Return the next prompts of the training order."""


class SupportsWait(Protocol):
    """Rewards that are being computed."""

    def wait(self) -> RewardTable:
        """Return the rewards when they are complete."""


class RewardSource(Protocol):
    """Computes the rewards of rollouts."""

    def start(self, rollout: Rollout, iteration: int) -> SupportsWait:
        """Start computing the rewards of a rollout."""


def groups_with_variance(rewards: RewardTable) -> Tensor:
    """Return [B] True for groups whose rewards differ by more than rounding."""
    return rewards.find_zero_variance() == 0  # also False for groups without a reward


def groups_with_turn_advantages(
    rewards: RewardTable, rollout: Rollout, credit: TurnAdvantages
) -> Tensor:
    """Return [B] True for groups with a non-zero turn-level advantage.

    Episodes of such a group may all have the same total reward. For credit that compares with the
    batch instead of the group, a group counts if its episodes differ in the reward of some turn.

    Args:
        rewards: [B, G] of the episodes.
        rollout: the N episodes.
        credit: computes turn-level advantages.
    """
    turns = Turns.from_rollout(rollout, rewards)
    if not credit.needs_group:
        by_turn = [replace(rewards, total=earned) for earned in turns.rewards.unbind(2)]
        return torch.stack([groups_with_variance(each) for each in [rewards, *by_turn]]).any(0)
    lengths = torch.zeros_like(rewards.total)
    groups = Groups.from_table(rewards, lengths, SingleProcess())
    return credit.per_turn(groups, turns).flatten(1).any(1)


@dataclass
class DynamicSampling:
    """Replaces zero-variance groups, which have no gradient, by groups of other prompts.

    Each attempt samples as many prompts as should suffice at the fraction of informative groups so
    far, at most B. Groups that are still missing after the last attempt stay as they are; they
    count in the denominators of the loss weights.

    Args:
        rollouter: generates.
        scorer: computes rewards.
        max_attempts: limit on attempts per iteration.
        device: where prompts are put.
        comm: collectives of the ranks, which make equally many attempts.
        static_shapes: sample B prompts in each attempt, since XLA compiles each other number.
        prompt_source: yields extra prompts; set by `connect`.
        credit: turn-level advantages, by which groups of equal totals may be informative; None:
            only totals count.

    Source: DAPO, arXiv:2503.14476, section 3.2.
    """

    rollouter: Rollouter
    scorer: RewardSource
    max_attempts: int
    device: torch.device
    comm: Comm = field(default_factory=SingleProcess)
    static_shapes: bool = False
    prompt_source: PromptSource | None = None
    credit: TurnAdvantages | None = None

    def connect(self, loader: Any) -> None:
        """Take extra prompts from the training loader.

        Raises:
            ValueError: the loader cannot yield extra prompts.
        """
        if not isinstance(loader, PromptSource):
            raise ValueError(
                f"dynamic_sampling_attempts is {self.max_attempts}, but the training data cannot "
                "yield extra prompts. Use litgrpo.PromptData, or set dynamic_sampling_attempts to "
                "0."
            )
        self.prompt_source = loader

    def replace_zero_variance_groups(
        self, rollout: Rollout, rewards: RewardTable, iteration: int
    ) -> tuple[Rollout, RewardTable, Stats]:
        """Replace zero-variance groups as far as others are found.

        Args:
            rollout: B groups.
            rewards: [B, G] theirs.
            iteration: number of finished iterations.

        Returns:
            Rollout and rewards of B groups, and metrics: those of the rollout before replacement,
            which are unbiased, and `dynamic/`.
        """
        assert self.prompt_source is not None
        stats = rewards.over_ranks(self.comm.gather).stats() | rollout.stats()
        informative = self._find_informative(rewards, rollout)
        num_prompts = num_sampled = len(informative)
        num_informative = num_informative_at_first = int(informative.sum())
        attempts = 0
        while attempts < self.max_attempts:
            # Every rank makes as many attempts as the one that misses most groups.
            missing = self._max_over_ranks(int((~informative).sum()))
            if not missing:
                break
            attempts += 1
            fraction = max(num_informative / num_sampled, 1 / num_prompts)
            count = num_prompts
            if not self.static_shapes:
                count = min(num_prompts, math.ceil(missing / fraction))
            count = self._max_over_ranks(count)
            prompts = self.prompt_source.draw(count).to(self.device)
            fresh = self.rollouter.generate(prompts, "train", iteration, attempt=attempts)
            with self.rollouter.clock.phase("time/reward_s"):
                fresh_rewards = self.scorer.start(fresh, iteration).wait()
            donors = self._find_informative(fresh_rewards, fresh).nonzero().squeeze(1)
            num_sampled, num_informative = num_sampled + count, num_informative + len(donors)
            replaced = (~informative).nonzero().squeeze(1)[: len(donors)]
            donors = donors[: len(replaced)]
            rollout = with_groups(rollout, replaced, fresh, donors)
            rewards = with_rewards(rewards, replaced, fresh_rewards, donors)
            informative[replaced] = True
        numbers = {
            "dynamic/resamples": attempts,
            "dynamic/prompts_sampled": num_sampled,
            "dynamic/informative_frac": num_informative_at_first / num_prompts,
            "dynamic/filled_frac": int(informative.sum()) / num_prompts,
        }
        stats |= {name: torch.tensor(float(number)) for name, number in numbers.items()}
        return rollout, rewards, stats

    def _find_informative(self, rewards: RewardTable, rollout: Rollout) -> Tensor:
        if self.credit is None or rollout.turns is None:
            return groups_with_variance(rewards)
        return groups_with_turn_advantages(rewards, rollout, self.credit)

    def _max_over_ranks(self, number: int) -> int:
        return int(self.comm.max(torch.tensor(float(number))))


def with_rewards(
    rewards: RewardTable, replaced: Tensor, fresh: RewardTable, donors: Tensor
) -> RewardTable:
    """Replace groups `replaced` [k] of a reward table by groups `donors` [k] of another one."""

    def put(parts: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: put_rows(part, replaced, others[name], donors) for name, part in parts.items()
        }

    tasks = list(rewards.tasks)
    for to, row in zip(replaced.tolist(), donors.tolist(), strict=True) if tasks else ():
        tasks[to] = fresh.tasks[row]
    return replace(
        rewards,
        components=put(rewards.components, fresh.components),
        processed=put(rewards.processed, fresh.processed),
        total=put_rows(rewards.total, replaced, fresh.total, donors),
        valid=put_rows(rewards.valid, replaced, fresh.valid, donors),
        precision=max(rewards.precision, fresh.precision),
        tasks=tasks,
    )
