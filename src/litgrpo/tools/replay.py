"""The command `replay`: print one episode of a run, turn by turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from litgrpo.arguments import require
from litgrpo.callbacks.completions import format_episode
from litgrpo.callbacks.files import read_text
from litgrpo.text.visible import visible

SAMPLES, PREDICTIONS = "samples", "predictions*.jsonl"
BEST, WORST = "best", "worst"


def replay(run: str, iteration: int | None = None, row: str = "0") -> None:
    """Print an episode of a run: the turns of the policy, the observations, and each turn's reward.

    Args:
        run: a run folder, or a file of samples or predictions (.jsonl).
        iteration: iteration of the samples; default: the last one with samples.
        row: number of the completion in the file, from 0; or `best` or `worst` by reward.
    """
    path = find_samples(Path(run), iteration)
    rows = read_samples(path)
    number = select_row(rows, row, path)
    print(f"{path}, row {number} of {len(rows)}\n")
    print(visible(format_episode(rows[number])))


def find_samples(run: Path, iteration: int | None) -> Path:
    """Return the file with the samples of an iteration.

    Raises:
        ValueError: there is no such file.
    """
    if run.suffix == ".jsonl" and run.is_file():
        return run
    require(run.is_dir(), f"{run} is not a run folder or .jsonl file")
    written = sorted((run / SAMPLES).glob("iteration-*.jsonl"))
    if iteration is None:
        predicted = sorted(run.glob(PREDICTIONS), key=lambda path: path.stat().st_mtime_ns)
        if not written and predicted:
            return predicted[-1]
        require(
            bool(written),
            f"{run} has no {SAMPLES}/*.jsonl; `fit` writes them every "
            "completions.every_n_iterations iterations (0: never).",
        )
        return written[-1]
    numbers = [int(each.stem.removeprefix("iteration-")) for each in written]
    available = ", ".join(map(str, numbers)) or "none"
    require(
        iteration in numbers,
        f"{run} has no samples of iteration {iteration}; available: {available}",
    )
    return written[numbers.index(iteration)]


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Read a file of samples, without an incomplete last line of a killed run.

    Raises:
        ValueError: the file is empty, or a line is not a sample.
    """
    rows: list[dict[str, Any]] = []
    texts = read_text(path).split("\n")
    # Every complete line ends with a line break.
    complete = texts[:-1] if texts[-1] else texts
    for number, text in enumerate(filter(None, complete), 1):
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {error}") from error
        is_sample = isinstance(row, dict) and {"prompt", "completion"} <= row.keys()
        require(
            is_sample, f"{path}, line {number}, is not a sample: expected prompt and completion"
        )
        rows.append(row)
    require(bool(rows), f"{path} is empty")
    return rows


def select_row(rows: list[dict[str, Any]], row: str, path: Path) -> int:
    """Return the number of a row given as a number, `best` or `worst`.

    Raises:
        ValueError: there is no such row.
    """
    rewards = {
        n: float(each["reward"])
        for n, each in enumerate(rows)
        if isinstance(each.get("reward"), int | float)
    }
    extremes = {BEST: max, WORST: min}
    if row in extremes:
        require(bool(rewards), f"{path} has no rewards: --row must be a number")
        return int(extremes[row](rewards, key=lambda n: rewards[n]))
    is_number = row.isdecimal() and int(row) < len(rows)
    require(
        is_number,
        f"--row is {row!r}; it must be 0 to {len(rows) - 1} in {path}, `{BEST}` or `{WORST}`",
    )
    return int(row)
