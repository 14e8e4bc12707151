"""The verb `replay`: one episode of a run, turn by turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from litgrpo.arguments import require
from litgrpo.callbacks.completions import format_episode
from litgrpo.text.visible import visible

SAMPLES, PREDICTIONS = "samples", "predictions.jsonl"
BEST, WORST = "best", "worst"


def replay(run: str, iteration: int | None = None, row: str = "0") -> None:
    """Print an episode that a run sampled: what was spoken, what was heard, what each turn earned.

    Args:
        run: a run folder, or a file of samples or predictions (.jsonl).
        iteration: which samples; default: the last that were written.
        row: number of the completion in the file, from 0; or `best` or `worst`, by its reward.
    """
    path = samples_of(Path(run), iteration)
    rows = rows_of(path)
    number = chosen(rows, row, path)
    print(f"{path}, row {number} of {len(rows)}\n")
    print(visible(format_episode(rows[number])))


def samples_of(run: Path, iteration: int | None) -> Path:
    """The file that a run's samples of an iteration are in.

    Raises:
        ValueError: there is none.
    """
    if run.suffix == ".jsonl" and run.is_file():
        return run
    require(run.is_dir(), f"there is no run folder or .jsonl file {run}")
    written = sorted((run / SAMPLES).glob("iteration-*.jsonl"))
    if iteration is None:
        written += [run / PREDICTIONS] * (not written and (run / PREDICTIONS).is_file())
        require(
            bool(written),
            f"{run} has no {SAMPLES}/*.jsonl: they are written by `fit`, every "
            "completions.every_n_iterations iterations (0: never).",
        )
        return written[-1]
    numbers = [int(each.stem.removeprefix("iteration-")) for each in written]
    known = ", ".join(map(str, numbers)) or "none"
    require(
        iteration in numbers, f"{run} has no samples of iteration {iteration}; there are: {known}"
    )
    return written[numbers.index(iteration)]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of samples; a last line that a kill cut short is left out.

    Raises:
        ValueError: there is none, or a line is no sample.
    """
    rows: list[dict[str, Any]] = []
    texts = path.read_text(encoding="utf-8").split("\n")
    whole = texts[:-1] if texts[-1] else texts  # every whole line ends with a line break
    for number, text in enumerate(filter(None, whole), 1):
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, is no JSON: {error}") from error
        known = isinstance(row, dict) and {"prompt", "completion"} <= row.keys()
        require(known, f"{path}, line {number}, is no sample: it has no prompt and completion")
        rows.append(row)
    require(bool(rows), f"{path} is empty")
    return rows


def chosen(rows: list[dict[str, Any]], row: str, path: Path) -> int:
    """The number of the row that is asked for.

    Raises:
        ValueError: there is no such row.
    """
    rewards = {n: float(each["reward"]) for n, each in enumerate(rows) if _paid(each)}
    extremes = {BEST: max, WORST: min}
    if row in extremes:
        require(bool(rewards), f"{path} has no rewards: give --row a number")
        return int(extremes[row](rewards, key=lambda n: rewards[n]))
    known = row.isdecimal() and int(row) < len(rows)
    require(
        known, f"--row is {row!r}; it must be 0 to {len(rows) - 1} in {path}, `{BEST}` or `{WORST}`"
    )
    return int(row)


def _paid(row: dict[str, Any]) -> bool:
    return isinstance(row.get("reward"), int | float)
