"""Lines of a chart as the paths of a drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

Point = tuple[float, float]
WIDTH, HEIGHT = 340, 170
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 12, 24
MOST_POINTS = 300  # of a line; of 10,000 iterations the extremes stay
MEANS = 100  # places of the mean of neighbors
FEW = 20  # points up to which each is marked
ROWS = 11  # of the table under a chart
WHOLE, SMALL, LARGE = 1e6, 1e-4, 1e5  # where numbers are written with powers of ten
STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True)
class Line:
    """A number over the iterations.

    Args:
        name: as it was logged.
        points: (iteration, value).
        low: lower ends of its intervals; with as many upper ones.
        high: upper ends.
    """

    name: str
    points: Sequence[Point]
    low: Sequence[Point] = ()
    high: Sequence[Point] = ()


@dataclass(frozen=True)
class Drawing:
    """A chart whose numbers have become places.

    Args:
        lines: name, path, path of the mean of neighbors, outline of the band, dots.
        x_ticks: place and text.
        y_ticks: place and text.
        marks: place and text of iterations at which something happened.
        table: a row for each of a few iterations: the iteration, then each line's value.
    """

    lines: list[dict[str, object]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    marks: list[tuple[float, str]]
    table: list[list[str]]


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most so many points, the smallest and largest of each stretch: spikes survive.

    Example:
        >>> thinned([(n, float(n == 57)) for n in range(100)], 4)
        [(0, 0.0), (49, 0.0), (50, 0.0), (57, 1.0)]
    """
    if len(points) <= most:
        return list(points)
    stretches = most // 2
    kept: list[Point] = []
    for number in range(stretches):
        first = number * len(points) // stretches
        part = points[first : (number + 1) * len(points) // stretches]
        extremes = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        # Where all are equal, both ends of the stretch.
        kept += sorted(extremes if len(extremes) > 1 else {part[0], part[-1]})
    return kept


def step_between(low: float, high: float, most: int = 4) -> float:
    """A round distance between the ticks of an axis.

    Example:
        >>> step_between(0.0, 1.0), step_between(0, 250)
        (0.25, 100.0)
    """
    width = (high - low) / most
    power = 10.0 ** math.floor(math.log10(width))
    return next(power * each for each in STEPS if power * each >= width * (1 - 1e-9))


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two.

    Example:
        >>> ticks(0.0, 1.0), ticks(0, 250)
        ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 100.0, 200.0])
    """
    step = step_between(low, high)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def short(value: float) -> str:
    """A number for an axis or a cell.

    Example:
        >>> short(0.25), short(12000), short(3e-7), short(0.0), short(2500000)
        ('0.25', '12,000', '3e-07', '0', '2.5e+06')
    """
    if value == int(value) and abs(value) < WHOLE:
        return f"{int(value):,}"
    return f"{value:.3g}" if SMALL <= abs(value) < LARGE else f"{value:.2g}"


def neighbors_mean(points: Sequence[Point]) -> list[Point]:
    """At most 101 values, each the mean of its neighborhood: a tenth of the line, less at its ends.

    Example:
        >>> neighbors_mean([(n, float(n)) for n in range(40)])[0]
        (0, 0.0)
    """
    last = len(points) - 1
    places = sorted({round(n * last / MEANS) for n in range(MEANS + 1)})
    reach = {n: min(n, last - n, len(points) // 20) for n in places}
    return [
        (points[n][0], fmean(value for _, value in points[n - r : n + r + 1]))
        for n, r in reach.items()
    ]


def draw(lines: Sequence[Line], last: float, marks: Sequence[tuple[float, str]] = ()) -> Drawing:
    """Places for the lines of one chart.

    Args:
        lines: at least one, each with a point.
        last: the last iteration of the run, the end of every chart's axis.
        marks: iterations at which something happened, and what.
    """
    every = [p[1] for line in lines for part in (line.points, line.low, line.high) for p in part]
    low, high = bounds(every)
    end = max(last, 1.0)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(step, end) / end

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    def path(points: Sequence[Point]) -> str:
        places = [f"{x(a):.1f} {y(b):.1f}" for a, b in points]
        return f"M{'L'.join(places)}" if places else ""

    drawn: list[dict[str, object]] = []
    for line in lines:
        many = len(line.points) > FEW
        mean = neighbors_mean(line.points) if many else []
        outline = [*line.low, *reversed(line.high)] if len(line.low) > 1 else []
        dots = [] if many else [(f"{x(a):.1f}", f"{y(b):.1f}") for a, b in line.points]
        drawn.append(
            {
                "name": line.name,
                "path": path(thinned(line.points)),
                "mean": path(mean),
                "band": path(outline) + "Z" * bool(outline),
                "dots": dots,
            }
        )
    return Drawing(
        drawn,
        [(round(x(t), 1), short(t)) for t in ticks(0, end)],
        [(round(y(t), 1), short(t)) for t in ticks(low, high)],
        [(round(x(at), 1), text) for at, text in marks],
        table_of(lines),
    )


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis: ticks, and not the same.

    Example:
        >>> bounds([0.1, 1.9]), bounds([0.0]), bounds([-4.0])
        ((0.0, 2.0), (0.0, 1.0), (-6.0, -2.0))
    """
    low, high = min(values), max(values)
    if low == high == 0:
        return 0.0, 1.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - abs(low) / 2, high + abs(high) / 2
    step = step_between(low, high)
    return step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)


def table_of(lines: Sequence[Line]) -> list[list[str]]:
    """A few iterations with the value of each line there."""
    steps = sorted({int(a) for line in lines for a, _ in line.points})
    count = min(ROWS, len(steps))
    chosen = [steps[round(n * (len(steps) - 1) / max(1, count - 1))] for n in range(count)]
    values = [dict(line.points) for line in lines]
    return [
        [f"{step:,}", *(short(each[step]) if step in each else "" for each in values)]
        for step in chosen
    ]
