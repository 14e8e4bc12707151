"""Write what a run achieved on held-out prompts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from litgrpo.callbacks.formatting import BOUNDS, format_change, format_number
from litgrpo.runs.pairing import (
    ACCURACY,
    GREEDY,
    PairedEvaluation,
    format_p_value,
    note_on_redefined,
    pair_evaluations,
)
from litgrpo.runs.run import Run
from litgrpo.text.tables import plural

# Logged metric that is used for the verdict if there are no evaluation files.
MAIN_METRIC = re.compile(r"val/(.+/)?(avg@\d+|loss)")
DIRECTIONS = {"up": "rose", "down": "fell", "none": "did not change significantly"}


def compare_first_and_last(run: Run) -> list[PairedEvaluation]:
    """Pair the first with the last evaluation of a run; nothing if it has only one."""
    evaluations = list(run.evaluations.values())
    return pair_evaluations(evaluations[0], evaluations[-1]) if len(evaluations) > 1 else []


def compare_with_first_run(runs: Sequence[Run]) -> list[tuple[str, list[PairedEvaluation], str]]:
    """Pair the last evaluation of each other run with that of the first run.

    Returns:
        Name, paired evaluations, and a note on what is not compared, of each other run.
    """
    (_, first), *others = [(run.name, [[], *run.evaluations.values()][-1]) for run in runs]
    return [
        (name, pair_evaluations(first, rows), note_on_redefined(first, rows))
        for name, rows in others
    ]


def write_verdict(run: Run, pairs: Sequence[PairedEvaluation]) -> str:
    """Write one sentence with the result of a run."""
    unfinished = ""
    if not run.summary:
        unfinished = f" The run has not finished: {_progress(run)}, no summary."
    evaluations = list(run.evaluations.values())
    note = note_on_redefined(evaluations[0], evaluations[-1]) if evaluations else ""
    if not pairs:
        return (note or _verdict_from_metrics(run)) + unfinished
    notes = f" {note}{unfinished}" if note else unfinished
    pair = pairs[0]
    metric = pair.main_metric
    change = pair.comparison.changes[metric]
    name = metric
    if metric.startswith(ACCURACY) or metric == GREEDY:
        name = "greedy accuracy" if metric == GREEDY else "accuracy"
        name += f" ({run.config.success_rule})" if run.config.success_rule else ""
    on_set = f" on {pair.set_name}" if pair.set_name else ""
    interval = ""
    if math.isfinite(change.low):
        interval = f"95 % interval {format_change(change.low)} to {format_change(change.high)}, "
    verdict = DIRECTIONS.get(pair.direction, f"({plural(pair.count, 'prompt')}: too few to decide)")
    return (
        f"Held-out {name}{on_set} {verdict}: "
        f"{format_number(pair.before[metric])} before, {format_number(pair.after[metric])} after "
        f"({format_change(change.mean)}, {interval}paired p "
        f"{format_p_value(pair.p_values[metric])}, {pair.count:,} prompts).{notes}"
    )


def _verdict_from_metrics(run: Run) -> str:
    for name in run.names:
        if MAIN_METRIC.fullmatch(name) and len(run[name]) > 1:
            before, after = _format_logged(run, name, 0), _format_logged(run, name, -1)
            what = f"Held-out loss ({name})"
            note = ""
            if not name.endswith("loss"):
                what, note = f"Held-out accuracy ({name})", "; not paired: no evaluation files"
            return f"{what}: {before} before, {after} after{note}."
    if len(run.evaluations) == 1:
        return "The change is unknown: the folder has one evaluation of held-out prompts."
    return "The result is unknown: the folder has no evaluation of held-out prompts."


def _progress(run: Run) -> str:
    planned = run.config.get("model.max_iterations")
    if isinstance(planned, int):
        return f"{run.iterations:,} of {planned:,} iterations"
    return plural(run.iterations, "iteration")


def held_out_metrics(run: Run) -> list[list[str]]:
    """Return table cells for each held-out metric: name, first, last, number of evaluations."""
    names = [n for n in run.names if n.startswith("val/") and not n.endswith(BOUNDS)]
    return [
        [name, _format_logged(run, name, 0), _format_logged(run, name, -1), f"{len(run[name])}"]
        for name in names
    ]


def _format_logged(run: Run, name: str, position: int) -> str:
    """Format a logged value with its interval."""
    step, value = run[name].index[position], run[name].iloc[position]
    bounds = [run[name + end].get(step) for end in BOUNDS]
    ends = ", ".join(format_number(bound) for bound in bounds if bound is not None)
    return format_number(value) + (f" [{ends}]" if ends else "")
