"""Dynamic sampling: groups whose rewards are all equal make room for those of other prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from litgrpo.algorithms.advantages import Groups
from litgrpo.algorithms.turn_credit import TurnAdvantages
from litgrpo.algorithms.turns import Turns
from litgrpo.arguments import require
from litgrpo.distributed.comm import Comm, SingleProcess
from litgrpo.rollout.rollouter import AllGroups, PendingTable, Rollouter
from litgrpo.types import PromptBatch, RewardTable, Rollout, Stats


@runtime_checkable
class PromptSource(Protocol):
    """Training data that can give prompts out of turn."""

    def more(self, count: int) -> PromptBatch:
        """The next prompts of the training order."""


class RewardSource(Protocol):
    """Scores rollouts."""

    def start(self, rollout: Rollout, iteration: int) -> PendingTable:
        """Start scoring a rollout."""


@dataclass(frozen=True)
class FinishedTable:
    """Rewards that are known already.

    Args:
        table: the rewards.
    """

    table: RewardTable

    def wait(self) -> RewardTable:
        """Return the rewards."""
        return self.table


def informative(rewards: RewardTable) -> Tensor:
    """[B] True where the rewards of a group differ by more than rounding."""
    lengths = torch.zeros_like(rewards.total)
    groups = Groups(rewards, lengths, SingleProcess(), rewards.total)
    distance = groups.use(rewards.total, rewards.valid).spread()[0]
    return (distance.nan_to_num(0.0) != 0).any(1)


def informative_turns(rewards: RewardTable, rollout: Rollout, credit: TurnAdvantages) -> Tensor:
    """[B] True where a turn of a group has an advantage, also where episodes earned the same.

    Credit that compares with the batch, not the group, is asked whether episodes of the group
    differ in what a turn of theirs earned.

    Args:
        rewards: [B, G] of the episodes.
        rollout: the N episodes.
        credit: gives the advantages.
    """
    turns = Turns.of(rollout, rewards)
    if not credit.compares:
        by_turn = [replace(rewards, total=earned) for earned in turns.rewards.unbind(2)]
        return torch.stack([informative(rewards), *map(informative, by_turn)]).any(0)
    lengths = torch.zeros_like(rewards.total)
    groups = Groups(rewards, lengths, SingleProcess(), rewards.total)
    return credit.known(groups.use(rewards.total, rewards.valid), turns).flatten(1).any(1)


@dataclass
class DynamicSampling(AllGroups):
    """Samples other prompts in place of those whose completions were all equally good.

    Each resampling takes as many prompts as will do at the share that was informative so far, at
    most B. After the last one the groups that are still missing stay as they are; they count in
    the denominators of the token weights.

    Args:
        rollouter: samples.
        scorer: judges.
        dynamic_sampling_attempts: resamplings of an iteration at most.
        device: where prompts are put.
        comm: of the processes, which resample together.
        static_shapes: take B prompts each time, where another number would have to be compiled.
        prompt_source: gives further prompts.
        credit: per turn, so that groups of equal totals may teach; None: of whole completions.

    Source: DAPO, arXiv:2503.14476, section 3.2.
    """

    rollouter: Rollouter
    scorer: RewardSource
    dynamic_sampling_attempts: int
    device: torch.device
    comm: Comm = field(default_factory=SingleProcess)
    static_shapes: bool = False
    prompt_source: PromptSource | None = None
    credit: TurnAdvantages | None = None

    def connect(self, loader: Any) -> None:
        """Take further prompts from the training data.

        Raises:
            ValueError: it cannot give prompts out of turn.
        """
        require(
            isinstance(loader, PromptSource),
            f"dynamic_sampling_attempts is {self.dynamic_sampling_attempts}, but the training "
            f"data cannot give prompts "
            "out of turn. Use litgrpo.PromptData, or set dynamic_sampling_attempts to 0.",
        )
        self.prompt_source = loader

    def replace_uninformative(
        self, rollout: Rollout, pending: PendingTable, iteration: int
    ) -> tuple[Rollout, PendingTable, Stats]:
        """The same number of groups, uninformative ones replaced as far as others are found.

        Args:
            rollout: B groups.
            pending: their rewards.
            iteration: number of finished iterations.

        Returns:
            Rollout and rewards of B groups, and what to log instead of their own statistics: those
            of the prompts that came first, and how it went.
        """
        with self.rollouter.clock.phase("time/reward_s"):
            rewards = pending.wait()
        first = rewards.stats() | rollout.stats()
        rollout, rewards, stats = self.resampled(rollout, rewards, iteration)
        return rollout, FinishedTable(rewards), first | stats

    def resampled(
        self, rollout: Rollout, rewards: RewardTable, iteration: int
    ) -> tuple[Rollout, RewardTable, Stats]:
        """Rollout and rewards with uninformative groups replaced, and how it went."""
        assert self.prompt_source is not None
        useful = self._informative(rewards, rollout)
        num_prompts = asked = len(useful)
        found = first = int(useful.sum())
        resamples = 0
        while resamples < self.dynamic_sampling_attempts and (
            missing := self._most(int((~useful).sum()))
        ):
            resamples += 1
            share = max(found / asked, 1 / num_prompts)
            needed = num_prompts if self.static_shapes else math.ceil(missing / share)
            count = self._most(min(num_prompts, needed))
            prompts = self.prompt_source.more(count).to(self.device)
            fresh, fresh_rewards = self._sample(prompts, iteration, resamples)
            donors = self._informative(fresh_rewards, fresh).nonzero().squeeze(1)
            asked, found = asked + count, found + len(donors)
            slots = (~useful).nonzero().squeeze(1)[: len(donors)]
            donors = donors[: len(slots)]
            rollout = with_groups(rollout, slots, fresh, donors)
            rewards = with_rewards(rewards, slots, fresh_rewards, donors)
            useful[slots] = True
        numbers = {
            "dynamic/resamples": resamples,
            "dynamic/prompts_sampled": asked,
            "dynamic/informative_frac": first / num_prompts,
            "dynamic/filled_frac": int(useful.sum()) / num_prompts,
        }
        stats = {name: torch.tensor(float(number)) for name, number in numbers.items()}
        return rollout, rewards, stats

    def _informative(self, rewards: RewardTable, rollout: Rollout) -> Tensor:
        """[B] True for groups that teach something."""
        if self.credit is None or rollout.turns is None:
            return informative(rewards)
        return informative_turns(rewards, rollout, self.credit)

    def _sample(
        self, prompts: PromptBatch, iteration: int, attempt: int
    ) -> tuple[Rollout, RewardTable]:
        rollout = self.rollouter.generate(prompts, "train", iteration, attempt=attempt)
        with self.rollouter.clock.phase("time/reward_s"):
            rewards = self.scorer.start(rollout, iteration).wait()
        return rollout, rewards

    def _most(self, number: int) -> int:
        """The largest of a number over all processes, so that all resample as often."""
        return int(self.comm.max(torch.tensor(float(number))))


# Fields of a rollout with one entry per row, and what fills up columns that a row does not have.
FILLING = {
    "completion_ids": 0,
    "completion_mask": 0,
    "sampler_logprobs": 0,
    "loss_mask": 0,
    "truncated": 0,
    "candidate_ids": -1,
    "turns": -1,
    "turn_rewards": math.nan,
}
LISTS = ("completions", "turn_states", "episodes")  # of N entries, or none


def with_groups(rollout: Rollout, slots: Tensor, fresh: Rollout, donors: Tensor) -> Rollout:
    """A rollout whose groups `slots` [k] are the groups `donors` [k] of another one."""
    group, places = rollout.group_size, torch.arange(rollout.group_size)
    into = (slots[:, None] * group + places).flatten()
    rows = (donors[:, None] * group + places).flatten()
    lists: dict[str, Any] = {name: list(getattr(rollout, name)) for name in LISTS}
    for name in (name for name in LISTS if lists[name]):
        for to, row in zip(into.tolist(), rows.tolist(), strict=True):
            lists[name][to] = getattr(fresh, name)[row]
    pairs = {name: (getattr(rollout, name), getattr(fresh, name)) for name in FILLING}
    tensors: dict[str, Any] = {
        name: _put(values, into, others, rows, FILLING[name])
        for name, (values, others) in pairs.items()
        if values is not None
    }
    prompts = with_prompts(rollout.prompts, slots, fresh.prompts, donors)
    return replace(rollout, prompts=prompts, **lists, **tensors)


def with_prompts(
    prompts: PromptBatch, slots: Tensor, fresh: PromptBatch, donors: Tensor
) -> PromptBatch:
    """Prompts of which `slots` [k] are `donors` [k] of another batch, padded to the longer one."""
    pairs = list(zip(slots.tolist(), donors.tolist(), strict=True))

    def swapped(values: list, others: list) -> list:
        values = list(values)
        for to, row in pairs:
            values[to] = others[row]
        return values

    def put_flipped(values: Tensor, others: Tensor) -> Tensor:
        """The padding is on the left, so turn it to the right and back."""
        return _put(values.flip(1), slots, others.flip(1), donors).flip(1)

    return PromptBatch(
        prompt_ids=put_flipped(prompts.prompt_ids, fresh.prompt_ids),
        prompt_mask=put_flipped(prompts.prompt_mask, fresh.prompt_mask),
        prompts=swapped(prompts.prompts, fresh.prompts),
        columns={
            name: swapped(values, fresh.columns[name]) for name, values in prompts.columns.items()
        },
        index=_put(prompts.index, slots, fresh.index, donors),
    )


def with_rewards(
    rewards: RewardTable, slots: Tensor, fresh: RewardTable, donors: Tensor
) -> RewardTable:
    """Rewards of which the groups `slots` [k] are the groups `donors` [k] of another table."""

    def put(parts: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: _put(part, slots, others[name], donors) for name, part in parts.items()}

    return replace(
        rewards,
        parts=put(rewards.parts, fresh.parts),
        counted=put(rewards.counted, fresh.counted),
        total=_put(rewards.total, slots, fresh.total, donors),
        valid=_put(rewards.valid, slots, fresh.valid, donors),
        precision=max(rewards.precision, fresh.precision),
    )


def _put(values: Tensor, into: Tensor, fresh: Tensor, rows: Tensor, fill: float = 0) -> Tensor:
    """A copy with rows of `fresh` in the rows `into`, both filled up to the larger sizes."""
    sizes = [max(a, b) for a, b in zip(values.shape[1:], fresh.shape[1:], strict=True)]

    def widened(tensor: Tensor) -> Tensor:
        ends = [end for a, b in zip(tensor.shape[1:], sizes, strict=True) for end in (b - a, 0)]
        return pad(tensor, ends[::-1], value=fill)

    values = widened(values).clone()
    values[into.to(values.device)] = widened(fresh)[rows.to(values.device)]
    return values
