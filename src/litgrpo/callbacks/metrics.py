"""Definition, unit, healthy range, and TRL's and verl's name of every logged metric.

They are in `litgrpo/assets/metrics.csv`, one line per metric. `python -m tests.tables` writes them
to docs/reference/metrics.md; TensorBoard and the HTML report cite them.
"""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

# {placeholder in a name of the table: expression}. <part> is the name of a reward function, <name>
# of a tool, <k> a number, <task> the name of a task, <set> of a validation set, which is left out
# if there is only one.
PLACEHOLDERS = {
    "<part>": r"[^/]+?",
    "<name>": r"[^/]+?",
    "<k>": r"\d+",
    "<set>/": r"(?:[^/]+/)?",
    "<task>": r".+?",
}
BOUND = r"(?:_low|_high)?"  # of an interval


class Metric(NamedTuple):
    """A row of the table, without the name."""

    definition: str
    unit: str
    healthy: str  # typical value of a run that learns; "" if it is not informative
    trl: str  # name in TRL's `trainer_state.json`; "" if TRL has no equal metric
    verl: str  # name in verl's console log; "" if verl has no equal metric


def _read_table() -> dict[str, Metric]:
    path = Path(__file__).parents[1] / "assets" / "metrics.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return {row.pop("name"): Metric(**row) for row in csv.DictReader(file)}


# `test/` metrics are defined as those of `val/`.
METRICS = _read_table()


def _names_in(trainer: str) -> dict[str, str]:
    """{name in another trainer's log: litgrpo's}, for names without placeholders."""
    names = {getattr(metric, trainer): name for name, metric in METRICS.items()}
    return {"step": "step"} | {
        other: name for other, name in names.items() if other and "<" not in other
    }


TRL, VERL = _names_in("trl"), _names_in("verl")


@cache
def patterns() -> dict[str, re.Pattern[str]]:
    """{name in the table: expression of the logged names that it defines}."""
    compiled = {}
    for name in METRICS:
        text = re.escape(name)
        for placeholder, expression in PLACEHOLDERS.items():
            text = text.replace(re.escape(placeholder), expression)
        compiled[name] = re.compile(text + BOUND if name.startswith("val/") else text)
    return compiled


@cache
def find_entry(name: str) -> str:
    """Name of the table's row that defines a logged metric; "" if there is none."""
    val_name = re.sub("^test/", "val/", name)
    matches = [row for row, pattern in patterns().items() if pattern.fullmatch(val_name)]
    # The most specific one: reward/mean is not a component called mean.
    return min(matches, key=lambda row: ("<part>" in row, -len(row)), default="")


def definition(name: str) -> str:
    """Definition of a logged metric; "" if the table does not have it."""
    entry = find_entry(name)
    return METRICS[entry].definition if entry else ""
