"""Trainings in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import litgrpo

LOG_END = 5  # lines of the output that an error shows


def train(run_dir: Path, words: Sequence[str], **variables: str) -> None:
    """Run `litgrpo fit` in a new process; its output is beside the run folder, in `NAME.log`.

    Args:
        run_dir: the run folder.
        words: the rest of the command line.
        variables: environment variables, such as `OMP_NUM_THREADS`.

    Raises:
        ValueError: the process failed.
    """
    command = [sys.executable, "-m", "litgrpo", "fit", *words, "--run_dir", str(run_dir)]
    package_folder = str(Path(litgrpo.__file__).parents[1])  # of a clone that is not installed
    path = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path} | variables
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.with_suffix(".log")
    with log.open("w") as output:
        done = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False)
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        # Libraries may write more at exit, after the error.
        starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        error_lines = lines[starts[-1] :][:LOG_END] if starts else lines[-LOG_END:]
        message = f"the run in {run_dir} failed with exit code {done.returncode}:"
        raise ValueError("\n".join([message, *error_lines]))
