"""What changed between two evaluations of the same prompts, and how sure that is.

Means have intervals by the bootstrap over prompts, because a graded reward has no variance of its
own to count on; binary outcomes have an exact test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, fsum, nan

import torch

from litgrpo.evaluation.intervals import Interval

NUM_DRAWS, SEED = 2000, 0
AT_ONCE = 2**22  # prompts drawn at once, which bounds the memory
SOLVED = 0.5  # share of right samples from which on a prompt counts as solved

PerPrompt = Mapping[str, Sequence[float]]  # {name: one number per prompt}, with `index`


def bootstrap_ratio(
    sums: Sequence[float], counts: Sequence[float], confidence: float = 0.95
) -> Interval:
    """Percentile bootstrap interval of sum(sums) / sum(counts), with prompts drawn anew.

    The draws are seeded: the same numbers give the same interval.

    Args:
        sums: [B] what the samples of each prompt add up to.
        counts: [B] how many samples that are.
        confidence: coverage.

    Returns:
        Lower and upper bound; NaN for fewer than two prompts, which tell nothing.

    Source: Efron and Tibshirani 1993, chapter 13; prompts as units: Miller 2024, arXiv:2411.00640.
    """
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
    """McNemar's exact test: chance of a split at least as uneven, were both ways as likely.

    Args:
        gained: prompts that failed before and succeed after.
        lost: prompts that succeeded before and fail after.

    Example:
        >>> mcnemar(5, 0), mcnemar(3, 3)
        (0.0625, 1.0)

    Source: McNemar 1947, Psychometrika 12:153; two-sided, by the binomial distribution.
    """
    changed = gained + lost
    # 2 * P(X <= min), X binomial with 1/2
    tail = sum(comb(changed, number) for number in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**changed)


@dataclass(frozen=True)
class Change:
    """The mean of after - before over prompts, with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """What changed between two evaluations, prompt by prompt.

    Args:
        changes: {name: change of its mean over the prompts that both know}.
        solved_by: what tells that a prompt is solved, `greedy` or avg@k; "" if neither is known.
        gained: prompts that are solved after and were not before.
        lost: prompts that were solved before and are not after.
    """

    changes: dict[str, Change]
    solved_by: str
    gained: list[int]
    lost: list[int]

    @property
    def p_value(self) -> float:
        """McNemar's exact p of gained and lost."""
        return mcnemar(len(self.gained), len(self.lost))


def compared(before: PerPrompt, after: PerPrompt) -> Comparison | None:
    """Compare two evaluations prompt by prompt; None where they share no prompt.

    A prompt is solved if its most likely completion is right, or without one, if at least half of
    its samples are.

    Args:
        before: {name: [B] one number per prompt, NaN where unknown}, with `index`.
        after: the same later; prompts are matched by `index`.
    """
    places = {number: row for row, number in enumerate(before.get("index", ()))}
    rows = [(places[n], row) for row, n in enumerate(after.get("index", ())) if n in places]
    if not rows:
        return None
    names = [name for name in after if name in before and name != "index"]
    pairs = {n: [(before[n][old], after[n][new]) for old, new in rows] for n in names}
    changes = {name: change for name, each in pairs.items() if (change := _change(each))}
    solved_by = next((name for name in ("greedy", *names) if name in names and _binary(name)), "")
    moved: dict[bool, list[int]] = {True: [], False: []}
    for (old, now), (_, row) in zip(pairs.get(solved_by, ()), rows, strict=False):
        was, is_now = old >= SOLVED, now >= SOLVED
        moved[is_now].extend([int(after["index"][row])] * (was != is_now))
    return Comparison(changes, solved_by, gained=moved[True], lost=moved[False])


def _binary(name: str) -> bool:
    return name == "greedy" or name.startswith("avg@")


def _change(pairs: Sequence[tuple[float, float]]) -> Change | None:
    differences = [now - old for old, now in pairs if math.isfinite(now - old)]
    if not differences:
        return None
    bounds = bootstrap_ratio(differences, [1.0] * len(differences))
    return Change(fsum(differences) / len(differences), *bounds)
