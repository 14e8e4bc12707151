"""Averages over micro-batches, optimizer steps and processes."""

from __future__ import annotations

import torch
from torch import Tensor

from litgrpo.parallel.comm import Comm
from litgrpo.types import Experience, RewardTable, Stats, StepReport


class Totals:
    """Sums and counts that micro-batches contribute to; their quotients are exact averages."""

    def __init__(self) -> None:
        self.sums: Stats = {}

    def add(self, stats: Stats) -> None:
        """Count {name: [2] sum and count}."""
        for name, sum_and_count in stats.items():
            self.sums[name] = self.sums.get(name, 0.0) + sum_and_count.detach().double()

    def add_value(self, name: str, value: Tensor) -> None:
        """Count one number."""
        self.add({name: torch.stack([value.detach(), torch.ones_like(value)])})

    def add_steps(self, reports: list[StepReport]) -> None:
        """Count what optimizer steps report; the learning rate of skipped ones, too."""
        for report in reports:
            self.add(report.sums)
            self.add_value("optim/lr", torch.tensor(report.lr))

    def averages(self, comm: Comm, device: torch.device) -> Stats:
        """{name: []} averages over everything that all processes counted, by one collective.

        Args:
            comm: of the processes; all of them count the same names.
            device: where the numbers are put together.
        """
        table = torch.stack([pair.to(device) for pair in self.sums.values()])
        sums, counts = comm.sum(table).unbind(-1)
        means = sums / counts.clamp(min=1)
        return dict(zip(self.sums, means.float(), strict=True))


# Names that end so are extremes, over processes too; everything else is averaged.
SMALLEST, LARGEST = ("_min", "/min"), ("_max", "/max")
# Shares of which an iteration's optimizer steps have extremes, too.
CLIPPED = {"policy/clip_low_frac", "policy/clip_high_frac"}


def averages(seen: Stats, reports: list[StepReport], comm: Comm, device: torch.device) -> Stats:
    """Averages and extremes over processes and optimizer steps of one iteration, to log.

    Args:
        seen: {name: [] number, or [2] sum and count} of this process; all report the same names.
        reports: of its optimizer steps.
        comm: of the processes.
        device: where the numbers are put together.
    """
    totals = Totals()
    extremes = _extremes(seen, reports, device)
    for name, value in seen.items():
        if value.dim():
            totals.add({name: value})
        elif not name.endswith(SMALLEST + LARGEST):
            totals.add_value(name, value)
    totals.add_steps(reports)
    averaged = totals.averages(comm, device)
    known = comm.max(torch.stack(list(extremes.values()))) if extremes else torch.zeros(0)
    for name, value in zip(extremes, known, strict=True):
        signed = -value if name.endswith(SMALLEST) else value
        averaged[name] = signed.nan_to_num(0.0, posinf=0.0, neginf=0.0)
    return averaged


def _extremes(seen: Stats, reports: list[StepReport], device: torch.device) -> Stats:
    """{name: [] largest so far, smallest ones negated}, so that one maximum serves both."""
    found = {
        name: [-value if name.endswith(SMALLEST) else value]
        for name, value in seen.items()
        if name.endswith(SMALLEST + LARGEST) and not value.dim()
    }
    for report in reports:
        for name in CLIPPED & report.sums.keys():
            total, count = report.sums[name].unbind()
            share = total / count.clamp(min=1)
            found.setdefault(f"{name}_min", []).append(-share)
            found.setdefault(f"{name}_max", []).append(share)
    # float64: Totals counts in it, too.
    on_device = {n: [v.to(device, torch.float64) for v in values] for n, values in found.items()}
    return {name: torch.stack(values).max().float() for name, values in on_device.items()}


def of_completions(advantages: Tensor) -> Tensor:
    """[N] the advantage of each completion from those of its tokens [N, C].

    Without a discount all tokens of the policy have the same; others have 0.
    """
    return advantages.gather(1, advantages.abs().argmax(1, keepdim=True)).squeeze(1)


def advantages_of(experience: Experience, rewards: RewardTable) -> Tensor:
    """[B, G] the advantage of each completion, on the host."""
    return of_completions(experience.advantages).view_as(rewards.total).cpu()


def advantage_stats(experience: Experience) -> Stats:
    """Mean and spread of the advantages of completions."""
    advantages = of_completions(experience.advantages)
    return {
        "policy/advantage_mean": advantages.mean(),
        "policy/advantage_std": advantages.std(correction=0),
    }
