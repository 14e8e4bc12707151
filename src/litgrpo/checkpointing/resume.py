"""Callbacks that make a resumed run equal to one that was never interrupted.

`RngState` restores random numbers, `OptimizerOptions` lets the recipe set the learning rate of the
rest of the run, and `LoggerState` continues the log files.

`LoggerState` shortens log files because the loggers' own step handling does not suffice. A killed
run has logged iterations after its last checkpoint, and the resumed run logs them again:
`metrics.csv`, which report, doctor and compare read, would hold them twice. TensorBoard's
`purge_step` only hides them, and must be known before the checkpoint is read.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from litgrpo.arguments import require
from litgrpo.callbacks.loggers import MetricsCSV, loggers_of
from litgrpo.distributed.messages import rank_zero_info, warn_once_on_failure
from litgrpo.distributed.random_state import random_state, set_random_state
from litgrpo.run_folder import run_folder, writes_files

RANDOM_STATE, OPTIMIZER_CLASSES, LOGGERS = "random_state", "optimizers", "loggers"  # in the file
PARAMS = "params"
EVENTS = "events.out.tfevents.*"


# --- random numbers ---


def get_all_random_state() -> dict[str, Any]:
    """State of Python, numpy, torch and the device, as plain values and tensors."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, torch.tensor(np.asarray(keys, dtype=np.int64)), *rest],
        "torch": random_state(),
    }


def set_all_random_state(state: dict[str, Any]) -> None:
    """Restore a state that `get_all_random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    set_random_state(state["torch"])


@contextmanager
def use_random_state(state: dict[str, Any]) -> Iterator[None]:
    """Let random numbers have an earlier state, and set the current one again at the end."""
    current = get_all_random_state()
    set_all_random_state(state)
    try:
        yield
    finally:
        set_all_random_state(current)


class RngState(Callback):
    """Stores the random state of every rank in the checkpoint.

    Lightning stores none. Sampling does not need it, but dropout and the user's own functions draw
    from it. If there are more ranks than the checkpoint had, the others keep their fresh state.

    Example:
        `Trainer(callbacks=[IterationCheckpoint(), RngState(), OptimizerOptions()])`
    """

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        states: list[Any] = [get_all_random_state()]
        if trainer.world_size > 1:
            states *= trainer.world_size
            torch.distributed.all_gather_object(states, get_all_random_state())
        checkpoint[RANDOM_STATE] = states

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        # Restored once training starts: loading may draw random numbers. (A checkpoint of only
        # weights has none.)
        self.states = checkpoint.get(RANDOM_STATE, [])

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.global_rank < len(self.states):
            set_all_random_state(self.states[trainer.global_rank])
        self.states = []


# --- optimizer and schedule ---


class OptimizerOptions(Callback):
    """Lets the recipe set the optimizer's options and the schedule of a resumed run.

    Lightning restores an optimizer with its learning rate, weight decay and so on, and a schedule
    with its length. Here only the optimizer state (such as Adam's averages) comes from the
    checkpoint. All options of the parameter groups are the recipe's, and the recipe's schedule is
    advanced to the run's position, as if the run had used it from the beginning. If the recipe
    names another class of optimizer, its state starts from zero, which is logged.

    Example:
        `Trainer(callbacks=[IterationCheckpoint(), RngState(), OptimizerOptions()])`
    """

    def __init__(self) -> None:
        self.checkpoint: dict[str, Any] = {}
        self.options: list[list[dict[str, Any]]] = []  # of the recipe, per optimizer and group

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[OPTIMIZER_CLASSES] = optimizer_classes(trainer)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":
            self.checkpoint = checkpoint
            checkpoint["lr_schedulers"] = []  # Lightning restores none; see `on_train_start`
            self._drop_foreign_state(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        # Before a checkpoint changes them.
        self.options = [group_options(optimizer) for optimizer in trainer.optimizers]
        self._drop_foreign_state(trainer)

    def _drop_foreign_state(self, trainer: Trainer) -> None:
        """Drop the state of another class of optimizer.

        Strategies differ in what comes first, the optimizers or the checkpoint; this acts once
        both are known.
        """
        if not self.checkpoint or not self.options:
            return
        classes = optimizer_classes(trainer)
        stored = self.checkpoint.get(OPTIMIZER_CLASSES, classes)  # a plain Trainer stores none
        if classes != stored:
            rank_zero_info(
                f"The checkpoint's optimizer is {', '.join(map(_class_name, stored))}, the "
                f"recipe's {', '.join(map(_class_name, classes))}: its state starts from zero."
            )
            self.checkpoint["optimizer_states"] = []
        for state, groups in zip(self.checkpoint["optimizer_states"], self.options, strict=False):
            check_groups(state["param_groups"], groups)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if not self.checkpoint:
            return
        stored, options = self.checkpoint["optimizer_states"], self.options
        self.checkpoint, self.options = {}, []
        for optimizer, groups in zip(trainer.optimizers, options, strict=True):
            for group, ours in zip(optimizer.param_groups, groups, strict=True):
                params = group[PARAMS]
                group.clear()
                group.update(ours, **{PARAMS: params})
                move_step_counts(optimizer, group)
        for config in trainer.lr_scheduler_configs:
            steps = trainer.global_step
            # In manual optimization Lightning steps none: interval and frequency mean nothing.
            if pl_module.automatic_optimization:
                steps = trainer.current_epoch if config.interval == "epoch" else steps
                steps //= config.frequency
            advance(config.scheduler, steps)
        for optimizer, state in zip(trainer.optimizers, stored, strict=False):
            log_changed_options(state["param_groups"], group_options(optimizer))


def optimizer_classes(trainer: Any) -> list[str]:
    """Import paths of the optimizers' classes."""
    classes = [type(optimizer) for optimizer in trainer.optimizers]
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in classes]


