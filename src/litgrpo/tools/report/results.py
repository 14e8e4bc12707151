"""What a run changed on held-out prompts, how sure that is, and how two runs differ."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

from litgrpo.callbacks.number_texts import BOUNDS, digits, signed
from litgrpo.evaluation.intervals import paired_difference
from litgrpo.evaluation.paired import Comparison, compared
from litgrpo.tools.report.run_files import Row, RunFiles, known_floats

LEVEL = 0.05  # the customary one
NEARLY_NEVER = 1e-4
DECIDING = r"val/(.+/)?(avg@\d+|loss)"
ACCURACY, REWARD, GREEDY = "avg@k", "reward", "greedy"
IN_WORDS = {ACCURACY: "accuracy", GREEDY: "accuracy of the most likely completions"}
OfPrompts = dict[str, list[float]]


@dataclass(frozen=True)
class Pair:
    """Two evaluations of the same prompts.

    Args:
        set_name: of the prompts; "" where there is only one set.
        count: prompts that both answered.
        before: {number: its mean over these}.
        after: the same of the later one, or of the other run.
        comparison: differences with their bootstrap intervals; solved prompts.
        p_values: {number: Student's t of the differences}.
        decides: the number of the verdict: share of right samples, or the reward if none is right.
    """

    set_name: str
    count: int
    before: dict[str, float]
    after: dict[str, float]
    comparison: Comparison
    p_values: dict[str, float]
    decides: str

    @property
    def way(self) -> str:
        """Up, down, or none that is shown."""
        change, p_value = self.comparison.changes[self.decides], self.p_values[self.decides]
        shown = p_value < LEVEL and (change.low > 0 or change.high < 0)
        return ("up" if change.mean > 0 else "down") if shown else "none"

    @property
    def rows(self) -> list[list[str]]:
        """A line of cells for each number: before, after, difference with interval, p."""
        changes = self.comparison.changes
        return [
            [
                name,
                digits(self.before[name]),
                digits(self.after[name]),
                with_interval(change.mean, change.low, change.high),
                p_text(self.p_values[name]),
            ]
            for name, change in changes.items()
        ]


def with_interval(mean: float, low: float, high: float) -> str:
    """A difference with its interval.

    Example:
        >>> with_interval(0.5, 0.25, 0.75), with_interval(0.5, nan, nan)
        ('+0.500 [+0.250, +0.750]', '+0.500')
    """
    return signed(mean) + (f" [{signed(low)}, {signed(high)}]" if math.isfinite(low) else "")


def p_text(p_value: float) -> str:
    """A p-value as it is read.

    Example:
        >>> p_text(0.04), p_text(0.0), p_text(nan)
        ('0.04', 'below 0.0001', 'unknown')
    """
    if math.isnan(p_value):
        return "unknown"
    return f"{p_value:.2g}" if p_value >= NEARLY_NEVER else f"below {NEARLY_NEVER:.4f}"


def by_prompt(rows: Sequence[Row]) -> OfPrompts:
    """{number: one value for each prompt} of an evaluation, with `index`; NaN where unknown."""
    parts = {name for row in rows for name in row["samples"][0].get("rewards", {})}
    found: OfPrompts = {"index": [float(row["index"]) for row in rows]}
    found[ACCURACY] = [mean_of([each.get("right") for each in row["samples"]]) for row in rows]
    found[REWARD] = [mean_of([row.get("reward")]) for row in rows]
    found |= {
        f"part {name}": [
            mean_of([each.get("rewards", {}).get(name) for each in row["samples"]]) for row in rows
        ]
        for name in sorted(parts)
    }
    if any(row.get("greedy") for row in rows):
        found[GREEDY] = [mean_of([(row.get("greedy") or {}).get("right")]) for row in rows]
    return found


def mean_of(values: Sequence[object]) -> float:
    """Mean of the numbers among these; NaN without one."""
    known = known_floats(values)
    return sum(known) / len(known) if known else nan


def pairs(before: Sequence[Row], after: Sequence[Row]) -> list[Pair]:
    """What differs between two evaluations, for each set of prompts that they share.

    Prompts count as the same if number and text agree.

    Args:
        before: rows of one evaluation.
        after: rows of another one.
    """
    texts = {_place(row): row["prompt"] for row in before}
    shared = {_place(row) for row in after if texts.get(_place(row)) == row["prompt"]}
    found = []
    for name in sorted({place[0] for place in shared}):
        old, new = (
            sorted(
                (row for row in rows if _place(row) in shared and _place(row)[0] == name),
                key=lambda row: int(row["index"]),
            )
            for rows in (before, after)
        )
        found.append(_pair(name, by_prompt(old), by_prompt(new)))
    return found


def _place(row: Row) -> tuple[str, int]:
    return str(row.get("set", "")), int(row["index"])


def _pair(name: str, old: OfPrompts, new: OfPrompts) -> Pair:
    comparison = compared(old, new)
    assert comparison is not None
    known = [number for number in comparison.changes if number in old]
    right = [mean_of(each[ACCURACY]) for each in (old, new)]
    decides = ACCURACY if ACCURACY in known and any(right) else REWARD
    return Pair(
        name,
        len(old["index"]),
        {number: mean_of(old[number]) for number in known},
        {number: mean_of(new[number]) for number in known},
        comparison,
        {number: _t_test(old[number], new[number]) for number in known},
        decides if decides in known else known[0],
    )


def _t_test(old: Sequence[float], new: Sequence[float]) -> float:
    both = [each for each in zip(old, new, strict=True) if math.isfinite(sum(each))]
    before, after = [was for was, _ in both], [now for _, now in both]
    return paired_difference(before, after).p_value if len(both) > 1 else nan


def of_run(run: RunFiles) -> list[Pair]:
    """First against last evaluation; nothing where there are not two."""
    numbers = sorted(run.evaluations)
    if len(numbers) <= 1:
        return []
    return pairs(run.evaluations[numbers[0]], run.evaluations[numbers[-1]])


WORDS = {"up": "rose", "down": "fell", "none": "did not change measurably"}


def verdict(run: RunFiles, found: Sequence[Pair]) -> str:
    """One sentence about what the run did.

    Args:
        run: the run.
        found: its first evaluation against its last one.
    """
    ended = "" if run.summary else f" It goes on or was stopped: {progress(run)}, no summary."
    if not found:
        return _without_pairs(run) + ended
    first = found[0]
    number = first.decides
    change, name = first.comparison.changes[number], IN_WORDS.get(number, number)
    of_set = f" on {first.set_name}" if first.set_name else ""
    interval = f"95 % interval {signed(change.low)} to {signed(change.high)}, "
    return (
        f"Held-out {name}{of_set} {WORDS[first.way]}: {digits(first.before[number])} before, "
        f"{digits(first.after[number])} after ({signed(change.mean)}, "
        f"{interval if math.isfinite(change.low) else ''}paired p "
        f"{p_text(first.p_values[number])}, {first.count:,} prompts).{ended}"
    )


def _without_pairs(run: RunFiles) -> str:
    for name in filter(re.compile(DECIDING).fullmatch, run.series):
        old, new = _logged(run, name, 0), _logged(run, name, -1)
        if len(run.series[name]) > 1:
            return f"{name}: {old} before, {new} after; single prompts were not kept to pair them."
    told = {
        0: "Nothing is known about held-out prompts: the folder holds no evaluation.",
        1: "What changed is not known: the folder holds one evaluation of held-out prompts.",
    }
    return told.get(len(run.evaluations), told[0])


def progress(run: RunFiles) -> str:
    """How far it got."""
    asked = run.setting("model.init_args.max_iterations")
    of_all = f" of {asked:,}" if isinstance(asked, int) else ""
    return f"{run.iterations:,}{of_all} iterations"


def held_out(run: RunFiles) -> list[list[str]]:
    """Every held-out number, first and last, with its interval as it was logged."""
    names = [n for n in run.series if n.startswith("val/") and not n.endswith(BOUNDS)]
    return [
        [name, *(_logged(run, name, place) for place in (0, -1)), f"{len(run.series[name])}"]
        for name in names
    ]


def _logged(run: RunFiles, name: str, place: int) -> str:
    step, value = run.series[name][place]
    bounds = [dict(run.series.get(name + end, ())).get(step) for end in BOUNDS]
    ends = ", ".join(digits(each) for each in bounds if each is not None)
    return digits(value) + (f" [{ends}]" if ends else "")


def against_first(runs: Sequence[RunFiles]) -> list[tuple[str, list[Pair]]]:
    """Last evaluations of the other runs, each paired with that of the first.

    Args:
        runs: two or more.
    """
    first, *others = (
        run.evaluations[max(run.evaluations, default=-1)] if run.evaluations else [] for run in runs
    )
    return [(run.name, pairs(first, rows)) for run, rows in zip(runs[1:], others, strict=True)]
