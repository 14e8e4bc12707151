"""A run from the files it left: a folder of ours, TRL's trainer_state.json, verl's console log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from litgrpo.arguments import require
from litgrpo.callbacks.metric_readings import TRL, VERL
from litgrpo.tools.doctor.config import Config
from litgrpo.tools.doctor.metrics import Metrics, of_rows, read_csv

Samples = tuple[dict[str, Any], ...]
METRICS, CONFIG, STATE = "metrics.csv", "config.yaml", "trainer_state.json"
PAIR = re.compile(r"([A-Za-z][\w/@.-]*):(?:np\.\w+\()?(-?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))\)?")
# Foreign names with a name of the run's own in them, or of older versions, and ours.
PATTERNS = (
    (r"actor/entropy_loss", "policy/entropy"),
    (r"val-core/(.+)/reward/mean@\d+", "val/reward"),
    (r"rewards/(.+)/mean", r"reward/\1"),
    (r"rewards/(.+)/std", r"reward/\1_std"),
    (r"val-core/(.+)/acc/mean@(\d+)", r"val/avg@\2"),
)
FILES_OF_SAMPLES = 3  # at the start and at the end


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    Args:
        metrics: its numbers.
        samples: completions with their rewards, in the order of iterations; may be empty.
        config: its recipe; may be empty.
    """

    metrics: Metrics
    samples: Samples = ()
    config: Config = field(default_factory=Config)


def read(path: str | Path) -> Run:
    """Read a run.

    Args:
        path: a run folder, a `metrics.csv`, TRL's `trainer_state.json` (or a folder with one), or a
            console log of verl.

    Raises:
        ValueError: there is nothing that can be read.
    """
    given = Path(path)
    require(given.exists(), f"there is no run folder or file {given}")
    file = given if given.is_file() else found_in(given)
    reading = {METRICS: of_ours, STATE: of_trl}.get(file.name, of_csv_or_log)
    run = reading(file)
    require(
        bool(run.metrics.series),
        f"{file} holds no numbers: a run that ended before its first iteration leaves none.",
    )
    return run


def found_in(folder: Path) -> Path:
    """The file with the numbers of a run.

    Raises:
        ValueError: the folder has none.
    """
    newest = sorted(folder.glob(f"checkpoint-*/{STATE}"), key=lambda each: each.stat().st_mtime)
    known = [folder / METRICS, folder / STATE, *reversed(newest)]
    file = next((each for each in known if each.is_file()), None)
    require(
        file is not None,
        f"{folder} holds no {METRICS} (litgrpo) and no {STATE} (TRL); a console log of verl is "
        "given as a file.",
    )
    assert file is not None
    return file


def of_ours(file: Path) -> Run:
    """A run of litgrpo."""
    known = config_of(file.parent / CONFIG)
    return Run(read_csv(file), samples_of(file.parent / "samples"), known)


def config_of(file: Path) -> Config:
    """The recipe in a file; an empty one where there is none.

    Raises:
        ValueError: it is not YAML.
    """
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{file} is no YAML: {said}; repair it, or move it away") from error
    return Config(values, str(file)) if isinstance(values, dict) else Config()


def samples_of(folder: Path) -> Samples:
    """Completions of the first and last files of samples; lines that a kill cut are left out."""
    files = sorted(folder.glob("iteration-*.jsonl"))
    chosen = [*files[:1], *files[1:][-FILES_OF_SAMPLES + 1 :]]
    return tuple(row for file in chosen for row in json_lines(file))


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file, those that are whole."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            yield row | {name: row.get(name) or {} for name in ("rewards", "columns")}


def of_trl(file: Path) -> Run:
    """A run of TRL's GRPOTrainer, by the names of its log history.

    Raises:
        ValueError: the file is not a trainer's state.
    """
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON: {error.msg} in line {error.lineno}") from error
    history = state.get("log_history") if isinstance(state, dict) else None
    require(isinstance(history, list), f"{file} has no log_history, which TRL's trainers write")
    rows = [row for row in history or [] if isinstance(row, dict)]
    return Run(of_rows(renamed(row, TRL) for row in rows))


def of_csv_or_log(file: Path) -> Run:
    """A csv of ours under another name, or lines of verl's console: `step:3 - actor/lr:1e-06`."""
    if file.suffix == ".csv":
        return Run(read_csv(file))
    text = file.read_text(encoding="utf-8", errors="replace")
    rows = [dict(PAIR.findall(line)) for line in text.splitlines() if "step:" in line]
    return Run(of_rows(renamed(row, VERL) for row in rows))


def renamed(row: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A foreign row by our names; what has none keeps its own, so that nothing is mistaken."""
    found = {names.get(name, name): value for name, value in row.items()}
    for name, value in row.items():
        fits = [(re.fullmatch(pattern, name), ours) for pattern, ours in PATTERNS]
        found |= {match.expand(ours): value for match, ours in fits if match}
    return found
