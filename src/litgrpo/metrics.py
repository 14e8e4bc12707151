"""Metrics of rollouts and rewards, and averages over micro-batches, optimizer steps and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from litgrpo.algorithms.objective import RATIO_MAX
from litgrpo.distributed.collectives import Comm
from litgrpo.types import (
    LossOutput,
    RewardTable,
    Rollout,
    Stats,
    StepReport,
    compare_within_groups,
)

# Metrics with these endings are extremes, also over ranks; all others are averages.
SMALLEST, LARGEST = ("_min", "/min"), ("_max", "/max")
# Metrics of which the extremes over the optimizer steps of an iteration are logged, too.
WITH_EXTREMES = {"policy/clip_low_frac", "policy/clip_high_frac"}


# --- sums over micro-batches, steps and ranks ---


class SumsAndCounts:
    """Sums and counts from micro-batches; sum / count is the exact average over all of them."""

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
        """Return {name: [] average over all ranks}, by one collective; without those of nothing."""
        # All ranks add the same names.
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
        """Return {name: [2] sum and count}, the [] loss of the step, and the norm."""
        # The norm, too: devices with static shapes copy all of them to the host together.
        loss = torch.zeros((), device=grad_norm.device)
        for part in self.losses:
            loss += part
        return self.totals.sums, loss, grad_norm


def average_over_ranks(
    seen: Stats, reports: list[StepReport], comm: Comm, device: torch.device
) -> Stats:
    """Average the metrics of one iteration over ranks and optimizer steps; extremes stay extremes.

    A mean or an extreme of nothing, such as the length of correct completions if there are none, is
    left out. `seen` is {name: [] number, or [2] sum and count}, of the same names on all ranks.
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
        for name, value, has_value in zip(extremes, largest, is_measured, strict=True):
            if has_value:
                averaged[name] = -value if name.endswith(SMALLEST) else value
    return averaged


def _collect_extremes(seen: Stats, reports: list[StepReport], device: torch.device) -> Stats:
    """Return {name: [] maximum, or negated minimum}, so that one maximum over ranks serves both.

    It is minus infinity if there is nothing.
    """
    extremes = {
        name: [-value if name.endswith(SMALLEST) else value]
        for name, value in seen.items()
        if name.endswith(SMALLEST + LARGEST) and not value.dim()
    }
    for report in reports:
        for name in WITH_EXTREMES & report.sums.keys():
            total, count = report.sums[name].unbind()
            for end, fraction in (("_min", -total / count), ("_max", total / count)):
                extremes.setdefault(name + end, []).append(fraction.where(count > 0, -torch.inf))
    # float64, as in SumsAndCounts.
    on_device = {n: [v.to(device, torch.float64) for v in values] for n, values in extremes.items()}
    return {name: torch.stack(values).max().float() for name, values in on_device.items()}


# --- rollouts ---


def rollout_stats(rollout: Rollout) -> Stats:
    """Return scalars under `completion/` and `prompt/`, and the entropy at sampling.

    If no completion ended, the mean of the ended ones is 0 of 0, and their extremes are infinite;
    `average_over_ranks` leaves both out.
    """
    lengths, ended = rollout.lengths.float(), ~rollout.truncated
    stats = mean_and_extremes("completion/len", lengths)
    stats["completion/truncated_frac"] = rollout.truncated.float().mean()
    stats |= mean_and_extremes("completion/terminated_len", lengths, ended)
    stats |= mean_and_extremes("prompt/len", rollout.prompts.prompt_mask.sum(1).float())
    # H = E[-log p] over sampled tokens: an unbiased estimate that needs no forward pass.
    # -log p of tokens that were not sampled is no estimate of it.
    surprise = -torch.where(rollout.loss_mask, rollout.sampler_logprobs, 0.0).sum()
    name = "policy/data_nll" if rollout.provenance == "data" else "policy/entropy"
    stats[name] = torch.stack([surprise, rollout.loss_mask.sum()])
    return stats


def mean_and_extremes(name: str, values: Tensor, counted: Tensor | None = None) -> Stats:
    """Return `name`_mean, _min and _max of values, or of those of them that are `counted`.

    With `counted`, a mask of the same shape, the mean is a sum and a count, and the extremes of no
    value are infinite.
    """
    if counted is None:
        return {
            f"{name}_mean": values.mean(),
            f"{name}_min": values.min(),
            f"{name}_max": values.max(),
        }
    total = torch.where(counted, values, 0.0).sum()
    return {
        f"{name}_mean": torch.stack([total, counted.sum()]),
        f"{name}_min": torch.where(counted, values, torch.inf).min(),
        f"{name}_max": torch.where(counted, values, -torch.inf).max(),
    }


# --- rewards ---


