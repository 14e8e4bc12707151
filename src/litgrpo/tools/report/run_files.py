"""What a run left in its folder, as far as it got."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from litgrpo.arguments import require
from litgrpo.callbacks.evaluation_files import FOLDER
from litgrpo.callbacks.run_folder import COMMAND, CONFIG

Row = dict[str, Any]
Series = dict[str, list[tuple[int, float]]]  # {name of a number: (iteration, value), finite ones}
COLUMNS = 5  # evaluations that are shown beside each other
AUDIT, METRICS, SUMMARY = "audit.json", "metrics.csv", "summary.json"
WHAT_AN_EVALUATION_HAS = {"index", "prompt", "samples"}
WHAT_A_SAMPLE_HAS = {"prompt", "completion"}


@dataclass(frozen=True)
class RunFiles:
    """A run, as its folder tells it; what is not there is empty.

    Args:
        name: of the folder.
        config: the recipe with all defaults.
        config_text: the same as it was written.
        command: what was typed to start it; "" where that is not known.
        series: every logged number.
        summary: what is written when a run ends.
        evaluations: {iteration: rows of held-out prompts}, at most five, the first and last too.
        evaluated: iterations of all evaluations.
        audit: what `audit --report RUN/audit.json` wrote.
        notes: what could not be read, a sentence each.
    """

    name: str
    config: Row = field(default_factory=dict)
    config_text: str = ""
    command: str = ""
    series: Series = field(default_factory=dict)
    summary: Row = field(default_factory=dict)
    evaluations: dict[int, list[Row]] = field(default_factory=dict)
    evaluated: tuple[int, ...] = ()
    audit: Row = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def iterations(self) -> int:
        """How many were finished."""
        trained = [x for name, x in self.series.items() if not name.startswith("val/")]
        return max((points[-1][0] for points in trained if points), default=0)

    def setting(self, key: str) -> Any:
        """The value of a dotted key of the recipe; None where there is none.

        Example:
            >>> RunFiles("a", {"model": {"init_args": {"group_size": 8}}}).setting(
            ...     "model.init_args.group_size"
            ... )
            8
        """
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def read(folder: str | Path) -> RunFiles:
    """Read a run folder, whatever state it is in.

    Args:
        folder: of a run that ended, goes on, or was killed.

    Raises:
        ValueError: there is no such folder.
    """
    given = Path(folder)
    require(given.is_dir(), f"there is no run folder {given}; a run writes to runs/<recipe>")
    notes: list[str] = []
    config_text = _text(given / CONFIG)
    first = config_text.splitlines()[1:2]
    numbers = _evaluations(given / FOLDER)
    shown = spread(sorted(numbers), COLUMNS)
    rows = {n: whole_rows(numbers[n], WHAT_AN_EVALUATION_HAS, notes) for n in shown}
    return RunFiles(
        given.resolve().name,
        _parsed(given / CONFIG, yaml.safe_load, notes),
        config_text,
        next((line.removeprefix(COMMAND).strip() for line in first if COMMAND in line), ""),
        series_of(given / METRICS, notes),
        _parsed(given / SUMMARY, json.loads, notes),
        {n: [row for row in each if _has_samples(row)] for n, each in rows.items() if each},
        tuple(sorted(numbers)),
        _parsed(given / AUDIT, json.loads, notes),
        tuple(notes),
    )


def spread(values: Sequence[int], most: int) -> list[int]:
    """At most so many of the values, evenly spread, the first and the last among them.

    Example:
        >>> spread([0, 10, 20, 30, 40, 50, 60], 3), spread([1, 2], 5)
        ([0, 30, 60], [1, 2])
    """
    if len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def series_of(path: Path, notes: list[str]) -> Series:
    """Every number of a `metrics.csv` that is finite.

    A last line without its line break was cut by a kill and is left out; of an iteration that was
    logged twice, after a resume, the later line counts.

    Args:
        path: of the file; none gives no numbers.
        notes: gets a sentence where numbers are not finite.
    """
    lines = _text(path).replace("\0", "").split("\n")[:-1]
    head, *rows = list(csv.reader(lines)) or [[]]
    found: dict[str, dict[int, float]] = {}
    lost = 0
    for row in rows:
        numbers = {name: _number(x) for name, x in zip(head, row, strict=False) if x}
        step = numbers.pop("step", None)
        known = {} if step is None or not math.isfinite(step) else numbers
        for name, value in known.items():
            lost += value is None or not math.isfinite(value)
            if value is not None and math.isfinite(value):
                found.setdefault(name, {})[int(step or 0)] = value
    notes += [f"{lost} logged numbers are not finite; curves leave them out."] * bool(lost)
    return {name: sorted(points.items()) for name, points in sorted(found.items())}


def whole_rows(path: Path, needed: set[str], notes: list[str]) -> list[Row]:
    """The objects of a file of JSON lines that have these keys; others are counted in a note.

    Args:
        path: of the file.
        needed: keys.
        notes: gets a sentence where lines are left out.
    """
    lines = [line for line in _text(path).split("\n") if line.strip()]
    rows = [row for row in map(_json_line, lines) if needed <= row.keys()]
    left = len(lines) - len(rows)
    notes += [f"{path.name}: {left} of {len(lines)} lines could not be read."] * bool(left)
    return rows


def _evaluations(folder: Path) -> dict[int, Path]:
    named = [(path.stem.removeprefix("iteration-"), path) for path in folder.glob("*.jsonl")]
    return {int(number): path for number, path in named if number.isdecimal()}


def _has_samples(row: Row) -> bool:
    samples = row["samples"]
    known = isinstance(samples, list) and isinstance(row["index"], int) and bool(samples)
    return known and all(isinstance(each, dict) and "completion" in each for each in samples)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _json_line(line: str) -> Row:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _parsed(path: Path, parse: Callable[[str], Any], notes: list[str]) -> Row:
    try:
        content = parse(_text(path) or "{}")
    except (ValueError, yaml.YAMLError, RecursionError):
        notes.append(f"{path.name} is damaged and was left out.")
        return {}
    return content if isinstance(content, dict) else {}


def known_floats(values: Iterable[Any]) -> list[float]:
    """The finite numbers among some values.

    Example:
        >>> known_floats([1, None, "a", 0.5, float("nan")])
        [1.0, 0.5]
    """
    numbers = [float(x) for x in values if isinstance(x, int | float)]
    return [x for x in numbers if math.isfinite(x)]
