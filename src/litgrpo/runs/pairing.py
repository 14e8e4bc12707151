"""Pair two evaluations of the same held-out prompts, of one run or of two, and choose prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Literal

from litgrpo.callbacks.formatting import format_change, format_number
from litgrpo.evaluation.intervals import (
    FEW_PROMPTS,
    Comparison,
    compare_evaluations,
    compute_paired_difference,
)
from litgrpo.runs.run import Row, finite_numbers

SIGNIFICANCE = 0.05
MIN_P_VALUE = 1e-4  # smaller ones are printed as "below"
ACCURACY, REWARD, GREEDY = "avg@", "reward", "greedy"
PerPromptValues = dict[str, list[float]]  # {metric: one value per prompt}
PromptKey = tuple[str, str, str, int]  # set, text, answer, number among equal prompts
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
                format_difference(change.mean, change.low, change.high),
                format_p_value(self.p_values[name]),
            ]
            for name, change in self.comparison.changes.items()
        ]


def format_difference(mean: float, low: float, high: float) -> str:
    """Format a difference with its interval.

    Example:
        >>> format_difference(0.5, 0.25, 0.75), format_difference(0.5, nan, nan)
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


def pair_evaluations(before: Sequence[Row], after: Sequence[Row]) -> list[PairedEvaluation]:
    """Pair two evaluations, separately for each set of prompts.

    A prompt is the same if its text and answer agree; the n-th of several equal ones is paired with
    the n-th. Row numbers do not count: a run may hold out a part of the prompts, or shuffle them.
    Sets are compared by name, unless the evaluations share none.

    Args:
        before: rows of one evaluation.
        after: rows of the other.
    """
    pairs = pair_rows(before, after)
    # Samples per prompt name the accuracy, unless the evaluations differ in it.
    sizes = {len(row["samples"]) for pair in pairs for row in pair[1:]}
    accuracy = f"{ACCURACY}{sizes.pop() if len(sizes) == 1 else 'k'}"
    redefined = find_redefined(before, after)
    names = {"index": "index", accuracy: "correct", GREEDY: "correct", REWARD: "reward"}

    def comparable_values(rows: Sequence[Row]) -> PerPromptValues:
        values = per_prompt_values(rows, accuracy)
        return {n: x for n, x in values.items() if names.get(n, f"rewards/{n}") not in redefined}

    paired = [
        _pair_set(
            set_name,
            comparable_values([old for name, old, _ in pairs if name == set_name]),
            comparable_values([new for name, _, new in pairs if name == set_name]),
        )
        for set_name in sorted({name for name, *_ in pairs})
    ]
    return [pair for pair in paired if pair is not None]


