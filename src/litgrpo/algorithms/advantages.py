"""Advantages: how much better a completion is than what could be expected of its prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from litgrpo.algorithms.turns import Turns
from litgrpo.distributed.collectives import Comm
from litgrpo.types import RewardTable

LARGEST_REWARD = 1e20  # beyond it float32 could not hold the loss; counts as infinite


@dataclass(frozen=True)
class Groups:
    """The rewards of a batch by prompt, with the statistics that advantages are made of.

    Args:
        table: rewards of B * G completions.
        lengths: [B, G] tokens of the policy in each completion.
        comm: of the processes that share the batch.
        values: [B, G] float64 rewards in use; NaN where a row teaches nothing.
    """

    table: RewardTable
    lengths: Tensor
    comm: Comm
    values: Tensor

    def use(self, rewards: Tensor, valid: Tensor) -> Groups:
        """The same groups with other rewards [B, G]: those that are valid and not infinite."""
        usable = valid & (rewards.abs() < LARGEST_REWARD)
        return replace(self, values=rewards.double().where(usable, torch.nan))

    def spread(self) -> tuple[Tensor, Tensor, Tensor]:
        """[B, G] distance from the group's mean, [B, 1] its standard deviation, [B, 1] n - 1.

        The distance is exactly 0 where the rewards of a group differ by rounding only.
        """
        values, missing = self.values, self.values.isnan()
        largest = values.nan_to_num(0.0).abs().amax(1, keepdim=True)
        high = values.masked_fill(missing, -torch.inf).amax(1, keepdim=True)
        low = values.masked_fill(missing, torch.inf).amin(1, keepdim=True)
        equal = high - low <= 4 * self.table.precision * largest
        distance = torch.where(equal & ~missing, 0.0, values - values.nanmean(1, keepdim=True))
        others = ((~missing).sum(1, keepdim=True) - 1).clamp(min=1)
        return distance, (distance.square().nansum(1, keepdim=True) / others).sqrt(), others

    def batch(self) -> tuple[Tensor, Tensor]:
        """[B, G] distance from the mean of all processes' rewards, [] their standard deviation."""
        count = self.comm.sum((~self.values.isnan()).sum().double())
        mean = self.comm.sum(self.values.nansum()) / count.clamp(min=1)
        squares = self.comm.sum((self.values - mean).square().nansum())
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        differ = std > 4 * self.table.precision * mean.abs()
        return torch.where(differ, self.values - mean, 0.0), std


class Advantages(ABC):
    """How much better a completion is than expected."""

    @property
    def compares(self) -> bool:
        """Whether a prompt needs two completions at least."""
        return True

    def __call__(self, table: RewardTable, lengths: Tensor, comm: Comm) -> Tensor:
        """[B, G] float64 advantages, 0 for rows that teach nothing; arguments as in `Groups`."""
        groups = Groups(table, lengths, comm, table.total).use(table.total, table.valid)
        return torch.where(groups.values.isnan(), 0.0, self.estimate(groups)).nan_to_num(0.0)

    def of_tokens(self, table: RewardTable, lengths: Tensor, comm: Comm, turns: Turns) -> Tensor:
        """[N, C] float64 advantages of the tokens of episodes; here the same in all turns."""
        whole = self(table, lengths, comm)[..., None]
        return turns.per_token(whole.expand(turns.exist.shape))

    @abstractmethod
    def estimate(self, groups: Groups) -> Tensor:
        """[B, G] advantages; NaN counts as 0."""


@dataclass(frozen=True)
class Normalized(Advantages):
    """Distance from a baseline in units of a scale: (r - baseline) / scale.

    GRPO: group, group (arXiv:2402.03300). Dr. GRPO: group, none (arXiv:2503.20783). RLOO: others,
    none (arXiv:2402.14740). REINFORCE: none | batch, none. REINFORCE++: batch, batch (2501.03262).

    Args:
        baseline: mean of the `group`, of the `others` in it, of the `batch`, or `none`.
        scale: standard deviation (n - 1) of the `group` or `batch`, its |`mean`|, or `none`.
        eps: added to a standard deviation; the least |mean|.
    """

    baseline: Literal["group", "others", "batch", "none"] = "group"
    scale: Literal["group", "batch", "mean", "none"] = "group"
    eps: float = 1e-4

    @property
    def compares(self) -> bool:
        """Only a baseline of the prompt's own group needs companions."""
        return self.baseline in ("group", "others")

    def estimate(self, groups: Groups) -> Tensor:
        """[B, G] (r - baseline) / scale."""
        from_group, std, others = groups.spread()
        over_batch = "batch" in (self.baseline, self.scale)
        from_batch, batch_std = groups.batch() if over_batch else (from_group, std)
        distance = {
            "group": from_group,
            # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
            "others": from_group * (others + 1) / others,
            "batch": from_batch,
            "none": groups.values,
        }
        scale = {
            "group": std + self.eps,
            "batch": batch_std + self.eps,
            "mean": groups.values.nanmean(1, keepdim=True).abs().clamp(min=self.eps),
            "none": torch.ones_like(std),
        }
        return distance[self.baseline] / scale[self.scale]
