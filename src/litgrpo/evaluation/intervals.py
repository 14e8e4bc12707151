"""Intervals and tests for accuracies and means, and the paired comparison of two evaluations.

All intervals are two-sided. Samples of one prompt are not independent, so every function here
counts prompts, not samples. Distributions are those of scipy.special, imported where they are used;
scipy.stats has the same ones and takes seconds to import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, inf, nan, sqrt
from statistics import NormalDist

import torch

Interval = tuple[float, float]

NUM_DRAWS, SEED = 2000, 0  # of the bootstrap
AT_ONCE = 2**22  # prompts drawn at once, which bounds the memory
# Below, a change is not called one: bootstrap intervals are too narrow. Of those of 10 prompts,
# 90 % covered the mean in simulations, not 95 % (tests/evaluation/test_intervals.py).
FEW_PROMPTS = 20
FEW_PROMPTS_NOTE = (
    f"Fewer than {FEW_PROMPTS} prompts: the intervals of rewards and changes are too narrow "
    "(bootstrap; with 10 prompts about 90 % cover the mean)."
)
SOLVED = 0.5  # smallest fraction of correct samples of a prompt that counts as solved

PromptValues = Mapping[str, Sequence[float]]  # {name: one number per prompt}, with `index`


def wilson_interval(successes: float, trials: float, confidence: float = 0.95) -> Interval:
    """Compute the Wilson score interval of a proportion; at 0 and 1 it is one-sided.

    Args:
        successes: number of successes; need not be whole (an effective sample size seldom is).
        trials: number of independent trials; 0 gives (0, 1).
        confidence: coverage.

    Example:
        >>> [round(bound, 4) for bound in wilson_interval(9, 10)]
        [0.5958, 0.9821]

    Source: Wilson 1927, JASA 22:209.
    """
    if not trials:
        return 0.0, 1.0
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it must be between 0 and 1")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / trials
    center = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    spread = share * (1 - share) / trials + z * z / (4 * trials * trials)
    half = z * sqrt(spread) / (1 + z * z / trials)
    # At 0 and 1 one bound is exact; only rounding would move it.
    low = 0.0 if share == 0 else max(0.0, center - half)
    high = 1.0 if share == 1 else min(1.0, center + half)
    return low, high


def proportion_interval(
    successes: Sequence[int], num_samples: int | Sequence[int], confidence: float = 0.95
) -> Interval:
    """Compute the interval of a success rate if every prompt was sampled several times.

    Wilson's interval with the effective sample size, variance of one sample over variance of the
    mean across prompts. It stays inside [0, 1] and does not collapse at 0 and 1 as mean +- standard
    error does, needs no bootstrap, and is Wilson's own interval for one sample per prompt. The
    effective size is kept between the number of prompts (samples of one prompt always agree;
    assumed if all are correct or all incorrect) and the number of samples (they are independent).

    Args:
        successes: [B] number of samples of each prompt that succeeded.
        num_samples: samples per prompt, at least 1; or [B] those of each prompt.
        confidence: coverage.

    Source: Franco, Little, Louis and Slud 2019, J. Survey Statistics and Methodology 7:334 (which
    recommends Wilson's form); clustering of evaluations: Miller 2024, arXiv:2411.00640.
    """
    prompts = len(successes)
    if not prompts:
        return 0.0, 1.0
    counts = [num_samples] * prompts if isinstance(num_samples, int) else num_samples
    rates = [count / number for count, number in zip(successes, counts, strict=True)]
    mean, error = mean_and_standard_error(rates)
    if prompts == 1 or mean in (0.0, 1.0):
        size = float(prompts)
    elif error == 0:
        size = float(sum(counts))
    else:
        size = min(max(mean * (1 - mean) / error**2, prompts), sum(counts))
    return wilson_interval(mean * size, size, confidence)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Compute the Student's t interval of a mean over prompts, with one value for each prompt.

    Args:
        values: [B] one value per prompt, such as a mean over samples; fewer than two give an
            infinite interval.
        confidence: coverage.

    Source: Miller 2024, arXiv:2411.00640, with t in place of the normal quantile.
    """
    from scipy.special import stdtrit

    mean, error = mean_and_standard_error(values)
    if len(values) <= 1:
        return -inf, inf
    half = float(stdtrit(len(values) - 1, 0.5 + confidence / 2)) * error
    return mean - half, mean + half


@dataclass(frozen=True)
class PairedDifference:
    """Mean change between two evaluations of the same prompts.

    Args:
        mean: mean of after - before.
        low: lower bound of its interval.
        high: upper bound of its interval.
        p_value: probability of a difference at least this large, of either sign, if nothing had
            changed.

    Example:
        >>> change = compute_paired_difference([0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0])
        >>> change.mean, round(change.low, 2), round(change.high, 2), round(change.p_value, 2)
        (0.5, -0.42, 1.42, 0.18)
    """

    mean: float
    low: float
    high: float
    p_value: float


def compute_paired_difference(
    before: Sequence[float], after: Sequence[float], confidence: float = 0.95
) -> PairedDifference:
    """Compare two evaluations prompt by prompt: Student's t test of the differences.

    Pairing removes the difficulty of each prompt from the variance, so it finds smaller changes
    than two separate intervals.

    Args:
        before: [B] one value per prompt.
        after: [B] the same prompts in the same order.
        confidence: coverage of the interval.

    Source: Miller 2024, arXiv:2411.00640.
    """
    from scipy.special import stdtr

    if not len(before) == len(after) > 1:
        raise ValueError(
            f"before and after must have one value for each of the same prompts, at least 2; got "
            f"{len(before)} and {len(after)}"
        )
    differences = [new - old for old, new in zip(before, after, strict=True)]
    mean, error = mean_and_standard_error(differences)
    low, high = mean_interval(differences, confidence)
    if error == 0:
        return PairedDifference(mean, low, high, float(mean == 0))
    p_value = 2 * float(stdtr(len(differences) - 1, -abs(mean) / error))
    return PairedDifference(mean, low, high, p_value)


def mean_and_standard_error(values: Sequence[float]) -> Interval:
    """Compute the mean and its standard error (n - 1; 0 for a single value, NaN for none)."""
    count = len(values)
    if not count:
        return nan, nan
    if min(values) == max(values):  # exactly, where rounding would leave a spread
        return float(values[0]), 0.0
    mean = fsum(values) / count
    return mean, sqrt(fsum((value - mean) ** 2 for value in values) / (count - 1) / count)


# --- comparison of two evaluations ---


def bootstrap_ratio(
    sums: Sequence[float], counts: Sequence[float], confidence: float = 0.95
) -> Interval:
    """Compute the percentile bootstrap interval of sum(sums) / sum(counts), with prompts resampled.

    Source: Efron and Tibshirani 1993, chapter 13; prompts as units: Miller 2024, arXiv:2411.00640.
    """
    # The draws are seeded: the same numbers give the same interval. NaN for fewer than two prompts.
    prompts = len(sums)
    if prompts <= 1:
        return nan, nan
    generator = torch.Generator().manual_seed(SEED)
    values = torch.tensor([sums, counts], dtype=torch.float64)
    at_once = max(1, AT_ONCE // prompts)
    draws: list[torch.Tensor] = []
    for first in range(0, NUM_DRAWS, at_once):
        size = (min(at_once, NUM_DRAWS - first), prompts)
        drawn = values[:, torch.randint(prompts, size, generator=generator)].sum(2)
        draws.append(drawn[0] / drawn[1])
    means = torch.cat(draws)
    tail = (1 - confidence) / 2
    low, high = means.nanquantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def mcnemar(gained: int, lost: int) -> float:
    """Compute McNemar's exact p: probability of a split at least as uneven by chance alone.

    Source: McNemar 1947, Psychometrika 12:153; two-sided, by the binomial distribution.
    """
    from scipy.special import bdtr

    return min(1.0, 2 * float(bdtr(min(gained, lost), gained + lost, 0.5)))


@dataclass(frozen=True)
class Change:
    """Mean of after - before over prompts, with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Changes between two evaluations, prompt by prompt."""

    changes: dict[str, Change]  # {name: change of its mean over the prompts of both}
    # value deciding if a prompt is solved, `greedy` or avg@k; "" if neither is known
    solved_by: str
    gained: list[int]  # indices of prompts that are solved after and were not before
    lost: list[int]  # indices of prompts that were solved before and are not after

    @property
    def p_value(self) -> float:
        """McNemar's exact p of gained and lost."""
        return mcnemar(len(self.gained), len(self.lost))


def compare_evaluations(before: PromptValues, after: PromptValues) -> Comparison | None:
    """Compare two evaluations prompt by prompt; None if they have no prompt in common."""
    # A prompt is solved if its greedy completion is correct, or without one, if at least half of
    # its samples are. Means have bootstrap intervals, because no distribution can be assumed for a
    # graded reward; binary outcomes have an exact test. Numbers may be NaN; prompts are matched by
    # `index`.
    row_of = {number: row for row, number in enumerate(before.get("index", ()))}
    rows = [(row_of[n], row) for row, n in enumerate(after.get("index", ())) if n in row_of]
    if not rows:
        return None
    names = [name for name in after if name in before and name != "index"]
    pairs = {n: [(before[n][old], after[n][new]) for old, new in rows] for n in names}
    changes = {name: change for name, values in pairs.items() if (change := _change(values))}
    solved_by = next((name for name in ("greedy", *names) if name in names and _binary(name)), "")
    gained, lost = [], []
    for (old, now), (_, row) in zip(pairs.get(solved_by, ()), rows, strict=False):
        index = int(after["index"][row])
        if old < SOLVED <= now:
            gained.append(index)
        elif now < SOLVED <= old:
            lost.append(index)
    return Comparison(changes, solved_by, gained, lost)


def _binary(name: str) -> bool:
    return name == "greedy" or name.startswith("avg@")


def _change(pairs: Sequence[tuple[float, float]]) -> Change | None:
    differences = [now - old for old, now in pairs if math.isfinite(now - old)]
    if not differences:
        return None
    bounds = bootstrap_ratio(differences, [1.0] * len(differences))
    return Change(fsum(differences) / len(differences), *bounds)
