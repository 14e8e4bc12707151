"""Whether a series rose, fell or stayed, measured by its own noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from litgrpo.tools.doctor.metrics import EARLY, Series

SIGMAS = 3.0
FIRST = 3  # iterations that a start is judged by where it may be over after a few


@dataclass(frozen=True)
class Trend:
    """A series at its start and lately.

    Args:
        first: mean of its first values.
        last: mean of its last ones.
        error: standard error of their difference, from how much neighbors differ.
    """

    first: float
    last: float
    error: float

    @property
    def change(self) -> float:
        """How much it rose."""
        return self.last - self.first

    @property
    def rose(self) -> bool:
        """By more than its noise explains."""
        return self.change > SIGMAS * self.error

    @property
    def fell(self) -> bool:
        """By more than its noise explains."""
        return self.change < -SIGMAS * self.error


def trend(series: Series, width: int = EARLY) -> Trend:
    """Start and end of a series.

    Args:
        series: of at least two values.
        width: how many values a mean is of; half of the series where it is shorter.
    """
    count = max(1, min(width, len(series.known) // 2))
    return Trend(
        float(np.mean(series.first(count))),
        float(np.mean(series.last(count))),
        noise(series) * float(np.sqrt(2 / count)),
    )


def noise(series: Series) -> float:
    """Standard deviation of a value around its trend, from the median difference of neighbors.

    Example:
        >>> from litgrpo.tools.doctor.metrics import Series
        >>> round(noise(Series(np.arange(4.0), np.array([0.0, 1.0, 0.0, 1.0]))), 2)
        1.05
    """
    steps = np.abs(np.diff(series.known.values))
    return float(np.median(steps) / (0.6745 * np.sqrt(2))) if len(steps) else 0.0


def start(series: Series) -> float:
    """Mean of the first values of all."""
    return float(np.mean(series.first(FIRST)))


def lately(series: Series, width: int = EARLY) -> float:
    """Mean of the last values."""
    return float(np.mean(series.last(width)))


def both(name: str, series: Series) -> str:
    """A sentence with the number at the start and lately."""
    return f"{name}: {start(series):.3g} at the start, {lately(series):.3g} lately"
