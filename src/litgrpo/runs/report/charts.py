"""Charts of logged metrics: which metrics share one, and their curves as SVG paths."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from litgrpo.callbacks.formatting import BOUNDS
from litgrpo.callbacks.metrics import definition
from litgrpo.runs.run import Run

Point = tuple[float, float]
# Units of the SVG's viewBox, as in assets/report/macros.html.
WIDTH, HEIGHT = 340, 170
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 12, 24
MAX_CURVES = 5  # per chart; more cannot be distinguished
MAX_POINTS = 300  # per curve
MEAN_POINTS = 100  # points of the moving average
MAX_DOTS = 20  # points up to which each has a dot
TABLE_ROWS = 11  # of the table below a chart
MAX_WHOLE, MIN_FIXED, MAX_FIXED = 1e6, 1e-4, 1e5  # outside, numbers have an exponent
MAX_TICK_CHARS = 7  # that fit beside the axis


# --- which metrics share a chart ---


@dataclass(frozen=True)
class Panel:
    """A chart of some metrics: its title, and patterns of their names."""

    title: str
    patterns: tuple[str, ...]


# The mean of a reward component, as opposed to statistics of the total reward.
COMPONENT = r"reward/(?!mean$|min$|max$|std$|group_std$|.*_(?:std|share|frac)$|cosine_)[^/]+"
# In the order in which one reads them.
PANELS = (
    Panel(
        "Held-out accuracy",
        (r"val/(.+/)?(avg@|greedy)\d*", r"val/(.+/)?pass@(?!1$)\d+"),
    ),
    Panel("Held-out reward", (r"val/(.+/)?reward",)),
    Panel("Held-out loss", (r"val/(.+/)?loss",)),
    Panel("SFT loss", (r"sft/loss",)),
    Panel("Token accuracy", (r"sft/token_accuracy", r"val/(.+/)?token_accuracy")),
    Panel("Training reward", (r"reward/mean",)),
    Panel("Reward components", (COMPONENT,)),
    Panel("Share of the advantage per component", (r"reward/.+_share",)),
    Panel(
        "Groups without a gradient",
        (r"reward/(zero_variance_groups|unscored_groups|all_correct|all_incorrect)_frac",),
    ),
    Panel("Completion length", (r"completion/(terminated_)?len_mean", r"completion/len_max")),
    Panel("Length of correct and incorrect completions", (r"completion/(in)?correct_len_mean",)),
    Panel("Truncated and terminated", (r"completion/(truncated|eos|end_token)_frac",)),
    Panel("Loops and duplicates", (r"completion/(loop|unique|distinct)_frac",)),
    Panel("Turns per episode", (r"env/turns", r"tools/.+_calls")),
    Panel("Failed episodes", (r"env/(failed|timeout)_frac", r"tools/.+_failed")),
    Panel("Entropy", (r"policy/entropy", r"policy/entropy_trained")),
    Panel("KL to the reference", (r"policy/kl",)),
    Panel("Log ratio", (r"policy/log_ratio",)),
    Panel("Clipped tokens", (r"policy/clip_(low|high)_frac",)),
    Panel("Gradient norm", (r"optim/grad_norm",)),
    Panel("Learning rate", (r"optim/lr",)),
    Panel("Skipped steps", (r"optim/skipped_steps",)),
    Panel("Sampler mismatch", (r"policy/sampler_mismatch",)),
    Panel("Perplexity under the initial policy", (r"val/(.+/)?initial_perplexity",)),
    Panel("Seconds per iteration", (r"time/(step|rollout|learn|reward|logprobs)_s",)),
    Panel("Seconds per evaluation", (r"time/evaluation_s",)),
    Panel("Peak memory (GiB)", (r"perf/peak_memory_gib",)),
)


@dataclass(frozen=True)
class Curve:
    """A metric over the iterations.

    Args:
        name: name of the metric.
        points: (iteration, value).
        low: lower ends of confidence intervals; empty without them.
        high: upper ends, one for each lower one.
    """

    name: str
    points: Sequence[Point]
    low: Sequence[Point] = ()
    high: Sequence[Point] = ()


def group_curves(run: Run) -> Iterator[tuple[str, list[Curve], str]]:
    """Yield title, curves and explanation of each chart that has data."""
    names = [name for name in run.names if not name.endswith(BOUNDS)]
    for panel in PANELS:
        matching = [
            name for pattern in panel.patterns for name in names if re.fullmatch(pattern, name)
        ]
        if not matching:
            continue
        curves = []
        for name in dict.fromkeys(matching[:MAX_CURVES]):
            points, low, high = (list(run[name + end].items()) for end in ("", *BOUNDS))
            curves.append(Curve(name, points, low, high))
        yield panel.title, curves, definition(matching[0])


# --- drawing ---


@dataclass(frozen=True)
class CurvePaths:
    """SVG paths of one curve.

    Args:
        name: name of the metric.
        path: through all points.
        mean: of the moving average; "" for short curves.
        band: outline of the confidence intervals; "" without them.
        dots: coordinates of the points; empty for long curves.
    """

    name: str
    path: str
    mean: str
    band: str
    dots: list[tuple[str, str]]


@dataclass(frozen=True)
class Drawing:
    """A chart in SVG coordinates.

    Args:
        curves: paths of each curve.
        x_ticks: coordinate and label.
        y_ticks: coordinate and label.
        marks: coordinate and label of iterations at which findings begin.
        table: rows of a few iterations: the iteration, then the value of each curve.
    """

    curves: list[CurvePaths]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    marks: list[tuple[float, str]]
    table: list[list[str]]


def draw(curves: Sequence[Curve], end: float, marks: Sequence[tuple[float, str]] = ()) -> Drawing:
    """Compute the coordinates of one chart."""
    values = [value for c in curves for points in (c.points, c.low, c.high) for _, value in points]
    y_ticks = axis_ticks(values)
    low, high = y_ticks[0], y_ticks[-1]
    end = max(end, 1.0)
    step = tick_step(0.0, end)
    x_ticks = [n * step for n in range(math.floor(end / step + 1e-9) + 1)]

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(step, end) / end

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    def path(points: Sequence[Point]) -> str:
        coordinates = [f"{x(a):.1f} {y(b):.1f}" for a, b in points]
        return f"M{'L'.join(coordinates)}" if coordinates else ""

    drawn = []
    for curve in curves:
        is_long = len(curve.points) > MAX_DOTS
        band = ""
        if len(curve.low) > 1:
            band = path([*curve.low, *reversed(curve.high)]) + "Z"
        drawn.append(
            CurvePaths(
                curve.name,
                path(thin_out(curve.points)),
                path(smooth(curve.points)) if is_long else "",
                band,
                [] if is_long else [(f"{x(a):.1f}", f"{y(b):.1f}") for a, b in curve.points],
            )
        )
    return Drawing(
        drawn,
        [(round(x(n), 1), text) for n, text in zip(x_ticks, label_ticks(x_ticks), strict=True)],
        [(round(y(n), 1), text) for n, text in zip(y_ticks, label_ticks(y_ticks), strict=True)],
        [(round(x(step), 1), label) for step, label in marks],
        _table(curves),
    )


def thin_out(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Reduce a curve to at most `most` points, the extremes of each stretch, so spikes survive."""
    if len(points) <= most:
        return list(points)
    num_stretches = most // 2
    points_left: list[Point] = []
    for n in range(num_stretches):
        first = n * len(points) // num_stretches
        stretch = points[first : (n + 1) * len(points) // num_stretches]
        extremes = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        # Where all values are equal, keep both ends of the stretch.
        points_left += sorted(extremes if len(extremes) > 1 else {stretch[0], stretch[-1]})
    return points_left


def smooth(points: Sequence[Point]) -> list[Point]:
    """Average a curve over a tenth of its length, less at its ends; at most 101 points.

    Example:
        >>> smooth([(n, float(n)) for n in range(40)])[0]
        (0, 0.0)
    """
    last = len(points) - 1
    smoothed = []
    for n in sorted({round(part * last / MEAN_POINTS) for part in range(MEAN_POINTS + 1)}):
        reach = min(n, last - n, len(points) // 20)
        mean = fmean(value for _, value in points[n - reach : n + reach + 1])
        smoothed.append((points[n][0], mean))
    return smoothed


def axis_ticks(values: Sequence[float]) -> list[float]:
    """Return evenly spaced round numbers, at least two, around all values."""
    low, high = min(values), max(values)
    if low == high == 0:
        high = 1.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - abs(low) / 2, high + abs(high) / 2
    step = tick_step(low, high)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def tick_step(low: float, high: float, most: int = 4) -> float:
    """Return a round distance between ticks.

    Example:
        >>> tick_step(0.0, 1.0), tick_step(0, 250)
        (0.25, 100.0)
    """
    width = (high - low) / most
    power = 10.0 ** math.floor(math.log10(width))
    return next(power * x for x in (1, 2, 2.5, 5, 10) if power * x >= width * (1 - 1e-9))


def format_number(value: float) -> str:
    """Format a number for a table cell.

    Example:
        >>> [format_number(x) for x in (0.25, 12000, 3e-7, 0.0, 2500000)]
        ['0.25', '12,000', '3e-07', '0', '2.5e+06']
    """
    if value == int(value) and abs(value) < MAX_WHOLE:
        return f"{int(value):,}"
    return f"{value:.3g}" if MIN_FIXED <= abs(value) < MAX_FIXED else f"{value:.2g}"


def label_ticks(ticks: Sequence[float]) -> list[str]:
    """Write ticks with all their digits; with exponents if one would not fit beside the axis."""
    # Six digits leave out what rounding adds to a multiple of a step.
    labels = [f"{x:,.0f}" if x == int(x) and abs(x) < MAX_WHOLE else f"{x:.6g}" for x in ticks]
    if all("e" not in label and len(label) <= MAX_TICK_CHARS for label in labels):
        return labels
    parts = [f"{x:.5e}".split("e") for x in ticks]
    return [f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}" for digits, exponent in parts]


def _table(curves: Sequence[Curve]) -> list[list[str]]:
    """Return the values of each curve at a few iterations."""
    steps = sorted({int(step) for curve in curves for step, _ in curve.points})
    count = min(TABLE_ROWS, len(steps))
    table_steps = [steps[round(n * (len(steps) - 1) / max(1, count - 1))] for n in range(count)]
    values = [dict(curve.points) for curve in curves]
    return [
        [
            f"{step:,}",
            *(
                format_number(curve_values[step]) if step in curve_values else ""
                for curve_values in values
            ),
        ]
        for step in table_steps
    ]
