"""Read everything that the HTML report shows of a run folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from litgrpo.arguments import require
from litgrpo.callbacks.evaluation_files import FOLDER
from litgrpo.callbacks.files import read_text
from litgrpo.callbacks.run_folder import COMMAND, CONFIG
from litgrpo.text.secrets import mask_known, mask_settings
from litgrpo.tools.doctor.run import RunConfig
from litgrpo.tools.run_folder import (
    AUDIT,
    METRICS,
    SUMMARY,
    Row,
    read_json_lines,
    read_metrics,
    read_yaml,
)

Points = list[tuple[int, float]]  # (iteration, value)
MAX_EVALUATIONS = 5  # shown side by side
EVALUATION_FIELDS = {"index", "prompt", "samples"}


@dataclass(frozen=True)
class RunFiles:
    """Files of a run folder; fields are empty where a file is missing.

    Args:
        name: name of the folder.
        config: the config with all defaults.
        config_text: text of `config.yaml`.
        command: shell command that started the run; "" if not known.
        series: {metric: finite values}.
        summary: content of `summary.json`, written when a run ends.
        evaluations: {iteration: rows of held-out prompts}, at most five, with the first and last.
        evaluated: iterations of all evaluations.
        audit: content of `RUN/audit.json`, written by `audit --report`.
        notes: sentences about files that could not be read.

    Example:
        >>> run = RunFiles(
        ...     name="quickstart",
        ...     command="python cli.py fit -c configs/quickstart.yaml",
        ...     series={"reward/mean": [(1, 0.4), (2, 0.5)], "val/avg@4": [(0, 0.42)]},
        ...     evaluations={0: [{"index": 0, "prompt": "1+1?", "samples": [{"completion": "2"}]}]},
        ... )
        >>> run.iterations
        2
    """

    name: str
    config: RunConfig = field(default_factory=RunConfig)
    config_text: str = ""
    command: str = ""
    series: dict[str, Points] = field(default_factory=dict)
    summary: Row = field(default_factory=dict)
    evaluations: dict[int, list[Row]] = field(default_factory=dict)
    evaluated: tuple[int, ...] = ()
    audit: Row = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def iterations(self) -> int:
        """Finished iterations."""
        trained = [x for name, x in self.series.items() if not name.startswith("val/")]
        return max((points[-1][0] for points in trained if points), default=0)

    @property
    def folder(self) -> str:
        """The run folder as the config names it."""
        return str(self.config.get("run_dir") or f"runs/{self.name}")

    def first_and_last_evaluation(self) -> tuple[list[Row], list[Row]]:
        """Return the rows of the first and of the last evaluation; empty lists without one."""
        if not self.evaluations:
            return [], []
        return self.evaluations[min(self.evaluations)], self.evaluations[max(self.evaluations)]


def read_run_files(folder: str | Path) -> RunFiles:
    """Read a run folder.

    Args:
        folder: of a run that ended, is running, or was killed.

    Raises:
        ValueError: there is no such folder.
    """
    given = Path(folder)
    require(given.is_dir(), f"there is no run folder {given}; a run writes to runs/<recipe>")
    notes: list[str] = []
    config_text = read_text(given / CONFIG)
    series, num_lost = _finite_series(given / METRICS)
    if num_lost:
        notes.append(f"{num_lost} logged values are not finite; curves leave them out.")
    files = _evaluation_files(given / FOLDER)
    evaluations = {}
    for iteration in spread(sorted(files), MAX_EVALUATIONS):
        rows, num_broken = _evaluation_rows(files[iteration])
        if num_broken:
            name = files[iteration].name
            notes.append(f"{name}: {num_broken} lines could not be read.")
        if rows:
            evaluations[iteration] = rows
    try:
        # Someone may have written keys into the file by hand; the page is to be shared.
        values = mask_settings(read_yaml(given / CONFIG))
        config_text = mask_known(config_text)
    except ValueError:
        values = {}
        notes.append(f"{CONFIG} is not valid YAML and was ignored.")
    return RunFiles(
        given.resolve().name,
        RunConfig(values, str(given / CONFIG)),
        config_text,
        _start_command(config_text),
        series,
        _read_json(given / SUMMARY, notes),
        evaluations,
        tuple(sorted(files)),
        _read_json(given / AUDIT, notes),
        tuple(notes),
    )


def _finite_series(path: Path) -> tuple[dict[str, Points], int]:
    """Return the finite values of a `metrics.csv`, and how many others there were."""
    series, num_lost = {}, 0
    for name, values in sorted(read_metrics(path).items()):
        points = [(step, x) for step, x in sorted(values.items()) if math.isfinite(x)]
        num_lost += len(values) - len(points)
        if points:
            series[name] = points
    return series, num_lost


def _evaluation_files(folder: Path) -> dict[int, Path]:
    names = {path.stem.removeprefix("iteration-"): path for path in folder.glob("*.jsonl")}
    return {int(name): path for name, path in names.items() if name.isdecimal()}


def _evaluation_rows(path: Path) -> tuple[list[Row], int]:
    """Return the complete rows of an evaluation, and how many lines are not one."""
    rows, num_broken = read_json_lines(path)
    complete = [row for row in rows if row.keys() >= EVALUATION_FIELDS]
    num_broken += len(rows) - len(complete)
    return [row for row in complete if _has_completions(row)], num_broken


def _has_completions(row: Row) -> bool:
    samples = row["samples"]
    if not isinstance(samples, list) or not samples or not isinstance(row["index"], int):
        return False
    return all(isinstance(sample, dict) and "completion" in sample for sample in samples)


def _start_command(config_text: str) -> str:
    """Return the shell command that `config.yaml` has in its second line."""
    for line in config_text.splitlines()[1:2]:
        if COMMAND in line:
            return line.removeprefix(COMMAND).strip()
    return ""


def _read_json(path: Path, notes: list[str]) -> Row:
    try:
        content = json.loads(read_text(path) or "{}")
    except (ValueError, RecursionError):
        notes.append(f"{path.name} is not valid JSON and was ignored.")
        return {}
    return content if isinstance(content, dict) else {}


def spread(values: Sequence[int], most: int) -> list[int]:
    """Pick at most `most` values, evenly spread, with the first and the last.

    Example:
        >>> spread([0, 10, 20, 30, 40, 50, 60], 3), spread([1, 2], 5)
        ([0, 30, 60], [1, 2])
    """
    if len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def finite_numbers(values: Iterable[Any]) -> list[float]:
    """Pick the finite numbers of some values.

    Example:
        >>> finite_numbers([1, None, "a", 0.5, float("nan")])
        [1.0, 0.5]
    """
    numbers = [float(x) for x in values if isinstance(x, int | float)]
    return [x for x in numbers if math.isfinite(x)]
