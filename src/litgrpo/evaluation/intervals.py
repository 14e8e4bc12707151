"""How sure a number is: intervals and tests for accuracies and means. Pure Python.

All intervals are two-sided. Samples of one prompt are not independent, so every function here
counts prompts, not samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import atan2, cos, fsum, inf, nan, pi, sin, sqrt
from statistics import NormalDist

from litgrpo.arguments import require

Interval = tuple[float, float]


def wilson(successes: float, trials: float, confidence: float = 0.95) -> Interval:
    """Score interval of a proportion; sensible at 0 and 1, where it is one-sided, not empty.

    Args:
        successes: number of successes; need not be whole (an effective sample size seldom is).
        trials: number of independent trials; none gives (0, 1).
        confidence: coverage.

    Example:
        >>> [round(bound, 4) for bound in wilson(9, 10)]
        [0.5958, 0.9821]

    Source: Wilson 1927, JASA 22:209.
    """
    if not trials:
        return 0.0, 1.0
    z = _z(confidence)
    share = successes / trials
    center = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    spread = share * (1 - share) / trials + z * z / (4 * trials * trials)
    half = z * sqrt(spread) / (1 + z * z / trials)
    # At 0 and 1 one bound is exact; only rounding would move it.
    low = 0.0 if share == 0 else max(0.0, center - half)
    high = 1.0 if share == 1 else min(1.0, center + half)
    return low, high


def clustered_proportion(
    successes: Sequence[int], num_samples: int, confidence: float = 0.95
) -> Interval:
    """Interval of a success rate when every prompt was sampled several times.

    Wilson's interval with the effective sample size, variance of one sample over variance of the
    mean across prompts. It stays inside [0, 1] and does not collapse at 0 and 1 as mean +- standard
    error does, needs no bootstrap, and is Wilson's own interval for one sample per prompt. The
    effective size is kept between the number of prompts (samples of one prompt always agree;
    assumed too where all are right or all wrong) and the number of samples (they are independent).

    Args:
        successes: [B] how many samples of each prompt succeeded.
        num_samples: samples per prompt.
        confidence: coverage.

    Source: Franco, Little, Louis and Slud 2019, J. Survey Statistics and Methodology 7:334 (which
    recommends Wilson's form); clustering of evaluations: Miller 2024, arXiv:2411.00640.
    """
    prompts = len(successes)
    if not prompts:
        return 0.0, 1.0
    rates = [count / num_samples for count in successes]
    mean, error = mean_and_error(rates)
    if prompts == 1 or mean in (0.0, 1.0):
        size = float(prompts)
    elif error == 0:
        size = float(prompts * num_samples)
    else:
        size = min(max(mean * (1 - mean) / error**2, prompts), prompts * num_samples)
    return wilson(mean * size, size, confidence)


def clustered_mean(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's t interval of a mean over prompts, one value (itself a mean over samples) for each.

    Args:
        values: [B] one value per prompt; fewer than two tell nothing and give an infinite interval.
        confidence: coverage.

    Source: Miller 2024, arXiv:2411.00640, with t in place of the normal quantile.
    """
    mean, error = mean_and_error(values)
    if len(values) <= 1:
        return -inf, inf
    half = student_t_quantile(0.5 + confidence / 2, len(values) - 1) * error
    return mean - half, mean + half


@dataclass(frozen=True)
class PairedDifference:
    """What changed between two evaluations of the same prompts.

    Args:
        mean: mean of after - before.
        low: lower bound of its interval.
        high: upper bound of its interval.
        p_value: chance of a difference at least this large, of either sign, if nothing had changed.
    """

    mean: float
    low: float
    high: float
    p_value: float


def paired_difference(
    before: Sequence[float], after: Sequence[float], confidence: float = 0.95
) -> PairedDifference:
    """Compare two evaluations prompt by prompt: Student's t test of the differences.

    Pairing takes out how hard each prompt is, so it finds smaller changes than two separate
    intervals.

    Args:
        before: [B] one value per prompt.
        after: [B] the same prompts in the same order.
        confidence: coverage of the interval.

    Source: Miller 2024, arXiv:2411.00640.
    """
    require(
        len(before) == len(after) > 1,
        "a paired comparison needs the same prompts twice, at least 2 of them; got"
        f" {len(before)} and {len(after)}",
    )
    differences = [new - old for old, new in zip(before, after, strict=True)]
    mean, error = mean_and_error(differences)
    low, high = clustered_mean(differences, confidence)
    if error == 0:
        return PairedDifference(mean, low, high, float(mean == 0))
    inside = student_t_inside(abs(mean) / error, len(differences) - 1)
    return PairedDifference(mean, low, high, 1 - inside)


def mean_and_error(values: Sequence[float]) -> Interval:
    """Mean and its standard error (n - 1; 0 for a single value, NaN for none)."""
    count = len(values)
    if not count:
        return nan, nan
    if min(values) == max(values):  # exactly, where rounding would leave a spread
        return float(values[0]), 0.0
    mean = fsum(values) / count
    return mean, sqrt(fsum((value - mean) ** 2 for value in values) / (count - 1) / count)


def student_t_inside(t: float, df: int) -> float:
    """Probability that a t variable of `df` degrees of freedom lies in [-t, t].

    Example:
        >>> student_t_inside(1.0, 1)
        0.5

    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    # a = atan(t / sqrt df), sums up to the power df - 2
    # odd df:   2/pi (a + sin a (cos a + 2/3 cos^3 a + ...))
    # even df:  sin a (1 + 1/2 cos^2 a + 1*3/(2*4) cos^4 a + ...)
    angle = atan2(t, sqrt(df))
    odd = df % 2
    term, total = (cos(angle) if odd else 1.0), 0.0
    for power in range(odd, df - 1, 2):
        total += term
        term *= cos(angle) ** 2 * (power + 1) / (power + 2)
    total *= sin(angle)
    return 2 / pi * (angle + total) if odd else total


def student_t_quantile(probability: float, df: int) -> float:
    """The t that a variable of `df` degrees of freedom stays below with a probability above 1/2.

    Example:
        >>> round(student_t_quantile(0.975, 10), 4)
        2.2281
    """
    wanted, low, high = 2 * probability - 1, 0.0, 1.0
    while student_t_inside(high, df) < wanted:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_inside(middle, df) < wanted else (low, middle)
    return high


def _z(confidence: float) -> float:
    require(0 < confidence < 1, f"confidence must be between 0 and 1, got {confidence}")
    return NormalDist().inv_cdf(0.5 + confidence / 2)
