"""Compare evaluations of the same held-out prompts, of one run or of two, and write the verdict."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Literal

from litgrpo.callbacks.formatting import BOUNDS, format_change, format_number
from litgrpo.evaluation.intervals import (
    FEW_PROMPTS,
    Comparison,
    compare_evaluations,
    compute_paired_difference,
)
from litgrpo.text.counts import plural
from litgrpo.tools.report.run_files import RunFiles, finite_numbers
from litgrpo.tools.run_folder import Row

SIGNIFICANCE = 0.05
MIN_P_VALUE = 1e-4  # smaller ones are printed as "below"
ACCURACY, REWARD, GREEDY = "avg@k", "reward", "greedy"
LONG_NAMES = {ACCURACY: "accuracy", GREEDY: "greedy accuracy"}
# Logged metric that is used for the verdict if there are no evaluation files.
MAIN_METRIC = re.compile(r"val/(.+/)?(avg@\d+|loss)")
PerPromptValues = dict[str, list[float]]  # {metric: one value per prompt}
Direction = Literal["up", "down", "none", "few"]


@dataclass(frozen=True)
class PairedEvaluation:
    """Two evaluations of the same prompts.

    Args:
        set_name: name of the set of prompts; "" if there is only one.
        count: prompts for which both evaluations have the main metric.
        before: {metric: mean of the earlier evaluation, or of the first run}.
        after: {metric: mean of the later evaluation, or of the other run}.
        comparison: differences with bootstrap intervals, and solved prompts.
        p_values: {metric: p-value of the paired t-test}.
        main_metric: metric of the verdict: accuracy, or the reward if no sample is correct.

    Example:
        >>> rows = [
        ...     {"index": n, "prompt": f"{n}+1?", "reward": x, "samples": [{"correct": x > 0.5}]}
        ...     for n, x in enumerate([0.0, 1.0] + 18 * [0.0])
        ... ]
        >>> solved = [row | {"reward": 1.0, "samples": [{"correct": True}]} for row in rows]
        >>> (pair,) = pair_evaluations(rows, solved)
        >>> pair.count, pair.before["avg@k"], pair.after["avg@k"], pair.direction
        (20, 0.05, 1.0, 'up')
    """

    set_name: str
    count: int
    before: dict[str, float]
    after: dict[str, float]
    comparison: Comparison
    p_values: dict[str, float]
    main_metric: str

    @property
    def direction(self) -> Direction:
        """Significant change of the main metric; "few": too few prompts to call it one."""
        if self.count < FEW_PROMPTS:
            return "few"
        change = self.comparison.changes[self.main_metric]
        excludes_zero = change.low > 0 or change.high < 0
        if not excludes_zero or not self.p_values[self.main_metric] < SIGNIFICANCE:
            return "none"
        return "up" if change.mean > 0 else "down"

    @property
    def rows(self) -> list[list[str]]:
        """Table cells: metric, before, after, difference with interval, p-value."""
        return [
            [
                name,
                format_number(self.before[name]),
                format_number(self.after[name]),
                format_interval(change.mean, change.low, change.high),
                format_p_value(self.p_values[name]),
            ]
            for name, change in self.comparison.changes.items()
        ]


def format_interval(mean: float, low: float, high: float) -> str:
    """Format a difference with its interval.

    Example:
        >>> format_interval(0.5, 0.25, 0.75), format_interval(0.5, nan, nan)
        ('+0.500 [+0.250, +0.750]', '+0.500')
    """
    interval = f" [{format_change(low)}, {format_change(high)}]" if math.isfinite(low) else ""
    return format_change(mean) + interval


def format_p_value(p_value: float) -> str:
    """Format a p-value.

    Example:
        >>> format_p_value(0.04), format_p_value(0.0), format_p_value(nan)
        ('0.04', 'below 0.0001', 'unknown')
    """
    if math.isnan(p_value):
        return "unknown"
    return f"{p_value:.2g}" if p_value >= MIN_P_VALUE else f"below {MIN_P_VALUE:.4f}"


def prompt_key(row: Row) -> tuple[str, int]:
    """Return the identity of a held-out prompt: its set and its index."""
    return str(row.get("set", "")), int(row["index"])


def pair_evaluations(before: Sequence[Row], after: Sequence[Row]) -> list[PairedEvaluation]:
    """Pair two evaluations, separately for each set of prompts.

    A prompt is the same if its text agrees; the n-th of several equal texts is paired with the
    n-th. Row numbers do not count: a run may hold out a part of the prompts, or shuffle them. Sets
    are compared by name, unless the evaluations share none.

    Args:
        before: rows of one evaluation.
        after: rows of the other.
    """
    names = [{prompt_key(row)[0] for row in rows} for rows in (before, after)]
    by_set = bool(names[0] & names[1])
    old, new = (_rows_by_text(rows, by_set) for rows in (before, after))
    shared = [key for key in new if key in old]
    pairs = [
        _pair_set(
            name,
            per_prompt_values([old[key] for key in shared if key[0] == name]),
            per_prompt_values([new[key] for key in shared if key[0] == name]),
        )
        for name in sorted({key[0] for key in shared})
    ]
    return [pair for pair in pairs if pair is not None]


def _rows_by_text(rows: Sequence[Row], by_set: bool) -> dict[tuple[str, str, int], Row]:
    """Return {(set, text of the prompt, number among equal texts): row}, in the order of rows."""
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for row in sorted(rows, key=prompt_key):
        text = prompt_key(row)[0] if by_set else "", str(row["prompt"])
        found[*text, seen[text]] = row
        seen[text] += 1
    return found


def per_prompt_values(rows: Sequence[Row]) -> PerPromptValues:
    """Return one value per prompt for each metric of an evaluation; NaN if it is unknown.

    The prompts themselves are under `index`.
    """
    values: PerPromptValues = {"index": [float(row["index"]) for row in rows]}
    values[ACCURACY] = [_mean([s.get("correct") for s in row["samples"]]) for row in rows]
    values[REWARD] = [_mean([row.get("reward")]) for row in rows]
    components = {name for row in rows for name in row["samples"][0].get("rewards", {})}
    for name in sorted(components):
        values[f"component {name}"] = [
            _mean([s.get("rewards", {}).get(name) for s in row["samples"]]) for row in rows
        ]
    if any(row.get("greedy") for row in rows):
        values[GREEDY] = [_mean([(row.get("greedy") or {}).get("correct")]) for row in rows]
    return values


def _mean(values: Sequence[object]) -> float:
    """Return the mean of the numbers among some values; NaN without one."""
    known = finite_numbers(values)
    return sum(known) / len(known) if known else nan


def _pair_set(name: str, old: PerPromptValues, new: PerPromptValues) -> PairedEvaluation | None:
    """Pair a set of prompts; None if no completion was scored in both evaluations."""
    # Rows are in the same order; the two runs may number a prompt differently.
    comparison = compare_evaluations(old | {"index": new["index"]}, new)
    assert comparison is not None
    metrics = [metric for metric in comparison.changes if metric in old]
    if not metrics:
        return None
    if ACCURACY in metrics and any(finite_numbers([*old[ACCURACY], *new[ACCURACY]])):
        main_metric = ACCURACY
    elif REWARD in metrics:
        main_metric = REWARD
    else:
        main_metric = metrics[0]
    return PairedEvaluation(
        name,
        len(_known_pairs(old[main_metric], new[main_metric])),
        {metric: _mean(old[metric]) for metric in metrics},
        {metric: _mean(new[metric]) for metric in metrics},
        comparison,
        {metric: _test_pairs(old[metric], new[metric]) for metric in metrics},
        main_metric,
    )


def _known_pairs(old: Sequence[float], new: Sequence[float]) -> list[tuple[float, float]]:
    return [pair for pair in zip(old, new, strict=True) if math.isfinite(sum(pair))]


def _test_pairs(old: Sequence[float], new: Sequence[float]) -> float:
    both = _known_pairs(old, new)
    if len(both) <= 1:
        return nan
    return compute_paired_difference([was for was, _ in both], [now for _, now in both]).p_value


def compare_first_and_last(run: RunFiles) -> list[PairedEvaluation]:
    """Pair the first with the last evaluation of a run; nothing if it has only one."""
    if len(run.evaluations) <= 1:
        return []
    return pair_evaluations(*run.first_and_last_evaluation())


def compare_with_first_run(
    runs: Sequence[RunFiles],
) -> list[tuple[str, list[PairedEvaluation]]]:
    """Pair the last evaluation of each other run with that of the first run."""
    first, *others = [(run.name, run.first_and_last_evaluation()[1]) for run in runs]
    return [(name, pair_evaluations(first[1], rows)) for name, rows in others]


# --- the verdict ---

DIRECTIONS = {"up": "rose", "down": "fell", "none": "did not change significantly"}


def write_verdict(run: RunFiles, pairs: Sequence[PairedEvaluation]) -> str:
    """Write one sentence with the result of a run.

    Args:
        run: the run.
        pairs: its first evaluation paired with its last one.
    """
    unfinished = ""
    if not run.summary:
        unfinished = f" The run has not finished: {_progress(run)}, no summary."
    if not pairs:
        return _verdict_from_metrics(run) + unfinished
    pair = pairs[0]
    metric = pair.main_metric
    change = pair.comparison.changes[metric]
    name = LONG_NAMES.get(metric, metric)
    if metric in LONG_NAMES and run.config.success_rule:
        name += f" ({run.config.success_rule})"
    on_set = f" on {pair.set_name}" if pair.set_name else ""
    interval = ""
    if math.isfinite(change.low):
        interval = f"95 % interval {format_change(change.low)} to {format_change(change.high)}, "
    verdict = DIRECTIONS.get(pair.direction, f"({plural(pair.count, 'prompt')}: too few to decide)")
    return (
        f"Held-out {name}{on_set} {verdict}: "
        f"{format_number(pair.before[metric])} before, {format_number(pair.after[metric])} after "
        f"({format_change(change.mean)}, {interval}paired p "
        f"{format_p_value(pair.p_values[metric])}, {pair.count:,} prompts).{unfinished}"
    )


def _verdict_from_metrics(run: RunFiles) -> str:
    for name, points in run.series.items():
        if MAIN_METRIC.fullmatch(name) and len(points) > 1:
            before, after = _format_logged(run, name, 0), _format_logged(run, name, -1)
            return (
                f"{name}: {before} before, {after} after; not paired, as there are no "
                "evaluation files."
            )
    if len(run.evaluations) == 1:
        return "The change is unknown: the folder has one evaluation of held-out prompts."
    return "The result is unknown: the folder has no evaluation of held-out prompts."


def _progress(run: RunFiles) -> str:
    planned = run.config.get("model.max_iterations")
    if isinstance(planned, int):
        return f"{run.iterations:,} of {planned:,} iterations"
    return plural(run.iterations, "iteration")


def held_out_metrics(run: RunFiles) -> list[list[str]]:
    """Return table cells for each held-out metric: name, first, last, number of evaluations."""
    names = [n for n in run.series if n.startswith("val/") and not n.endswith(BOUNDS)]
    return [
        [
            name,
            _format_logged(run, name, 0),
            _format_logged(run, name, -1),
            f"{len(run.series[name])}",
        ]
        for name in names
    ]


def _format_logged(run: RunFiles, name: str, place: int) -> str:
    """Format a logged value with its interval."""
    step, value = run.series[name][place]
    bounds = [dict(run.series.get(name + end, ())).get(step) for end in BOUNDS]
    ends = ", ".join(format_number(bound) for bound in bounds if bound is not None)
    return format_number(value) + (f" [{ends}]" if ends else "")
