"""`plan --measure`: a few iterations of the recipe, here, and the whole run after them."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import yaml

import litgrpo
from litgrpo.arguments import require
from litgrpo.callbacks.progress import Stopwatch, clock
from litgrpo.tools.plan.schedule import Schedule

# One warms up, three are measured, one ends the run.
ITERATIONS, MEASURED = 5, slice(1, 4)
NEVER = 10**9
KINDS = ("wall", "cpu")


@dataclass(frozen=True)
class Measured:
    """What a few iterations took.

    Args:
        whole: seconds of the program that did them, from its start to its end.
        iteration: seconds of one.
        evaluation: seconds of one.
        save: seconds of one checkpoint.
        learning_share: of an iteration, that learning took.
        peak: bytes that the program held at most.
    """

    whole: float
    iteration: float
    evaluation: float
    save: float
    learning_share: float
    peak: int

    def run(self, plan: Schedule, learning: float = 1.0) -> float:
        """Seconds of the whole run.

        Args:
            plan: how often everything happens.
            learning: share of its rows that it learns from, compared with these iterations.
        """
        iteration = self.iteration * (1 - (1 - learning) * self.learning_share)
        evaluations = max(0, plan.evaluations - 2)  # before and after are in `whole`
        more = (plan.iterations - ITERATIONS) * iteration
        return self.whole + more + evaluations * self.evaluation + (plan.saves - 1) * self.save


def measured(config: dict[str, Any]) -> dict[str, Measured]:
    """{wall, cpu: what a few iterations of a recipe take here}, in a folder that is thrown away.

    Args:
        config: settings of `fit`.

    Raises:
        ValueError: they failed; the message has the last line that was printed.
    """
    with TemporaryDirectory(prefix="litgrpo-plan-") as name:
        folder = Path(name)
        recipe, log, events = folder / "recipe.yaml", folder / "log", folder / "events.jsonl"
        recipe.write_text(yaml.safe_dump(shortened(config, folder)), encoding="utf-8")
        before = clock()
        command = [sys.executable, "-m", "litgrpo", "fit", "-c", str(recipe)]
        with log.open("w") as output:
            child = subprocess.Popen(command, stdout=output, stderr=output, env=_environment())
            try:
                _, status, usage = os.wait4(child.pid, 0)
            except BaseException:  # asked to stop: the training, too
                child.terminate()
                child.wait()
                raise
        child.returncode = os.waitstatus_to_exitcode(status)
        after = clock()
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        require(
            child.returncode == 0,
            f"the iterations that were measured ended with exit code {child.returncode}: "
            f"{' '.join(last)}",
        )
        whole = {"wall": after["wall"] - before["wall"], "cpu": usage.ru_utime + usage.ru_stime}
        noted = [json.loads(line) for line in events.read_text().splitlines()]
        share = _learning_share(folder / "run" / "metrics.csv")
        return {
            kind: of_events(noted, kind, whole[kind], share, usage.ru_maxrss * 1024)
            for kind in KINDS
        }


def _environment() -> dict[str, str]:
    source = str(Path(litgrpo.__file__).parents[1])
    paths = [source, os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def shortened(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A recipe that ends after a few iterations, evaluates before and after, and notes the time."""
    given = config["model"]["init_args"] | {"max_iterations": ITERATIONS}
    model = config["model"] | {"init_args": given}
    watch = {
        "class_path": f"{Stopwatch.__module__}.{Stopwatch.__name__}",
        "init_args": {"file": str(folder / "events.jsonl")},
    }
    trainer = config["trainer"]
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    changed = {
        "model": model,
        "trainer": trainer
        | {"callbacks": [*callbacks, watch], "val_check_interval": NEVER, "default_root_dir": None},
        "checkpoint": config["checkpoint"] | {"every_n_iterations": 0},
        "run_dir": str(folder / "run"),
        "auto_resume": False,
        "csv": True,
    }
    return config | changed


def of_events(
    noted: list[dict[str, Any]], kind: str, whole: float, share: float, peak: int
) -> Measured:
    """Seconds of each part, from a stopwatch.

    Args:
        noted: its lines.
        kind: wall or cpu.
        whole: seconds of the program.
        share: of an iteration, that learning took.
        peak: bytes.
    """
    at = {event: [e[kind] for e in noted if e["event"] == event] for event in _names(noted)}
    begun = at["iteration"]
    steps = [after - before for before, after in pairwise(begun)]
    evaluations = list(zip(at.get("validation", []), at.get("end of validation", []), strict=False))
    return Measured(
        whole=whole,
        iteration=fmean(steps[MEASURED]),
        evaluation=max((end - start for start, end in evaluations[-1:]), default=0.0),
        save=_after(noted, "end of iteration")[kind] - at["end of iteration"][-1],
        learning_share=share,
        peak=peak,
    )


def _after(noted: list[dict[str, Any]], event: str) -> dict[str, Any]:
    """What follows the last event of a name."""
    last = max(place for place, each in enumerate(noted) if each["event"] == event)
    return noted[last + 1]


def _names(noted: list[dict[str, Any]]) -> Iterator[str]:
    yield from dict.fromkeys(each["event"] for each in noted)


def _learning_share(file: Path) -> float:
    """Share of an iteration in which was learned; 0 where nothing says so."""
    with file.open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("time/learn_s")]
    shares = [float(row["time/learn_s"]) / float(row["time/step_s"]) for row in rows]
    return fmean(shares[MEASURED]) if shares else 0.0
