"""Averages over micro-batches, optimizer steps and ranks, for logging."""

from __future__ import annotations

import torch
from torch import Tensor

from litgrpo.algorithms.objective import RATIO_MAX
from litgrpo.distributed.collectives import Comm
from litgrpo.types import LossOutput, RewardTable, Stats, StepReport, TrainingBatch

# Metrics with these endings are extremes, also over ranks; all others are averages.
SMALLEST, LARGEST = ("_min", "/min"), ("_max", "/max")
# Metrics of which the extremes over the optimizer steps of an iteration are logged, too.
WITH_EXTREMES = {"policy/clip_low_frac", "policy/clip_high_frac"}


class SumsAndCounts:
    """Sums and counts from micro-batches; sum / count is the exact average over all of them.

    Example:
        >>> totals = SumsAndCounts()
        >>> totals.add({"policy/kl": torch.tensor([2.0, 1.0])})  # sum 2 over one token
        >>> totals.add({"policy/kl": torch.tensor([10.0, 3.0])})
        >>> totals.sums["policy/kl"].tolist()  # average 12 / 4, not the mean of 2 and 10 / 3
        [12.0, 4.0]
    """

    def __init__(self) -> None:
        self.sums: Stats = {}

    def add(self, stats: Stats) -> None:
        """Add {name: [2] sum and count}; of the largest ratio keep the maximum."""
        for name, value in stats.items():
            pair = value.detach().double()
            if name not in self.sums:
                self.sums[name] = pair
            elif name == RATIO_MAX:
                self.sums[name] = torch.maximum(self.sums[name], pair)
            else:
                self.sums[name] = self.sums[name] + pair

    def add_value(self, name: str, value: Tensor) -> None:
        """Add one number."""
        self.add({name: torch.stack([value.detach(), torch.ones_like(value)])})

    def averages(self, comm: Comm, device: torch.device) -> Stats:
        """Return {name: [] average over all ranks}, by one collective; without those of nothing.

        Args:
            comm: collectives of the ranks, which all add the same names.
            device: where the numbers are stacked.
        """
        table = torch.stack([pair.to(device) for pair in self.sums.values()])
        sums, counts = comm.sum(table).unbind(-1)
        means = dict(zip(self.sums, (sums / counts).float(), strict=True))
        has_values = zip(means, (counts != 0).tolist(), strict=True)
        return {name: means[name] for name, is_measured in has_values if is_measured}


class StepSums:
    """Loss and statistics of one optimizer step, summed over its micro-batches."""

    def __init__(self) -> None:
        self.totals = SumsAndCounts()
        self.losses: list[Tensor] = []

    def add(self, output: LossOutput) -> None:
        """Add a micro-batch whose gradient has been computed."""
        self.totals.add(output.stats)
        self.losses.append(output.loss.detach())

    def read(self, grad_norm: Tensor) -> tuple[Stats, Tensor, Tensor]:
        """Return the sums of the step; static-shape devices copy all of them to the host here.

        Args:
            grad_norm: [] norm of the gradient.

        Returns:
            {name: [2] sum and count}, the [] loss of the step, and the norm.
        """
        loss = torch.zeros((), device=grad_norm.device)
        for part in self.losses:
            loss += part
        return self.totals.sums, loss, grad_norm


def average_over_ranks(
    seen: Stats, reports: list[StepReport], comm: Comm, device: torch.device
) -> Stats:
    """Average the metrics of one iteration over ranks and optimizer steps; extremes stay extremes.

    A mean or an extreme of nothing, such as the length of correct completions if there are none, is
    left out.

    Args:
        seen: {name: [] number, or [2] sum and count} of this rank; all ranks have the same names.
        reports: of its optimizer steps.
        comm: collectives of the ranks.
        device: where the numbers are stacked.
    """
    totals = SumsAndCounts()
    for name, value in seen.items():
        if value.dim():
            totals.add({name: value})
        elif not name.endswith(SMALLEST + LARGEST):
            totals.add_value(name, value)
    for report in reports:
        totals.add(report.sums)
        totals.add_value("optim/lr", torch.tensor(report.lr))
    averaged = totals.averages(comm, device)
    extremes = _collect_extremes(seen, reports, device)
    if extremes:
        largest = comm.max(torch.stack(list(extremes.values())))
        is_measured = (largest != -torch.inf).tolist()
        for name, value, known in zip(extremes, largest, is_measured, strict=True):
            if known:
                averaged[name] = -value if name.endswith(SMALLEST) else value
    return averaged


def _collect_extremes(seen: Stats, reports: list[StepReport], device: torch.device) -> Stats:
    """Return {name: [] maximum, or negated minimum}, so that one maximum over ranks serves both.

    It is minus infinity if there is nothing.
    """
    found = {
        name: [-value if name.endswith(SMALLEST) else value]
        for name, value in seen.items()
        if name.endswith(SMALLEST + LARGEST) and not value.dim()
    }
    for report in reports:
        for name in WITH_EXTREMES & report.sums.keys():
            total, count = report.sums[name].unbind()
            for end, fraction in (("_min", -total / count), ("_max", total / count)):
                found.setdefault(name + end, []).append(fraction.where(count > 0, -torch.inf))
    # float64, as in SumsAndCounts.
    on_device = {n: [v.to(device, torch.float64) for v in values] for n, values in found.items()}
    return {name: torch.stack(values).max().float() for name, values in on_device.items()}


def completion_advantages(token_advantages: Tensor) -> Tensor:
    """Return [N] the advantage of each completion from those of its tokens [N, C].

    Without a discount all generated tokens of a completion have the same one; all others have 0.
    """
    largest = token_advantages.abs().argmax(1, keepdim=True)
    return token_advantages.gather(1, largest).squeeze(1)


def group_advantages(batch: TrainingBatch, rewards: RewardTable) -> Tensor:
    """Return [B, G] the advantage of each completion, on the host."""
    return completion_advantages(batch.advantages).view_as(rewards.total).cpu()


def advantage_stats(advantages: Tensor, rewards: RewardTable, comm: Comm) -> Stats:
    """Return mean and standard deviation of the advantages of all ranks' scored completions.

    {} if none has a reward.

    Args:
        advantages: [B, G] of this rank's completions, on the host.
        rewards: [B, G] theirs.
        comm: collectives of the ranks.
    """
    advantages = comm.gather(advantages.where(rewards.valid.cpu(), torch.nan).flatten())
    mean = advantages.nanmean()  # NaN also pads a rank with fewer rows
    if mean.isnan():
        return {}
    variance = (advantages - mean).square().nanmean()
    return {"policy/advantage_mean": mean, "policy/advantage_std": variance.sqrt()}
