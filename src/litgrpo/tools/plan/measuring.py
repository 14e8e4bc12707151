"""Run a few iterations of a recipe on this machine and extrapolate to the whole run."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

import litgrpo
from litgrpo.arguments import require
from litgrpo.callbacks.progress import Stopwatch, clock
from litgrpo.temporary import TemporaryFolder
from litgrpo.tools.plan.schedule import Schedule

# The first iteration warms up, three are measured, the last ends the run.
ITERATIONS, MEASURED = 5, slice(1, 4)
NO_VALIDATION = 10**9
CLOCKS = ("wall", "cpu")


@dataclass(frozen=True)
class MeasuredTimes:
    """Times of a few iterations.

    Args:
        whole: seconds of the program, from its start to its end.
        iteration: seconds of an iteration.
        evaluation: seconds of an evaluation.
        save: seconds of a checkpoint.
        learning_frac: fraction of an iteration spent in the update.
        peak_bytes: peak memory of the program.

    Example:
        >>> times = MeasuredTimes(30.0, 2.0, 4.0, 0.5, 0.25, peak_bytes=10**9)
        >>> times.run(Schedule(iterations=105, validate_every=50, save_every=35))
        239.0
    """

    whole: float
    iteration: float
    evaluation: float
    save: float
    learning_frac: float
    peak_bytes: int

    def run(self, schedule: Schedule, trained_frac: float = 1.0) -> float:
        """Extrapolate to the whole run.

        Args:
            schedule: of the run.
            trained_frac: fraction of rows with a gradient, relative to the measured iterations.

        Returns:
            Seconds.
        """
        iteration = self.iteration * (1 - (1 - trained_frac) * self.learning_frac)
        evaluations = max(0, schedule.evaluations - 2)  # the first and the last are in `whole`
        more = (schedule.iterations - ITERATIONS) * iteration
        return self.whole + more + evaluations * self.evaluation + (schedule.saves - 1) * self.save


def measure_recipe(config: dict[str, Any]) -> dict[str, MeasuredTimes]:
    """Run a few iterations of a recipe in a temporary folder.

    Args:
        config: settings of `fit`.

    Returns:
        {"wall": times, "cpu": processor times}.

    Raises:
        ValueError: the run failed; the message has its last line.
    """
    with TemporaryFolder("plan") as folder:
        recipe, log = folder / "recipe.yaml", folder / "log"
        recipe.write_text(yaml.safe_dump(shorten_recipe(config, folder)), encoding="utf-8")
        before = clock()
        command = [sys.executable, "-m", "litgrpo", "fit", "-c", str(recipe)]
        with log.open("w") as output:
            child = subprocess.Popen(command, stdout=output, stderr=output, env=_environment())
            try:
                _, status, usage = os.wait4(child.pid, 0)
            except BaseException:  # such as Ctrl-C
                child.terminate()
                child.wait()
                raise
        child.returncode = os.waitstatus_to_exitcode(status)
        after = clock()
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        require(
            child.returncode == 0,
            f"the measured run failed with exit code {child.returncode}: {' '.join(last)}",
        )
        whole = {"wall": after["wall"] - before["wall"], "cpu": usage.ru_utime + usage.ru_stime}
        lines = (folder / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        frac = _read_learning_frac(folder / "run" / "metrics.csv")
        return {
            name: times_from_events(events, name, whole[name], frac, usage.ru_maxrss * 1024)
            for name in CLOCKS
        }


def _environment() -> dict[str, str]:
    source = str(Path(litgrpo.__file__).parents[1])
    paths = [source, os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def shorten_recipe(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Limit a recipe to a few iterations, evaluate before and after, and add a stopwatch."""
    given = config["model"]["init_args"] | {"max_iterations": ITERATIONS}
    model = config["model"] | {"init_args": given}
    watch = {
        "class_path": f"{Stopwatch.__module__}.{Stopwatch.__name__}",
        "init_args": {"file": str(folder / "events.jsonl")},
    }
    trainer = config["trainer"]
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    with_settings = {
        "model": model,
        "trainer": trainer
        | {
            "callbacks": [*callbacks, watch],
            "val_check_interval": NO_VALIDATION,
            "default_root_dir": None,
        },
        "checkpoint": config["checkpoint"] | {"every_n_iterations": 0},
        "run_dir": str(folder / "run"),
        "auto_resume": False,
        "csv": True,
    }
    return config | with_settings


def times_from_events(
    events: list[dict[str, Any]], clock: str, whole: float, learning_frac: float, peak_bytes: int
) -> MeasuredTimes:
    """Compute the times of each part from the events of a stopwatch.

    Args:
        events: lines of the stopwatch.
        clock: wall or cpu.
        whole: seconds of the program.
        learning_frac: fraction of an iteration spent in the update.
        peak_bytes: peak memory of the program.
    """
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event["event"], []).append(event[clock])
    iterations = [after - before for before, after in pairwise(times["iteration"])]
    evaluation = 0.0
    if times.get("end of validation"):
        # The last one: the first includes the warm-up.
        evaluation = times["end of validation"][-1] - times["validation"][-1]
    # A checkpoint is written between the last iteration and the next event.
    names = [event["event"] for event in events]
    last = len(names) - 1 - names[::-1].index("end of iteration")
    return MeasuredTimes(
        whole=whole,
        iteration=fmean(iterations[MEASURED]),
        evaluation=evaluation,
        save=events[last + 1][clock] - events[last][clock],
        learning_frac=learning_frac,
        peak_bytes=peak_bytes,
    )


def _read_learning_frac(file: Path) -> float:
    """Return the fraction of an iteration spent in the update; 0 if it was not logged."""
    with file.open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("time/learn_s")]
    fracs = [float(row["time/learn_s"]) / float(row["time/step_s"]) for row in rows]
    return fmean(fracs[MEASURED]) if fracs else 0.0
