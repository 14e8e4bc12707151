"""Checkpoints between iterations: the newest and the best, each file complete."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from litgrpo.arguments import at_least, require
from litgrpo.callbacks.formatting import strip_stage
from litgrpo.callbacks.trainer_options import check_strategy
from litgrpo.checkpointing.io import VerifiedCheckpointIO, update_link
from litgrpo.checkpointing.resume import (
    get_all_random_state,
    set_all_random_state,
    use_random_state,
)
from litgrpo.checkpointing.signals import Stopped, StopRequest
from litgrpo.data.loader import BatchLoader
from litgrpo.data.modules import SourceData
from litgrpo.distributed.fsdp.strategy import FSDP2Strategy
from litgrpo.lightning_compat import validate_now
from litgrpo.models.loading.load import check_weights
from litgrpo.protocol import TrainedModule
from litgrpo.run_folder import (
    BEST,
    LAST,
    NotSaved,
    check_links,
    checkpoint_folder,
    find_newest_checkpoint,
    run_folder,
    sort_checkpoints,
    writes_files,
)
from litgrpo.tensor_files import NEEDED_TO_RESUME, loader_states, remove_checkpoint

# Parts of a checkpoint that only a resumed run needs.
ONLY_TO_RESUME = ("optimizer_states", "lr_schedulers", "loops", "random_state", "loggers")


@dataclass(frozen=True)
class Boundary:
    """State at the end of an iteration that the next one changes before its first optimizer step.

    A signal may drop an iteration that has not stepped yet. Weights, optimizer state, schedules
    and the module's own counters are then unchanged. Two things are not: a batch has been counted
    and fetched, and random numbers have been drawn. Both are small and copied after every
    iteration; everything else is read when a file is written.
    """

    iteration: int  # number of finished iterations
    epoch: int  # Lightning's; nothing reads it from the file
    fit_loop: dict[str, Any]  # progress of Lightning's loops and the position in the data
    random: dict[str, Any]  # state of this rank's random number generators

    @classmethod
    def capture(cls, trainer: Any) -> Boundary:
        """Copy the current state; called at the end of a batch, where Lightning resumes."""
        fit_loop = copy.deepcopy(trainer.fit_loop.state_dict())
        iteration = trainer.lightning_module.iteration
        return cls(iteration, trainer.current_epoch, fit_loop, get_all_random_state())


class IterationCheckpoint(Checkpoint):
    """Saves the whole state of the training between two iterations, to `checkpoints/`.

    `last.ckpt` and `best.ckpt` are links to the newest and the best. Files are written in the
    background; training waits only for the copy to the host's memory. On SIGTERM, SIGINT or SIGHUP
    the current iteration is dropped if it has not taken an optimizer step, and finished otherwise.
    Then the state is saved and the program exits with 143, 130 or 129; a second signal exits at
    once. (Lightning's ModelCheckpoint counts optimizer steps, of which an iteration may take
    several or none.)

    Args:
        every_n_iterations: interval; 0 saves only the best and the final state.
        keep_last: number of newest checkpoints to keep.
        keep_best: number of best checkpoints to keep; 0 keeps none for its score.
        monitor: metric of the evaluation that ranks checkpoints. Default: the first one (avg@k),
            with the mean reward as tie-breaker, which also ranks graded rewards that never reach
            the success threshold. With several validation sets: the mean over them.
        mode: `max` or `min`; default: min for a loss, else max.
        save_weights_only: leave out optimizer state and progress (about a third of the size): to
            evaluate and export, but a run cannot resume from it.

    Example:
        >>> checkpoint = IterationCheckpoint(every_n_iterations=100, keep_last=3, monitor="greedy")
        >>> checkpoint.keep_best
        1
    """

    def __init__(
        self,
        every_n_iterations: int = 50,
        keep_last: int = 2,
        keep_best: int = 1,
        monitor: str | None = None,
        mode: Literal["max", "min"] | None = None,
        save_weights_only: bool = False,
    ) -> None:
        at_least("checkpoint.every_n_iterations", every_n_iterations, 0)
        at_least("checkpoint.keep_last", keep_last, 1)
        at_least("checkpoint.keep_best", keep_best, 0)
        self.every_n_iterations = every_n_iterations
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.monitor = monitor
        self.mode = mode
        self.save_weights_only = save_weights_only
        self.fall_back = False  # skip damaged files; set by `--auto_resume`
        self.scores: dict[int, list[float]] = {}
        self.best_model_path = ""  # read by Trainer.validate(ckpt_path="best")
        self.last_saved = -1
        self.evaluated_source = -1  # iteration of the file that was read, if its score is in it
        self.has_failed = False  # the newest file could not be written
        self.is_between = False  # an iteration has ended, and the next has not begun
        self.save_due = False  # of the iteration that has ended
        self.validation_due = False  # began after an iteration, and has not ended
        self.io = VerifiedCheckpointIO()
        self.stop = StopRequest()
        self.boundary: Boundary | None = None  # of the newest iteration, once training started

    # --- start and end ---

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        check_strategy(trainer.strategy)
        if writes_files(trainer):
            check_links(run_folder(trainer))
        if isinstance(trainer.strategy.checkpoint_io, VerifiedCheckpointIO):
            self.io = trainer.strategy.checkpoint_io
        else:
            trainer.strategy.checkpoint_io = self.io
        if isinstance(trainer.strategy, FSDP2Strategy):
            self.io.shards_for = trainer.strategy.shards_for
        if stage == "fit":
            require(
                not (self.save_weights_only and self.fall_back),
                "--auto_resume needs complete checkpoints, but checkpoint.save_weights_only is "
                "true: remove one of them.",
            )
            self.io.excluded = ONLY_TO_RESUME if self.save_weights_only else ()
            self.io.fall_back = self.fall_back
            self.io.required = NEEDED_TO_RESUME
            self.io.check_fits = lambda checkpoint: check_fits(trainer, pl_module, checkpoint)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.boundary, self.evaluated_source = None, -1
        if writes_files(trainer):
            folder = checkpoint_folder(run_folder(trainer))
            for path in folder.glob(".*.tmp"):  # incomplete files of a killed run
                remove_checkpoint(path)
            check_space(folder, [p for p in pl_module.parameters() if p.requires_grad])

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.stop.restore()

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.stop.install(trainer)  # in the place of Lightning's

    def on_train_start(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        self.stop.install(trainer)
        source = self.io.loaded_from
        if source is not None:
            rank_zero_info(f"Resuming from iteration {pl_module.iteration} ({source})")
            self.last_saved = pl_module.iteration
            if writes_files(trainer):
                mark_as_resumed(run_folder(trainer), source)
            if pl_module.iteration in self.scores and not self.validation_due:
                self.evaluated_source = pl_module.iteration
        self.boundary = Boundary.capture(trainer)
        if self.validation_due:  # the file was written before its validation
            validate_now(trainer)

    # --- saving ---

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._end_iteration(trainer)
        self.is_between, self.stop.droppable = False, True

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        if self.stop.droppable:  # from its first optimizer step on, an iteration is finished
            self.stop.check(trainer)
            self.stop.droppable = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.stop.droppable = False
        assert self.boundary is not None
        n, every = pl_module.iteration, self.every_n_iterations
        # An iteration of SFT may have several batches (accumulate_grad_batches).
        if n == self.boundary.iteration:
            return
        self._log_saves(pl_module)
        self.boundary, self.is_between = Boundary.capture(trainer), True
        self.save_due = (every > 0 and n % every == 0) or n == pl_module.max_iterations

    def _end_iteration(self, trainer: Any) -> None:
        """Write the file that is due, and stop if that was asked for.

        Called by the first hook after an iteration: Lightning passes its metrics to the loggers
        after `on_train_batch_end`, and a file that is written later needs none of them.
        """
        self._save_if_due(trainer)
        self.stop.check(trainer)

    def _save_if_due(self, trainer: Any) -> None:
        if self.save_due:
            assert self.boundary is not None
            self.save_due = False
            with use_random_state(self.boundary.random):
                self.save(trainer, self.boundary.iteration)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.state.fn != "fit":
            self.stop.install(trainer)
        # The file is written before the validation: one that takes an hour and is killed costs no
        # training. A run that resumes from it begins with the validation.
        self.validation_due = self.validation_due or self.is_between
        self._end_iteration(trainer)
        self.stop.droppable = True

    on_test_start = on_predict_start = on_validation_start

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.stop.droppable = False  # its metrics are about to be logged and counted

    def on_validation_end(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        if self.boundary is None or trainer.state.fn != "fit":
            return
        self.validation_due = False
        n, report = pl_module.iteration, strip_stage(pl_module.evaluation_report)
        # An evaluation may leave out a metric that others have: it scored no completion.
        if report and (self.monitor is None or self.monitor in report or not self.scores):
            self.scores[n] = score_report(report, self.monitor, self.mode)
        # Reward functions may have drawn random numbers. The loops stay those of the batch's end.
        self.boundary = replace(self.boundary, random=get_all_random_state())
        # The file of this iteration lacks its score; one of the best has none yet.
        is_due = n in (self.last_saved, *best_iterations(self.scores, self.keep_best))
        if is_due and n != self.evaluated_source:
            self.save(trainer, n)

    def on_train_end(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        self.is_between = False  # a save that fails here is not repeated
        # It is missing if a limit other than `max_iterations` ended the training.
        self._save_if_missing(trainer, pl_module.iteration)
        self.stop.check(trainer)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, Stopped) and self.boundary is not None:
            n = self.boundary.iteration
            set_all_random_state(self.boundary.random)  # a dropped iteration may have drawn
            self._save_if_missing(trainer, n)
            hint = "resume with `--ckpt_path last`."
            if self.save_weights_only:
                hint = "saved the weights; a run cannot resume from them (save_weights_only)."
            rank_zero_info(f"Stopped after iteration {n}: {hint}")
        elif trainer.world_size == 1:  # other processes would wait for a save alone
            self._save_after_failure(trainer, pl_module)
        self._finish_write()
        self.stop.restore()

    def _save_after_failure(self, trainer: Any, pl_module: TrainedModule) -> None:
        """Save what a signal would save at this place; an iteration that has stepped is lost."""
        is_unchanged = self.is_between or self.stop.droppable
        if trainer.state.fn != "fit" or self.boundary is None or not is_unchanged:
            return
        n = self.boundary.iteration
        # Nothing is lost before the first iteration, and an empty folder is free for a new run.
        if n not in (0, self.last_saved) and n == pl_module.iteration:
            try:
                with use_random_state(self.boundary.random):
                    self._save_if_missing(trainer, n)
            except (Exception, NotSaved) as error:  # the failure that ends the run is reported
                rank_zero_warn(f"checkpoint not saved: {error}")
            else:
                rank_zero_info(f"Saved the state after iteration {n}.")

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        # Undo the progress that a dropped iteration or a validation added to Lightning's loops.
        if self.boundary is not None and self.boundary.iteration == pl_module.iteration:
            checkpoint["loops"]["fit_loop"] = self.boundary.fit_loop
            checkpoint["epoch"] = self.boundary.epoch

    def save(self, trainer: Any, iteration: int) -> None:
        """Write `iteration=000100.ckpt` in the background, then update links and remove old files.

        A failed write is logged; training continues and earlier checkpoints are kept.
        """
        if trainer.fast_dev_run:
            return
        folder = checkpoint_folder(run_folder(trainer))
        best = best_iterations(self.scores, self.keep_best)
        self._finish_write()
        self.last_saved, self.has_failed = iteration, False

        def update_folder(path: Path) -> None:
            update_link(folder / LAST, path)
            if prune_checkpoints(folder, best, self.keep_last, path):
                self.best_model_path = str(folder / BEST)

        path = folder / f"iteration={iteration:06d}.ckpt"
        trainer.save_checkpoint(path, weights_only=False, storage_options=update_folder)

    def _save_if_missing(self, trainer: Any, iteration: int) -> None:
        """Save unless this iteration has a file; the rank that writes knows.

        Raises:
            NotSaved: the file could not be written.
        """
        self._finish_write()
        if trainer.strategy.broadcast(self.has_failed or self.last_saved != iteration):
            self.save(trainer, iteration)
        try:
            self.io.wait()
        except OSError as error:
            newest = find_newest_checkpoint(run_folder(trainer))
            earlier = "there is no earlier one"
            if newest is not None:
                earlier = f"the newest earlier one is {newest}"
            raise NotSaved(f"checkpoint not saved: {error}; {earlier}") from error

    def _finish_write(self) -> None:
        """Wait for the pending write; if it failed, a later one may succeed."""
        try:
            self.io.wait()
        except OSError as error:
            self.has_failed = True
            rank_zero_warn(
                f"checkpoint not saved: {error}; training continues, and the next save tries again"
            )

    def _log_saves(self, pl_module: Any) -> None:
        """Log size and time of each finished save, once."""
        while self.io.stats:
            numbers = asdict(self.io.stats.pop(0))
            metrics = {f"checkpoint/{name}": value for name, value in numbers.items()}
            pl_module.log_dict(metrics, rank_zero_only=True)

    def state_dict(self) -> dict[str, Any]:
        scores = {str(n): list(score) for n, score in self.scores.items()}
        return {"scores": scores, "validation_due": self.validation_due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores = {int(n): list(score) for n, score in state_dict["scores"].items()}
        self.validation_due = state_dict["validation_due"]


def prune_checkpoints(folder: Path, best: list[int], keep_last: int, newest: Path) -> bool:
    """Link the best checkpoint, if any, and remove those that are neither new nor good.

    `newest`, which was just written, stays in any case. Returns whether a best one is linked.
    """
    saved = sort_checkpoints(folder)
    best = [n for n in best if n in saved]
    if best:
        update_link(folder / BEST, saved[best[0]])
    for n in set(saved) - set(list(saved)[:keep_last]) - set(best):
        if saved[n] != newest:
            remove_checkpoint(saved[n])
    return bool(best)


def best_iterations(scores: dict[int, list[float]], number: int) -> list[int]:
    """Up to `number` iterations with the highest scores, the best first.

    Example:
        >>> best_iterations({10: [0.5, 0.1], 20: [0.5, 0.3], 30: [0.4, 0.9]}, number=2)
        [20, 10]
    """
    numbers = [n for n, score in scores.items() if not any(map(math.isnan, score))]
    # Of equal scores the later iteration is better: it has been trained for longer.
    return sorted(numbers, key=lambda n: (scores[n], n), reverse=True)[:number]


def score_report(report: dict[str, float], monitor: str | None, mode: str | None) -> list[float]:
    """Score an evaluation so that larger is better; further entries break ties.

    Without a monitor the mean reward breaks ties, and each number is its mean over the validation
    sets that have it; [], the worst score, if no completion has an accuracy.

    Raises:
        ValueError: the evaluation does not have the monitored metric.

    Example:
        >>> score_report({"avg@4": 0.25, "reward": 0.5}, monitor=None, mode=None)
        [0.25, 0.5]
        >>> score_report({"loss": 2.0}, monitor="loss", mode="min")
        [-2.0]
    """
    name = monitor or next((name for name in report if "avg@" in name), next(iter(report)))
    if monitor is None and name.endswith("unscored_frac"):
        return []
    require(name in report, f"checkpoint.monitor is {name!r}; the evaluation has {list(report)}.")
    if mode is None:
        mode = "min" if name.endswith("loss") else "max"
    sign = 1.0 if mode == "max" else -1.0
    if monitor is not None:
        return [sign * report[name]]
    score = []
    for wanted in (name.rpartition("/")[2], "reward"):
        values = [x for key, x in report.items() if key.rpartition("/")[2] == wanted]
        if values:
            score.append(sign * sum(values) / len(values))
    return score


def mark_as_resumed(run: Path, source: Path) -> None:
    """Make the checkpoint that a run resumed from the newest, even if others were saved later.

    The file `source`, with links resolved, may be of another run.
    """
    folder = checkpoint_folder(run)
    if source.parent == folder.resolve() and source.name != LAST:
        update_link(folder / LAST, folder / source.name)


def check_space(folder: Path, weights: Iterable[Tensor]) -> None:
    """Check that trained weights fit on the disk; earlier checkpoints will be replaced.

    Optimizer state may need twice as much in addition.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    earlier = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(existing).free
    needed = sum(weight.nbytes for weight in weights)
    require(
        free + earlier >= needed,
        f"{folder}: {free / 2**20:.1f} MiB are free, and the weights of one checkpoint take "
        f"{needed / 2**20:.1f} MiB. Free space, or choose another disk with --run_dir.",
    )


def check_fits(trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
    """Reject the checkpoint of another model or of other data, before anything is loaded."""
    saved = checkpoint["state_dict"]
    trained = {name for name, weight in pl_module.named_parameters() if weight.requires_grad}
    ours = {n: w for n, w in pl_module.state_dict().items() if n in saved or n in trained}
    check_weights(saved, ours)
    data = trainer.datamodule
    if data is None:
        return
    if isinstance(data, SourceData):
        data.load_run_time(checkpoint.get(type(data).__qualname__, {}))
    loader = data.train_dataloader()
    if isinstance(loader, BatchLoader):
        for state in loader_states(checkpoint):
            loader.check_state(state)
