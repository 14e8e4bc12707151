"""The command `replay`: print one episode of a run, turn by turn."""

from __future__ import annotations

from pathlib import Path

from litgrpo.arguments import require
from litgrpo.callbacks.completions import format_episode
from litgrpo.runs.run import SAMPLES, Row, Run, read_json_lines
from litgrpo.text.visible import visible

PREDICTIONS = "predictions*.jsonl"
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
    print(visible(f"{path}, row {number} of {len(rows)}\n"))
    print(visible(format_episode(rows[number])))


def find_samples(path: Path, iteration: int | None) -> Path:
    """Return the file with the samples of an iteration.

    Raises:
        ValueError: there is no such file.
    """
    if path.suffix == ".jsonl" and path.is_file():
        return path
    require(path.is_dir(), f"{path} is not a run folder or .jsonl file")
    files = Run(path).sample_files
    if iteration is None:
        predictions = sorted(path.glob(PREDICTIONS), key=lambda file: file.stat().st_mtime_ns)
        newest = [*predictions[-1:], *files.values()][-1:]
        require(
            bool(newest),
            f"{path} has no {SAMPLES}/*.jsonl; `fit` writes them every "
            "completions.every_n_iterations iterations (0: never).",
        )
        return newest[0]
    available = ", ".join(map(str, files)) or "none"
    require(
        iteration in files,
        f"{path} has no samples of iteration {iteration}; available: {available}",
    )
    return files[iteration]


def read_samples(path: Path) -> list[Row]:
    """Read a file of samples, without an incomplete last line of a killed run.

    Raises:
        ValueError: the file has no samples.
    """
    rows = [row for row in read_json_lines(path)[0] if {"prompt", "completion"} <= row.keys()]
    require(bool(rows), f"{path} has no samples: expected lines with prompt and completion")
    return rows


def select_row(rows: list[Row], row: str, path: Path) -> int:
    """Return the number of a row given as a number, `best` or `worst`.

    Raises:
        ValueError: there is no such row.
    """
    rewards = {
        n: float(sample["reward"])
        for n, sample in enumerate(rows)
        if isinstance(sample.get("reward"), int | float)
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
