"""How often the policy is right: metrics that are exact over processes and over repeated rows.

A distributed sampler repeats prompts to fill its last batch, so every metric remembers which prompt
each number came from and counts a prompt once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import comb

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from litgrpo.arguments import require
from litgrpo.evaluation.intervals import clustered_proportion, wilson
from litgrpo.evaluation.paired import bootstrap_ratio
from litgrpo.types import RewardTable

# States are float32 and flat, the shape and type that a process without prompts contributes; above
# this number float32 does not tell two indices apart.
MAX_INDEX = 2**24


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of k samples is right, estimated without bias from more samples.

    Args:
        num_samples: samples drawn for a prompt, at least k.
        num_correct: how many of them are right.
        k: how many one may submit.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1.
    """
    # 1 - C(n - c, k) / C(n, k)
    return 1 - comb(num_samples - num_correct, k) / comb(num_samples, k)


class PerPrompt(Metric):
    """Collects one row of numbers per prompt; a prompt that comes again is not counted again."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    index: list[Tensor]
    values: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        # {name: one number per prompt} of all processes, in the order of `places`; of `compute`.
        self.of_prompts: dict[str, list[float]] = {}
        self.places: list[int] = []
        self.add_state("index", default=[], dist_reduce_fx="cat")
        self.add_state("values", default=[], dist_reduce_fx="cat")

    def collect(self, index: Tensor, values: Tensor) -> None:
        """Add a batch.

        Args:
            index: [B] position of each prompt in its data set.
            values: [B, K] numbers to remember.
        """
        require(len(index) == len(values), f"got {len(index)} indices for {len(values)} prompts")
        require(
            not bool((index >= MAX_INDEX).any()),
            f"a data set for evaluation may have {MAX_INDEX} rows at most",
        )
        self.index.append(index.float())
        self.values.append(values.float().flatten())

    def rows(self, num_values: int) -> list[list[float]]:
        """The numbers of every prompt, each prompt once, in the order of the data set: [B, K]."""
        self.places = []
        if not len(self.index):
            return []
        index = dim_zero_cat(self.index).tolist()
        values = dim_zero_cat(self.values).view(-1, num_values).tolist()
        # Reversed, so that the first of several rows of a prompt stays.
        first = dict(zip(reversed(index), reversed(values), strict=True))
        self.places = [int(place) for place in sorted(first)]
        return [first[place] for place in self.places]


class SampledAccuracy(PerPrompt):
    """Accuracy of sampled completions: avg@k with its interval, and pass@j.

    Args:
        num_samples: k, completions per prompt.
        ks: the js of pass@j, each at most k.
        confidence: coverage of the interval, which is clustered by prompt.
    """

    def __init__(
        self, num_samples: int, ks: Sequence[int] = (1,), confidence: float = 0.95
    ) -> None:
        super().__init__()
        wrong = [k for k in ks if not 1 <= k <= num_samples]
        require(
            num_samples >= 1 and not wrong,
            f"pass@{wrong or ks} cannot be estimated from {num_samples} samples per prompt;"
            " choose k from 1 to the number of samples",
        )
        self.num_samples = num_samples
        self.ks = tuple(ks)
        self.confidence = confidence

    def update(self, index: Tensor, correct: Tensor) -> None:
        """Add a batch.

        Args:
            index: [B] position of each prompt in its data set.
            correct: [B, k] True where a completion is right.
        """
        require(
            tuple(correct.shape[1:]) == (self.num_samples,),
            f"expected {self.num_samples} samples per prompt, got shape {tuple(correct.shape)}",
        )
        self.collect(index, correct.sum(1, keepdim=True))

    def compute(self) -> dict[str, Tensor]:
        """{avg@k, avg@k_low, avg@k_high, pass@j for every j}."""
        counts = [int(row[0]) for row in self.rows(1)]
        name, samples = f"avg@{self.num_samples}", self.num_samples
        low, high = clustered_proportion(counts, samples, self.confidence)
        self.of_prompts = {name: [count / samples for count in counts]}
        report = {name: _mean(self.of_prompts[name])}
        report |= {f"{name}_low": low, f"{name}_high": high}
        for k in self.ks:
            report[f"pass@{k}"] = _mean([pass_at_k(samples, count, k) for count in counts])
        return _tensors(report, self.device)


class GreedyAccuracy(PerPrompt):
    """Accuracy of one greedy completion per prompt, with Wilson's interval.

    Args:
        confidence: coverage of the interval.
    """

    def __init__(self, confidence: float = 0.95) -> None:
        super().__init__()
        self.confidence = confidence

    def update(self, index: Tensor, correct: Tensor) -> None:
        """Add a batch.

        Args:
            index: [B] position of each prompt in its data set.
            correct: [B] True where the completion is right.
        """
        require(
            correct.shape == index.shape,
            f"expected shape {tuple(index.shape)}, got {tuple(correct.shape)}",
        )
        self.collect(index, correct[:, None])

    def compute(self) -> dict[str, Tensor]:
        """{greedy, greedy_low, greedy_high}."""
        correct = [row[0] for row in self.rows(1)]
        self.of_prompts = {"greedy": correct}
        low, high = wilson(sum(correct), len(correct), self.confidence)
        report = {"greedy": _mean(correct), "greedy_low": low, "greedy_high": high}
        return _tensors(report, self.device)


class RewardMeans(PerPrompt):
    """Mean total reward over valid completions, and mean of every part over those it answered.

    Args:
        names: names of the parts.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)

    def update(self, index: Tensor, rewards: RewardTable) -> None:
        """Add a batch.

        Args:
            index: [B] position of each prompt in its data set.
            rewards: the rewards of its completions, [B, G].
        """
        columns = [rewards.total.where(rewards.valid, torch.nan)]
        columns += [rewards.parts[name] for name in self.names]
        sums = [column.nansum(1) for column in columns]
        counts = [(~column.isnan()).sum(1) for column in columns]
        # [B, 2 (1 + parts)]
        self.collect(index, torch.stack([*sums, *counts], dim=1).to(index.device))

    def compute(self) -> dict[str, Tensor]:
        """{reward, reward_low, reward_high, and one entry per part}; NaN: nothing was answered.

        The interval is a bootstrap over prompts and is left out for fewer than two of them.
        """
        names = ("reward", *self.names)
        rows = self.rows(2 * len(names))
        table = torch.tensor(rows, dtype=torch.float64).view(-1, 2, len(names))
        sums, counts = table.unbind(1)  # [B, 1 + parts] each
        self.of_prompts = dict(zip(names, (sums / counts).T.tolist(), strict=True))
        means = dict(zip(names, (sums.sum(0) / counts.sum(0)).tolist(), strict=True))
        bounds = bootstrap_ratio(sums[:, 0].tolist(), counts[:, 0].tolist())
        interval = zip(("reward_low", "reward_high"), bounds, strict=True)
        known = {name: bound for name, bound in interval if math.isfinite(bound)}
        return _tensors({"reward": means["reward"]} | known | means, self.device)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else torch.nan


def _tensors(report: dict[str, float], device: torch.device) -> dict[str, Tensor]:
    return {name: torch.tensor(value, device=device) for name, value in report.items()}