def group_options(optimizer: Any) -> list[dict[str, Any]]:
    """Options of each parameter group, without its parameters."""
    groups = optimizer.param_groups
    return [{name: value for name, value in g.items() if name != PARAMS} for g in groups]


def move_step_counts(optimizer: Any, group: dict[str, Any]) -> None:
    """Move the step counts of Adam to where a fused kernel needs them.

    Optimizers that are not fused keep them on the CPU, and a checkpoint may be of one.
    """
    if not group.get("fused"):
        return
    for parameter in group[PARAMS]:
        state = optimizer.state.get(parameter, {})
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(parameter.device)


def advance(scheduler: Any, steps: int) -> None:
    """Step a new schedule to a run's position; a ValueError if it is shorter than that."""
    with warnings.catch_warnings():
        # torch expects an optimizer step before the first step of a schedule.
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step")
        try:
            for _ in range(steps):
                scheduler.step()
        except ValueError as error:
            raise ValueError(
                f"lr_scheduler {type(scheduler).__name__} cannot be advanced to this run's "
                f"{steps} optimizer steps: {error}. Give it a greater length."
            ) from error


def check_groups(stored: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Reject an optimizer with another number of parameter groups."""
    require(
        len(stored) == len(groups),
        f"optimizer: the checkpoint has {len(stored)} parameter groups, the recipe "
        f"{len(groups)}. Use the optimizer that the checkpoint was written with.",
    )


def log_changed_options(stored: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Log options that the recipe changes, in one line."""
    changes: list[str] = []
    for before, now in zip(stored, groups, strict=True):
        for name, value in now.items():
            change = f"{name} {before.get(name)} -> {value}"
            if before.get(name) != value and change not in changes:
                changes.append(change)
    if changes:
        rank_zero_info(f"Optimizer options changed by the recipe: {', '.join(changes)}")


def _class_name(path: str) -> str:
    return path.rpartition(".")[2]


# --- log files ---


class LoggerState(Callback):
    """Stores the position of the log files in the checkpoint, and returns to it on resume.

    A resumed run removes what was logged after its checkpoint, so that no iteration is logged
    twice. None is missing: `IterationCheckpoint` saves when an iteration has been logged.
    """

    def __init__(self, folder: str | Path) -> None:
        # TensorBoard opens a new event file for every process; these are of earlier ones.
        self.earlier_events = sorted(Path(folder).glob(EVENTS))
        self.stored: dict[str, Any] | None = None
        self.has_started = False

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        rows, sizes = 0, {}
        if writes_files(trainer):
            for board in loggers_of(trainer, TensorBoardLogger):
                with warn_once_on_failure(f"logger {board.__class__.__name__}"):
                    board.experiment.flush()
            for table in loggers_of(trainer, MetricsCSV):
                rows = table.num_rows
            files = run_folder(trainer).glob(EVENTS)
            sizes = {path.name: path.stat().st_size for path in files}
        checkpoint[LOGGERS] = {"rows": rows, "sizes": sizes}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        # Files change once training starts: the checkpoint may yet be rejected. (One of only
        # weights has none.)
        self.stored = checkpoint.get(LOGGERS)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.has_started = True
        stored, self.stored = self.stored, None
        if stored is None or not writes_files(trainer):
            return
        for path in self.earlier_events:
            if path.exists():  # --overwrite has moved those of an earlier run
                truncate(path, stored["sizes"].get(path.name, 0))
        for table in loggers_of(trainer, MetricsCSV):
            table.truncate(stored["rows"])

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        # The event file of a run that failed at start would be listed by TensorBoard.
        if self.has_started or not writes_files(trainer):
            return
        for board in loggers_of(trainer, TensorBoardLogger):
            with warn_once_on_failure(f"logger {board.__class__.__name__}"):
                board.experiment.close()
        for path in set(run_folder(trainer).glob(EVENTS)) - set(self.earlier_events):
            path.unlink()


def truncate(path: Path, size: int) -> None:
    """Shorten a file to an earlier size; remove it if it did not exist then."""
    if size == 0:
        path.unlink()
    elif path.stat().st_size > size:
        with path.open("r+b") as file:
            file.truncate(size)
