"""Published advantages beside the normalized reward, which is in `advantages`."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from litgrpo.algorithms.advantages import Advantages, Groups, Normalized


@dataclass(frozen=True)
class DecoupledNormalized(Advantages):
    """GDPO: every reward function normalized in its group, weighted, summed, scaled by the batch.

    So none is drowned by another one with a larger spread. Source: arXiv:2601.05242.

    Args:
        eps: added to each standard deviation.
    """

    eps: float = 1e-4

    def estimate(self, groups: Groups) -> Tensor:
        """[B, G] weighted sums of normalized rewards over their standard deviation in the batch."""
        table, total = groups.table, torch.zeros_like(groups.values)
        for name, part in table.counted.items():
            distance, std, _ = groups.use(part, table.valid).spread()
            total = total + table.weights[name] * (distance / (std + self.eps)).nan_to_num(0.0)
        # Every part sums to 0 in each group, so the mean over the batch is 0 already.
        return total / (groups.use(total, ~groups.values.isnan()).batch()[1] + self.eps)


@dataclass(frozen=True)
class TopShare(Advantages):
    """GFPO: only the best share of each group, and what ties with it, keeps its advantage.

    Source: arXiv:2508.09726, which ranks by `shortest` or `reward_per_token`, with `among_kept`.

    Args:
        share: share of the group that keeps its advantage.
        by: what is best: highest `reward`, `shortest` completion, or highest `reward_per_token`.
        among_kept: compute the advantages among the kept completions, not in the whole group.
        of: the advantages to filter.
    """

    share: float = 0.5
    by: Literal["reward", "shortest", "reward_per_token"] = "reward"
    among_kept: bool = False
    of: Advantages = field(default_factory=Normalized)

    def __post_init__(self) -> None:
        """Check the share."""
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; it must be above 0 and at most 1")

    def estimate(self, groups: Groups) -> Tensor:
        """[B, G] advantages of `of`; 0 for the completions that are filtered out."""
        rewards, lengths = groups.values, groups.lengths.clamp(min=1)
        scores = {"reward": rewards, "shortest": -lengths, "reward_per_token": rewards / lengths}
        score = scores[self.by].double().masked_fill(rewards.isnan(), -torch.inf)
        kept = score >= score.topk(max(1, round(self.share * score.shape[1]))).values[:, -1:]
        groups = groups.use(rewards, kept) if self.among_kept else groups
        return self.of.estimate(groups).masked_fill(~kept, 0.0)
