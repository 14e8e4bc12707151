"""The numbers of a run as series over its iterations, and what is asked of a series."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
EARLY = 10  # iterations that the start of a run is judged by


@dataclass(frozen=True)
class Series:
    """One number over the iterations in which it was logged.

    Args:
        steps: [K] iterations, rising.
        values: [K] of them; NaN where a number was not one.
    """

    steps: Numbers
    values: Numbers

    def __len__(self) -> int:
        """How often it was logged."""
        return len(self.steps)

    @property
    def known(self) -> Series:
        """Without what is no number."""
        kept = np.isfinite(self.values)
        return Series(self.steps[kept], self.values[kept])

    def first(self, count: int = EARLY) -> Numbers:
        """Its first values."""
        return self.known.values[:count]

    def last(self, count: int = EARLY) -> Numbers:
        """Its last values."""
        return self.known.values[-count:]

    def means(self, width: int = EARLY) -> Series:
        """[K - width + 1] means of so many neighbors, at the iteration of the last of them.

        Example:
            >>> Series(np.arange(1.0, 5.0), np.array([0.0, 2.0, 4.0, 9.0])).means(2).values
            array([1. , 3. , 6.5])
        """
        known = self.known
        if len(known) < width:
            return Series(known.steps[:0], known.values[:0])
        sums = np.convolve(known.values, np.ones(width), "valid")
        return Series(known.steps[width - 1 :], sums / width)

    def since(self, held: NDArray[np.bool_]) -> int:
        """First iteration of the last unbroken stretch in which a statement held.

        Args:
            held: [K] for each iteration; one that did not hold between two that did is passed over.

        Example:
            >>> Series(np.arange(1.0, 7.0), np.zeros(6)).since(np.array([1, 0, 0, 1, 0, 1]) > 0)
            4
        """
        where = np.flatnonzero(held)
        if not len(where):
            return int(self.steps[-1])
        breaks = [later for earlier, later in pairwise(where) if later - earlier > 2]  # noqa: PLR2004
        return int(self.steps[breaks[-1] if breaks else where[0]])


NOTHING = Series(np.zeros(0), np.zeros(0))


@dataclass(frozen=True)
class Metrics:
    """All numbers of a run.

    Args:
        series: {name, as docs/metrics.md has it: series}.
    """

    series: Mapping[str, Series] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        """Whether a number of this name was logged."""
        return len(self[name].known) > 0

    def __getitem__(self, name: str) -> Series:
        """The series of this name; an empty one where it was not logged."""
        return self.series.get(name, NOTHING)

    @property
    def iterations(self) -> int:
        """How many the run has finished."""
        return int(max((each.steps[-1] for each in self.series.values() if len(each)), default=0))

    def parts(self) -> list[str]:
        """Names of the reward functions."""
        found = [re.fullmatch("reward/(.+)_std", name) for name in self.series]
        names = [each[1] for each in found if each]
        return sorted(name for name in names if f"reward/{name}" in self.series)

    def success(self) -> str:
        """Name of the held-out accuracy, `val/avg@4` say; "" where none was logged."""
        known = [name for name in sorted(self.series) if "avg@" in name]
        accuracies = [name for name in known if not name.endswith(("_low", "_high"))]
        return next((name for name in accuracies if name.startswith("val/")), "")


def of_rows(rows: Iterable[Mapping[str, Any]], step: str = "step") -> Metrics:
    """Metrics from rows of numbers; a later row of an iteration replaces an earlier one.

    Args:
        rows: {name: number}; what is empty or no number is left out.
        step: name of the iteration.
    """
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        at = number(row.get(step))
        for name, value in row.items():
            if name != step and value not in ("", None) and at is not None:
                read = number(value)
                found.setdefault(name, {})[at] = math.nan if read is None else read
    return Metrics(
        {
            name: Series(np.array(sorted(values)), np.array([values[n] for n in sorted(values)]))
            for name, values in found.items()
        }
    )


def number(value: Any) -> float | None:
    """A number from a cell, None where it is none; a complex cell such as a list is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def read_csv(path: Path) -> Metrics:
    """The numbers of a `metrics.csv`."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        return of_rows(csv.DictReader(line.replace("\0", "") for line in file))
