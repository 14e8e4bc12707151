"""Metrics of TRL and verl under the names of litgrpo."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from litgrpo.callbacks.metrics import TRL, VERL
from litgrpo.files import read_text

Row = dict[str, Any]
TRAINER_STATE = "trainer_state.json"
# `name:value` in a line of verl's console, such as `step:3 - actor/lr:1e-06`.
VERL_METRIC = re.compile(
    r"([A-Za-z][\w/@.-]*):(?:np\.\w+\()?(-?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))\)?"
)
# Names of TRL and verl that contain a name of the run, or are of older versions.
NAME_PATTERNS = (
    (r"actor/entropy_loss", "policy/entropy"),
    (r"val-core/(.+)/reward/mean@\d+", "val/reward"),
    (r"rewards/(.+)/mean", r"reward/\1"),
    (r"rewards/(.+)/std", r"reward/\1_std"),
    (r"val-core/(.+)/acc/mean@(\d+)", r"val/avg@\2"),
)


def find_trainer_state(folder: Path) -> Path | None:
    """Return TRL's `trainer_state.json` of a folder, or that of its last `checkpoint-N`."""
    checkpoints = sorted(
        folder.glob(f"checkpoint-*/{TRAINER_STATE}"),
        key=lambda file: (len(file.parent.name), file.parent.name),  # by step
    )
    files = (folder / TRAINER_STATE, *reversed(checkpoints))
    return next((file for file in files if file.is_file()), None)


def read_trl(file: Path) -> list[Row]:
    """Return a row {metric: number} per entry of a `trainer_state.json`.

    Raises:
        ValueError: the file is not one.
    """
    text = read_text(file)
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise ValueError(f"{file} has no log_history; expected the trainer_state.json of TRL")
    return [translate_names(row, TRL) for row in history if isinstance(row, dict)]


def read_verl(file: Path) -> list[Row]:
    """Return a row {metric: number as text} per step in a console log of verl."""
    lines = [line for line in read_text(file).splitlines() if "step:" in line]
    return [translate_names(dict(VERL_METRIC.findall(line)), VERL) for line in lines]


def translate_names(row: Mapping[str, Any], names: Mapping[str, str]) -> Row:
    """Rename another trainer's metrics to litgrpo's; unknown ones keep their names.

    Example:
        >>> translate_names({"reward": 0.5, "rewards/format/mean": 1.0}, {"reward": "reward/mean"})
        {'reward/mean': 0.5, 'rewards/format/mean': 1.0, 'reward/format': 1.0}
    """
    translated = {names.get(name, name): value for name, value in row.items()}
    for name, value in row.items():
        for pattern, replacement in NAME_PATTERNS:
            if match := re.fullmatch(pattern, name):
                translated[match.expand(replacement)] = value
    return translated
