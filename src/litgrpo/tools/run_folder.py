"""Read the files of a run folder; `doctor` and `report` share these functions.

A run may have been killed while it wrote, so a last line without its line break is left out, and
lines that are not complete JSON objects are counted instead of raising.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from litgrpo.callbacks.files import read_text
from litgrpo.text.yaml_limits import check_limits

METRICS, SUMMARY, AUDIT = "metrics.csv", "summary.json", "audit.json"
Row = dict[str, Any]
Columns = dict[str, dict[int, float]]  # {metric: {iteration: value}}


def read_metrics(path: Path) -> Columns:
    """Read a `metrics.csv`.

    Returns:
        {metric: {iteration: value}}; see `columns_of`.
    """
    # NUL bytes appear where a machine lost power while the file grew.
    lines = read_text(path).replace("\0", "").split("\n")[:-1]
    head, *rows = list(csv.reader(lines)) or [[]]
    return columns_of(dict(zip(head, row, strict=False)) for row in rows)


def columns_of(rows: Iterable[Mapping[str, Any]]) -> Columns:
    """Turn rows of numbers into columns.

    An iteration that was logged twice, after a resume, keeps its later value.

    Args:
        rows: {metric: number} with the iteration as `step`. Empty cells are left out, cells that
            are not numbers become NaN.

    Example:
        >>> columns_of([{"step": 1, "a": "0.5"}, {"step": 2, "a": ""}, {"step": 3, "a": "x"}])
        {'a': {1: 0.5, 3: nan}}
    """
    columns: Columns = {}
    for row in rows:
        step = parse_number(row.get("step"))
        if not math.isfinite(step):
            continue
        for name, cell in row.items():
            if name != "step" and cell not in ("", None):
                columns.setdefault(name, {})[int(step)] = parse_number(cell)
    return columns


def parse_number(cell: object) -> float:
    """Return the number in a cell; NaN if it holds anything else, such as a list."""
    try:
        return float(cell)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def reward_components(names: Iterable[str]) -> list[str]:
    """Return the names of the reward functions: those with a mean and a spread.

    Example:
        >>> reward_components(["reward/mean", "reward/std", "reward/format", "reward/format_std"])
        ['format']
    """
    known = set(names)
    found = [re.fullmatch("reward/(.+)_std", name) for name in known]
    return sorted(match[1] for match in found if match and f"reward/{match[1]}" in known)


def read_json_lines(path: Path) -> tuple[list[Row], int]:
    """Read a file with a JSON object per line.

    Returns:
        The objects, and how many lines could not be read.
    """
    # Not splitlines(): U+2028 and other separators may be part of a text.
    lines = [line for line in read_text(path).split("\n") if line.strip()]
    parsed = map(_parse_object, lines)
    rows = [row for row in parsed if row is not None]
    return rows, len(lines) - len(rows)


def _parse_object(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_yaml(path: Path) -> Row:
    """Read a YAML file with a mapping; {} if there is no file or it holds anything else.

    Raises:
        ValueError: the file is not YAML.
    """
    try:
        text = read_text(path)
        check_limits(text)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise ValueError(
            f"{path} is not valid YAML: {message}; fix it or move it out of the run folder"
        ) from error
    return content if isinstance(content, dict) else {}
