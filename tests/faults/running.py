"""Real `cli.py fit` processes on a small recipe, and what is compared of two runs."""

import csv
import hashlib
import json
import re
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from litgrpo.checkpointing.shards import read_checkpoint
from tests.faults.launching import Preparation, in_a_fork, in_a_new_process
from tests.support.checkpoints import digest

ITERATIONS, EVERY = 6, 2
# What depends on the clock.
TIMED = ("time/", "perf/", "checkpoint/")
# The quickstart in small: two epochs of three and a half iterations, two validations.
RECIPE: dict[str, Any] = {
    "model": {
        "init_args": {
            "rewards": {
                "correct": {"function": "litgrpo.rewards.correctness", "weight": 0.8},
                "format": {
                    "function": "litgrpo.rewards.reasoning_answer",
                    "weight": 0.2,
                },
                "words": {"function": "tests.faults.killer.reward", "weight": 0.01},
            },
            "group_size": 4,
            "max_completion_length": 32,
            "max_iterations": ITERATIONS,
            "check_invariants": False,
        }
    },
    "data": {
        "init_args": {
            "train": "python:litgrpo.data.examples.problems.train?size=28",
            "val": {"path": "python:litgrpo.data.examples.problems.held_out", "limit": 16},
            "batch_size": 8,
            "eval_batch_size": 8,
        }
    },
    "trainer": {"val_check_interval": 3},
    "checkpoint": {"every_n_iterations": EVERY},
    "completions": {"every_n_iterations": 1},
}
SUPERVISED: dict[str, Any] = {
    "model": {"init_args": {"max_iterations": ITERATIONS, "precision": {"disable_dropout": False}}},
    "data": {
        "init_args": {
            "train": "python:litgrpo.data.examples.problems.demonstrations?size=200",
            "val": {"path": "python:litgrpo.data.examples.problems.held_out", "limit": 16},
            "batch_size": 64,
        }
    },
    "trainer": {"val_check_interval": 3},
    "checkpoint": {"every_n_iterations": EVERY},
}


def merge_runs(first: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    """Nested settings, the later over the earlier; lists add up."""
    result = dict(first)
    for other in others:
        for name, value in other.items():
            mine = result.get(name)
            if isinstance(mine, dict) and isinstance(value, dict):
                result[name] = merge_runs(mine, value)
            elif isinstance(mine, list) and isinstance(value, list):
                result[name] = mine + value
            else:
                result[name] = value
    return result


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    """A recipe that adds a callback of `tests.faults.killer`."""
    callback = {"class_path": f"tests.faults.killer.{name}", "init_args": arguments}
    return {"trainer": {"callbacks": [callback]}}


@dataclass
class Run:
    """A run folder and the command that fills it.

    Args:
        folder: everything of it; the run is in `folder / "run"`.
        recipe: over the quickstart.
        base: the recipe below.
        new_process: start a new Python instead of forking; several devices need it.
        program: what is started, such as torchrun with `cli.py`; a new process.
    """

    folder: Path
    recipe: dict[str, Any]
    base: str = "configs/quickstart.yaml"
    new_process: bool = False
    program: tuple[str, ...] = ()
    said: str = ""
    seconds: float = 0.0

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    @property
    def marker(self) -> Path:
        return self.folder / "struck"

    def go(self, *words: str, timeout_s: float = 300, prepare: Preparation = None) -> int:
        """`cli.py fit` to its end; the exit code as a shell sees it."""
        started = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(self.recipe))
        command = ["fit", "-c", self.base, "-c", str(path), "--run_dir", str(self.run), *words]
        launch = in_a_new_process if self.new_process else in_a_fork
        if self.program:
            launch = partial(in_a_new_process, program=self.program)
        code, self.said = launch(command, timeout_s, prepare)
        self.seconds = time.monotonic() - started
        return code if code >= 0 else 128 - code

    def resume(self) -> int:
        """The same command again."""
        return self.go("--auto_resume", "true")

    def rows_by_iteration(self) -> dict[int, set[str]]:
        """The prompts of each iteration, from `samples/`, which the first process writes."""
        found: dict[int, set[str]] = {}
        for path in sorted((self.run / "samples").glob("*.jsonl")):
            for row in map(json.loads, path.read_text().splitlines()):
                found.setdefault(row["iteration"], set()).add(row["prompt"])
        return found

    def iteration_of_resume(self) -> int:
        """Iteration that the run resumed from; 0 for a new run."""
        said = re.search(r"Resuming from iteration (\d+)", self.said)
        return int(said[1]) if said else 0


def weights_of(run: Run) -> str:
    """Sha256 of the exported weights."""
    return hashlib.sha256((run.run / "final_model/model.safetensors").read_bytes()).hexdigest()


def state_of(run: Run) -> dict[str, str]:
    """Digests of what the last checkpoint holds of the training.

    SFT counts optimizer steps.
    """
    checkpoint = read_checkpoint(run.checkpoints / "last.ckpt")
    names = ("state_dict", "optimizer_states", "lr_schedulers", "iteration", "random_state")
    parts = {name: digest(checkpoint[name]) for name in names if name in checkpoint}
    scores = checkpoint["callbacks"]["IterationCheckpoint"]["scores"]
    return parts | {"scores": str(scores)}


def metrics_of(run: Run) -> list[dict[str, str]]:
    """The lines of metrics.csv, without what depends on the clock."""
    with (run.run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {name: value for name, value in row.items() if value and not name.startswith(TIMED)}
        for row in rows
    ]


def curves_of(run: Run) -> dict[str, list[tuple[int, float]]]:
    """Every curve of TensorBoard; nothing is purged from it here."""
    events = EventAccumulator(str(run.run), purge_orphaned_data=False)
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if not tag.startswith(TIMED)
    }


def differences(run: Run, whole: Run) -> list[str]:
    """Differences between a run that was stopped and resumed, and one that was not."""
    found = []
    if weights_of(run) != weights_of(whole):
        found.append("weights")
    mine, theirs = state_of(run), state_of(whole)
    found += [name for name in theirs if mine[name] != theirs[name]]
    if metrics_of(run) != metrics_of(whole):
        found.append("metrics.csv")
    if curves_of(run) != curves_of(whole):
        found.append("TensorBoard")
    best = [(each.checkpoints / "best.ckpt").readlink().name for each in (run, whole)]
    if best[0] != best[1]:
        found.append("best.ckpt")
    samples = [
        {path.name: path.read_bytes() for path in (each.run / "samples").glob("*.jsonl")}
        for each in (run, whole)
    ]
    if samples[0] != samples[1]:
        found.append("samples")
    unfinished = [path.name for path in run.checkpoints.glob(".*")]
    return found + [f"left {name}" for name in unfinished]