def gather_rewards(rewards: RewardTable, gather: Callable[[Tensor], Tensor]) -> RewardTable:
    """Return the table of the groups of all ranks, for `reward_stats`; every rank must call this.

    `gather` concatenates flat tensors of all ranks, padded with NaN (`Comm.gather`).
    """
    parts = [rewards.total, rewards.valid]
    parts += [*rewards.components.values(), *rewards.processed.values()]
    stacked = torch.stack([part.double() for part in parts], dim=1)
    rows = gather(stacked.flatten()).view(-1, *stacked.shape[1:])
    rows = rows[~rows[:, 1, 0].isnan()]  # without those that pad a rank with fewer groups
    total, valid, *values = rows.unbind(1)
    count = len(rewards.components)
    return replace(
        rewards,
        components=dict(zip(rewards.components, values[:count], strict=True)),
        processed=dict(zip(rewards.processed, values[count:], strict=True)),
        total=total,
        valid=valid.bool(),
        greedy=None,
        tasks=[],
    )


def reward_stats(rewards: RewardTable) -> Stats:
    """Return scalars under `reward/` of the scored completions; see also `gather_rewards`.

    A statistic of nothing, such as the mean reward if no completion has one, is left out.
    """
    zero_variance = rewards.find_zero_variance()
    spread = compare_within_groups(rewards.scored)[1].squeeze(1)
    scores = rewards.scored[rewards.valid]
    stats: Stats = {
        "reward/mean": scores.mean(),
        "reward/std": _sample_std(scores),
        "reward/group_std": spread[rewards.valid.any(1)].mean(),
        "reward/failed_frac": (~rewards.valid).double().mean(),
        "reward/unscored_groups_frac": zero_variance.isnan().double().mean(),
        "reward/zero_variance_groups_frac": zero_variance.nanmean(),
    }
    for name, component in rewards.components.items():
        stats[f"reward/{name}"] = component.nanmean()
        stats[f"reward/{name}_std"] = _sample_std(component[~component.isnan()])
    if len(rewards.components) > 1:
        stats |= _compare_components(rewards)
    if scores.numel():
        stats |= {"reward/min": scores.min(), "reward/max": scores.max()}
    return {name: value.float() for name, value in stats.items() if not value.isnan()}


def reward_stat_names(components: Sequence[str]) -> list[str]:
    """Return the names that `reward_stats` logs under `reward/` for components of these names."""
    names = [
        "mean",
        "std",
        "min",
        "max",
        "group_std",
        "failed_frac",
        "unscored_groups_frac",
        "zero_variance_groups_frac",
    ]
    names += components
    names += [f"{name}_std" for name in components]
    if len(components) > 1:
        names += [f"{name}_share" for name in components]
        names += [f"cosine_{first}_{second}" for first, second in combinations(components, 2)]
    return names


def _compare_components(rewards: RewardTable) -> Stats:
    """Return the share of each component in the differences within groups, and conflicts.

    Let c_k be component k minus its group mean, times its weight, and c their sum. The share of
    component k is <c_k, c> / <c, c>. Shares add up to 1; a negative share means that the other
    components outweigh this one. The cosine of two components is that of c_k and c_l. NaN where
    nothing differs.
    """
    centered = {}
    for name, component in rewards.processed.items():
        scored = component.where(rewards.valid, torch.nan)
        centered[name] = compare_within_groups(scored)[0].nan_to_num(0.0)
    weighted = {name: rewards.weights[name] * values for name, values in centered.items()}
    total = torch.stack(list(weighted.values())).sum(0)
    power = total.square().sum()
    stats = {
        f"reward/{name}_share": (values * total).sum() / power for name, values in weighted.items()
    }
    for first, second in combinations(centered, 2):
        product = (centered[first] * centered[second]).sum()
        norms = centered[first].norm() * centered[second].norm()
        # Only the signs of the weights matter; a weight of 0 keeps the sign of the component.
        sign = 1.0 if rewards.weights[first] * rewards.weights[second] >= 0 else -1.0
        stats[f"reward/cosine_{first}_{second}"] = sign * product / norms
    return stats


def _sample_std(values: Tensor) -> Tensor:
    """[] standard deviation (n - 1) of [K] values; 0 for one of them, NaN for none."""
    return values.std(correction=min(1, len(values) - 1)) if len(values) else values.mean()


# --- advantages ---


def completion_advantages(token_advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Return [N] the advantage of each completion, from those of its tokens [N, C].

    It is that of the last token that the policy sampled, which no discount lowers: the estimator's
    advantage of the completion, or of its last turn; 0 without such a token.
    """
    columns = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    last_token = torch.where(loss_mask, columns, 0).amax(1, keepdim=True)
    return token_advantages.gather(1, last_token).squeeze(1)


def advantage_stats(advantages: Tensor, rewards: RewardTable, comm: Comm) -> Stats:
    """Return mean and standard deviation of the advantages of all ranks' scored completions.

    {} if none has a reward. `advantages` are [B, G], of this rank's completions, on the host.
    """
    advantages = comm.gather(advantages.where(rewards.valid.cpu(), torch.nan).flatten())
    mean = advantages.nanmean()  # NaN also pads a rank with fewer rows
    if mean.isnan():
        return {}
    variance = (advantages - mean).square().nanmean()
    return {"policy/advantage_mean": mean, "policy/advantage_std": variance.sqrt()}
