"""Dynamic sampling (DAPO): replace zero-variance groups by groups of other prompts.

A group is informative if it has a gradient: the rewards of its completions differ, or its turns
have advantages. All others are zero-variance groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from litgrpo.algorithms.advantages import Groups
from litgrpo.algorithms.turns import TurnAdvantages, Turns
from litgrpo.arguments import require
from litgrpo.data.loader import BatchLoader
from litgrpo.distributed.collectives import SingleProcess
from litgrpo.distributed.device import Backend
from litgrpo.learning.learner import Learner
from litgrpo.learning.stages import Stage
from litgrpo.rewards.scorer import Scorer
from litgrpo.rollout.groups import put_rows, rows_of_groups, select_groups, with_groups
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.types import Experience, PromptBatch, RewardTable, Rollout, RolloutLogprobs


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
        return torch.stack([groups_with_variance(table) for table in [rewards, *by_turn]]).any(0)
    lengths = torch.zeros_like(rewards.total)
    groups = Groups.from_table(rewards, lengths, SingleProcess())
    return credit.per_turn(groups, turns).flatten(1).any(1)


@dataclass
class DynamicSampling(Stage):
    """Replaces zero-variance groups, which have no gradient, by groups of other prompts.

    Each attempt samples as many prompts as should suffice at the fraction of informative groups so
    far, at most B. Groups that are still missing after the last attempt stay as they are; they
    count in the denominators of the loss weights.

    Args:
        rollouter: generates.
        scorer: computes rewards.
        learner: computes the log-probabilities of the new groups.
        max_attempts: limit on attempts per iteration.
        device: where prompts are put. If its shapes are static, each attempt samples B prompts and
            computes the log-probabilities of all of them.

    Source: DAPO, arXiv:2503.14476, section 3.2.
    """

    rollouter: Rollouter
    scorer: Scorer
    learner: Learner
    max_attempts: int
    device: Backend
    draw_prompts: Callable[[int], PromptBatch] = field(init=False)  # set by `connect`

    def connect(self, loader: Any) -> None:
        """Take extra prompts from the training loader.

        Raises:
            ValueError: the loader cannot yield extra prompts.
        """
        require(
            isinstance(loader, BatchLoader),
            f"dynamic_sampling_attempts is {self.max_attempts}, but the training data cannot yield "
            "extra prompts. Use litgrpo.PromptData, or set dynamic_sampling_attempts to 0.",
        )
        self.draw_prompts = loader.draw

    def __call__(self, experience: Experience, iteration: int) -> Experience:
        """Replace zero-variance groups as far as others are found; log `dynamic/`."""
        informative = self._find_informative(experience.rewards, experience.rollout)
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
            if not self.device.static_shapes:
                count = min(num_prompts, math.ceil(missing / fraction))
            count = self._max_over_ranks(count)
            prompts = self.draw_prompts(count).to(self.device.data_device)
            new_rollout = self.rollouter.generate(prompts, "train", iteration, attempt=attempts)
            with self.rollouter.clock.phase("time/reward_s"):
                new_rewards = self.scorer.start(new_rollout, iteration).wait()
            donors = self._find_informative(new_rewards, new_rollout).nonzero().squeeze(1)
            num_sampled, num_informative = num_sampled + count, num_informative + len(donors)
            replaced = (~informative).nonzero().squeeze(1)[: len(donors)]
            experience = self._replace_groups(
                experience, replaced, new_rollout, new_rewards, donors[: len(replaced)]
            )
            informative[replaced] = True
        numbers = {
            "dynamic/resamples": attempts,
            "dynamic/prompts_sampled": num_sampled,
            "dynamic/informative_frac": num_informative_at_first / num_prompts,
            "dynamic/filled_frac": int(informative.sum()) / num_prompts,
        }
        stats = {name: torch.tensor(float(number)) for name, number in numbers.items()}
        return replace(experience, stats=experience.stats | stats)

    def _replace_groups(
        self,
        experience: Experience,
        replaced: Tensor,
        new_rollout: Rollout,
        new_rewards: RewardTable,
        donors: Tensor,
    ) -> Experience:
        """Replace groups `replaced` [k] by groups `donors` [k] of a new rollout."""
        sampled = (*experience.sampled, (new_rollout, new_rewards))
        if not len(donors) and self.learner.comm.world_size == 1:
            return replace(experience, sampled=sampled)
        source, groups = new_rollout, donors
        if not self.device.static_shapes:
            # Sharded weights need every rank in each pass, also one without a donor.
            source = select_groups(new_rollout, donors.tolist() or [0])
            groups = torch.arange(len(donors))
        logprobs = self.learner.old_and_reference_logprobs(source)
        into, rows = (rows_of_groups(x, new_rollout.group_size) for x in (replaced, groups))
        return replace(
            experience,
            rollout=with_groups(experience.rollout, replaced, source, groups),
            rewards=with_rewards(experience.rewards, replaced, new_rewards, donors),
            logprobs=with_logprobs(experience.logprobs, into, logprobs, rows),
            sampled=sampled,
        )

    def _find_informative(self, rewards: RewardTable, rollout: Rollout) -> Tensor:
        credit = self.learner.objective.advantages
        if isinstance(credit, TurnAdvantages) and rollout.turns is not None:
            return groups_with_turn_advantages(rewards, rollout, credit)
        return groups_with_variance(rewards)

    def _max_over_ranks(self, number: int) -> int:
        return int(self.learner.comm.max(torch.tensor(float(number))))


def with_logprobs(
    logprobs: RolloutLogprobs, into: Tensor, new_logprobs: RolloutLogprobs, rows: Tensor
) -> RolloutLogprobs:
    """Replace rows `into` [n] of log-probabilities by rows `rows` [n] of others."""
    replaced = {
        name: put_rows(values, into, getattr(new_logprobs, name), rows)
        for name, values in vars(logprobs).items()
        if values is not None
    }
    return RolloutLogprobs(**replaced)


def with_rewards(
    rewards: RewardTable, replaced: Tensor, new_rewards: RewardTable, donors: Tensor
) -> RewardTable:
    """Replace groups `replaced` [k] of a reward table by groups `donors` [k] of another one."""

    def put(columns: dict[str, Tensor], new_columns: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: put_rows(column, replaced, new_columns[name], donors)
            for name, column in columns.items()
        }

    tasks = list(rewards.tasks)
    for to, row in zip(replaced.tolist(), donors.tolist(), strict=True) if tasks else ():
        tasks[to] = new_rewards.tasks[row]
    into, rows = (rows_of_groups(x, rewards.total.shape[1]).tolist() for x in (replaced, donors))
    extras = {
        column: {row: value for row, value in values.items() if row not in into}
        for column, values in rewards.extras.items()
    }
    for column, values in new_rewards.extras.items():
        moved = {to: values[row] for to, row in zip(into, rows, strict=True) if row in values}
        extras[column] = extras.get(column, {}) | moved
    return replace(
        rewards,
        components=put(rewards.components, new_rewards.components),
        processed=put(rewards.processed, new_rewards.processed),
        total=put_rows(rewards.total, replaced, new_rewards.total, donors),
        valid=put_rows(rewards.valid, replaced, new_rewards.valid, donors),
        tasks=tasks,
        extras=extras,
    )
