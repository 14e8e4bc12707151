"""Run a few iterations of a recipe on this machine and extrapolate to the whole run."""

from __future__ import annotations

import json
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch.profilers import SimpleProfiler

from litgrpo.arguments import require
from litgrpo.modules.run_setup import DEFAULT_EPOCHS, given_epochs
from litgrpo.plan.sizes import load_data
from litgrpo.runs.run import Run
from litgrpo.runs.training import train
from litgrpo.temporary import TemporaryFolder

# The first iteration warms up, three are measured, the last ends the run.
ITERATIONS, MEASURED = 5, slice(1, 4)
NO_VALIDATION = 10**9


class Durations(SimpleProfiler):
    """Lightning's profiler, which writes the seconds of each action as JSON instead of a table."""

    def summary(self) -> str:
        return json.dumps(self.recorded_durations)


@dataclass(frozen=True)
class RunLength:
    """What a run repeats.

    Args:
        iterations: of the whole run.
        evaluations: one before training, one at each interval, one at the end.
        saves: checkpoints: one at each interval and one at the end.
    """

    iterations: int
    evaluations: int
    saves: int


@dataclass(frozen=True)
class MeasuredTimes:
    """Times of a few iterations, in seconds.

    Args:
        whole: the program, from its start to its end.
        iteration: an iteration.
        evaluation: an evaluation.
        save: a checkpoint.
        update_frac: fraction of an iteration spent in the update.
        peak_bytes: peak memory of the program.
    """

    whole: float
    iteration: float
    evaluation: float
    save: float
    update_frac: float
    peak_bytes: int

    def run(self, length: RunLength, trains: bool = True) -> float:
        """Extrapolate to the whole run.

        Args:
            length: of the run.
            trains: False if no row of the remaining iterations has a gradient.

        Returns:
            Seconds.
        """
        iteration = self.iteration * (1 if trains else 1 - self.update_frac)
        # The measured run has two evaluations and one checkpoint.
        return (
            self.whole
            + (length.iterations - ITERATIONS) * iteration
            + max(0, length.evaluations - 2) * self.evaluation
            + (length.saves - 1) * self.save
        )


def read_length(settings: Namespace) -> RunLength:
    """Return what the run of a recipe repeats; reads the data if it decides how long.

    Raises:
        ValueError: the data are needed and not on this machine, or fill no batch.
    """
    model, trainer = settings.model.init_args, settings.trainer
    iterations = model.max_iterations
    if iterations is None:
        batches = len(load_data(settings).train_dataloader())
        require(batches > 0, "the data fill no batch: lower data.batch_size")
        epochs = given_epochs(trainer.max_epochs) or DEFAULT_EPOCHS
        iterations = epochs * -(-batches // trainer.accumulate_grad_batches)
    interval, evaluates = trainer.val_check_interval, trainer.limit_val_batches != 0
    validates = evaluates and isinstance(interval, int)
    every = settings.checkpoint.every_n_iterations or iterations
    return RunLength(
        iterations,
        evaluations=1 + -(-iterations // interval) if validates else 0,
        saves=-(-iterations // every),
    )


def measure_recipe(config: dict[str, Any]) -> MeasuredTimes:
    """Run a few iterations of a recipe in a temporary folder.

    Raises:
        ValueError: the run failed; the message has its last line.
    """
    with TemporaryFolder("plan") as folder:
        recipe = folder / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(shorten_recipe(config, folder)), encoding="utf-8")
        started = time.perf_counter()
        train(folder / "run", ["-c", str(recipe)])
        program_s = time.perf_counter() - started
        (durations, *_) = sorted(folder.glob("fit-times*.txt"))  # of the first rank
        return MeasuredTimes(
            program_s,
            **part_times(json.loads(durations.read_text(encoding="utf-8"))),
            update_frac=read_update_frac(folder / "run"),
            peak_bytes=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        )


def shorten_recipe(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Limit a recipe to a few iterations, evaluate before and after, and add a profiler."""
    model = config["model"]
    arguments = model["init_args"] | {"max_iterations": ITERATIONS}
    profiler = {
        "class_path": f"{Durations.__module__}.{Durations.__name__}",
        "init_args": {"dirpath": str(folder), "filename": "times"},
    }
    trainer = {
        "profiler": profiler,
        "val_check_interval": NO_VALIDATION,
        "default_root_dir": None,
    }
    return config | {
        "model": model | {"init_args": arguments},
        "trainer": config["trainer"] | trainer,
        "checkpoint": config["checkpoint"] | {"every_n_iterations": 0},
        "csv": True,
    }


def part_times(durations: dict[str, list[float]]) -> dict[str, float]:
    """Return the seconds of an iteration, an evaluation and a save."""
    batches = durations["run_training_batch"]
    per_iteration = len(batches) // ITERATIONS
    measured = batches[per_iteration * MEASURED.start : per_iteration * MEASURED.stop]
    evaluations = next((v for k, v in durations.items() if k.endswith(".validation_step")), [])
    return {
        "iteration": sum(measured) / (MEASURED.stop - MEASURED.start),
        # The second one: the first includes the warm-up.
        "evaluation": sum(evaluations[len(evaluations) // 2 :]),
        "save": durations.get("save_checkpoint", [0.0])[-1],
    }


def read_update_frac(folder: Path) -> float:
    """Return the fraction of an iteration spent in the update; 0 if it is not logged (SFT)."""
    run = Run(folder)
    update, step = (run[name].iloc[MEASURED] for name in ("time/learn_s", "time/step_s"))
    return float(update.sum() / step.sum()) if len(update) else 0.0