def find_redefined(before: Sequence[Row], after: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Return the definitions, earlier and later, of what two evaluations define differently.

    The names are those of `Evaluator.definitions`, which all rows of an evaluation have.
    """
    old, new = ((rows[0].get("definitions") or {}) if rows else {} for rows in (before, after))
    return {
        name: (str(old[name]), str(new[name]))
        for name in old
        if name in new and old[name] != new[name]
    }


def note_on_redefined(before: Sequence[Row], after: Sequence[Row]) -> str:
    """Return a note on what is not compared because its definition changed; "" for nothing."""
    redefined = find_redefined(before, after)
    changes = "; ".join(f"{name} was {old}, now {new}" for name, (old, new) in redefined.items())
    return f"Not compared, because the definition changed: {changes}." if changes else ""


def prompt_key(row: Row) -> tuple[str, int]:
    """Return the identity of a held-out prompt within an evaluation: its set and its index."""
    return str(row.get("set", "")), int(row["index"])


def pair_rows(before: Sequence[Row], after: Sequence[Row]) -> list[tuple[str, Row, Row]]:
    """Return set, earlier and later row of each prompt of both, in the order of the later ones."""
    names = [{str(row.get("set", "")) for row in rows} for rows in (before, after)]
    by_set = bool(names[0] & names[1])
    old, new = (_rows_by_prompt(rows, by_set) for rows in (before, after))
    return [(key[0], old[key], new[key]) for key in new if key in old]


def _rows_by_prompt(rows: Sequence[Row], by_set: bool) -> dict[PromptKey, Row]:
    seen = Counter[tuple[str, str, str]]()
    by_prompt = {}
    for row in sorted(rows, key=prompt_key):
        answer = (row.get("columns") or {}).get("answer")
        key = str(row.get("set", "")) if by_set else "", str(row["prompt"]), repr(answer)
        by_prompt[*key, seen[key]] = row
        seen[key] += 1
    return by_prompt


def per_prompt_values(rows: Sequence[Row], accuracy: str) -> PerPromptValues:
    """Return one value per prompt for each metric of an evaluation; NaN if it is unknown.

    The prompts themselves are under `index`.
    """
    values: PerPromptValues = {"index": [float(row["index"]) for row in rows]}
    values[accuracy] = [_mean([s.get("correct") for s in row["samples"]]) for row in rows]
    if any(row.get("greedy") for row in rows):
        values[GREEDY] = [_mean([(row.get("greedy") or {}).get("correct")]) for row in rows]
    values[REWARD] = [_mean([row.get("reward")]) for row in rows]
    for name in rows[0]["samples"][0].get("rewards", {}) if rows else ():
        values[name] = [
            _mean([s.get("rewards", {}).get(name) for s in row["samples"]]) for row in rows
        ]
    return values


def _mean(values: Sequence[object]) -> float:
    """Return the mean of the numbers among some values; NaN without one."""
    numbers = finite_numbers(values)
    return sum(numbers) / len(numbers) if numbers else nan


def _pair_set(name: str, old: PerPromptValues, new: PerPromptValues) -> PairedEvaluation | None:
    """Pair a set of prompts; None if no completion was scored in both evaluations."""
    # Rows are in the same order; the two evaluations may number a prompt differently.
    comparison = compare_evaluations(old | {"index": new["index"]}, new)
    assert comparison is not None
    metrics = list(comparison.changes)
    if not metrics:
        return None
    accuracy = next((metric for metric in metrics if metric.startswith(ACCURACY)), None)
    if accuracy is not None and any(finite_numbers([*old[accuracy], *new[accuracy]])):
        main_metric = accuracy
    else:
        main_metric = REWARD if REWARD in metrics else metrics[0]
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
    pairs = _known_pairs(old, new)
    if len(pairs) <= 1:
        return nan
    return compute_paired_difference([was for was, _ in pairs], [now for _, now in pairs]).p_value


def choose_prompts(pairs: Sequence[tuple[Row | None, Row]], number: int) -> dict[int, str]:
    """Choose the prompts that show most of what training changed, by their first samples.

    Args:
        pairs: earlier (None: there is none) and later row of each prompt.
        number: how many to choose; a quarter of them may have improved most, and so on.

    Returns:
        {place in `pairs`: reason}, the most informative first.
    """
    samples = [row["samples"][0] for _, row in pairs]
    earlier = [{} if row is None else row["samples"][0] for row, _ in pairs]
    rewards, earlier_rewards = (
        {n: row["reward"] for n, row in enumerate(rows) if finite_numbers([row.get("reward")])}
        for rows in (samples, earlier)
    )
    # Rewards of two definitions show no gain.
    redefined = {
        n for n, (old, new) in enumerate(pairs) if old and "reward" in find_redefined([old], [new])
    }
    known = rewards.keys() & earlier_rewards.keys() - redefined
    gains = {n: rewards[n] - earlier_rewards[n] for n in sorted(known)}
    incorrect = [n for n in rewards if samples[n].get("correct") is False]
    truncated = [n for n, sample in enumerate(samples) if sample.get("truncated")]
    several, some = max(1, number // 4), max(1, number // 6)
    reasons: dict[int, str] = {}
    for reason, most, order in (
        ("most improved", several, {n: -gain for n, gain in gains.items() if gain > 0}),
        ("got worse", several, {n: gain for n, gain in gains.items() if gain < 0}),
        ("incorrect, highest reward", some, {n: -rewards[n] for n in incorrect}),
        ("truncated", some, {n: rewards.get(n, 0.0) for n in truncated}),
    ):
        remaining = [n for n in order if n not in reasons]
        reasons |= dict.fromkeys(sorted(remaining, key=order.__getitem__)[:most], reason)
    remaining = [n for n in range(len(pairs)) if n not in reasons]
    step = max(1, len(remaining) // max(1, number - len(reasons)))
    reasons |= dict.fromkeys(remaining[::step], "one of the others")
    return dict(list(reasons.items())[:number])
