"""Checkpoints between iterations: the newest, the best, and whole files only."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from litgrpo.arguments import at_least, one_of, require
from litgrpo.callbacks.number_texts import plain_names
from litgrpo.callbacks.run_folder import (
    BEST,
    LAST,
    NotSaved,
    by_age,
    checkpoints_of,
    newest_checkpoint,
    run_folder,
    writes_files,
)
from litgrpo.callbacks.trainer_options import refuse_sharding
from litgrpo.checkpointing.disk_use import checkpoint_bytes, say_disk_use
from litgrpo.checkpointing.io import CheckedIO, point
from litgrpo.checkpointing.manifest import TO_GO_ON, positions_of
from litgrpo.checkpointing.rng_state import all_random_state, set_all_random_state
from litgrpo.checkpointing.shards import remove
from litgrpo.checkpointing.signals import Stopped, StopRequest
from litgrpo.data.sampler import BatchLoader
from litgrpo.distributed.fsdp.strategy import FSDP2Strategy
from litgrpo.models.loading import check_weights
from litgrpo.training.lightning_compat import validate_now, validation_is_due

SIGN = {"max": 1.0, "min": -1.0}
# What a checkpoint of `save: weights` does not hold.
ONLY_TO_GO_ON = ("optimizer_states", "lr_schedulers", "loops", "random_state", "loggers")
STOPPED = {
    "everything": "`--ckpt_path last` goes on from there.",
    "weights": "its weights are saved; with checkpoint.save weights no run goes on from there.",
}


@dataclass(frozen=True)
class Boundary:
    """What changes before the first optimizer step of an iteration, as it was before it.

    Weights, moments, schedules and the module's own numbers change with the first step or later,
    so a dropped iteration leaves them as they were. Two things it does change: the batch is counted
    and fetched, and random numbers are drawn. These are small and kept after every iteration; all
    else is asked for when a file is written.

    Args:
        iteration: number of finished iterations.
        epoch: Lightning's; nothing reads it from the file.
        fit_loop: progress of Lightning's loops and the position in the data.
        random: where this process's random numbers stand.
    """

    iteration: int
    epoch: int
    fit_loop: dict[str, Any]
    random: dict[str, Any]

    @classmethod
    def of(cls, trainer: Any) -> Boundary:
        """The state of now; call it at the end of a batch, from where Lightning resumes."""
        fit_loop = copy.deepcopy(trainer.fit_loop.state_dict())
        n = trainer.lightning_module.iteration
        return cls(n, trainer.current_epoch, fit_loop, all_random_state())


class IterationCheckpoint(Checkpoint):
    """Saves the whole state of the training between two iterations, to `checkpoints/`.

    `last.ckpt` and `best.ckpt` point to the newest and the best. The file is written beside the
    training, which waits for the copy to the host's memory only. On SIGTERM, SIGINT or SIGHUP the
    iteration is dropped before its first optimizer step and finished after it, then the state is
    saved and the program ends with 143, 130 or 129; a second signal ends it at once. (Lightning's
    ModelCheckpoint counts optimizer steps, of which an iteration may take many or none.)

    Args:
        every_n_iterations: how often to save; 0 saves the best and the final state only.
        keep_last: how many of the newest to keep.
        keep_best: how many of the best to keep; 0 keeps none for being good.
        monitor: which number of an evaluation says how good. When not given, the first one (avg@k),
            and among equals the mean reward: so graded rewards that never reach the threshold of a
            success are ranked, too. With several validation sets: the mean over them.
        mode: whether the largest or the smallest is best; when not given, the smallest of a loss
            and the largest of anything else.
        save: `everything` that a run needs to go on; or `weights`, about a third, to evaluate and
            export, for a run that will not be resumed.
    """

    def __init__(
        self,
        every_n_iterations: int = 50,
        keep_last: int = 2,
        keep_best: int = 1,
        monitor: str | None = None,
        mode: Literal["max", "min"] | None = None,
        save: Literal["everything", "weights"] = "everything",
    ) -> None:
        one_of("checkpoint.save", save, STOPPED)
        at_least("checkpoint.every_n_iterations", every_n_iterations, 0)
        at_least("checkpoint.keep_last", keep_last, 1)
        at_least("checkpoint.keep_best", keep_best, 0)
        self.every_n_iterations = every_n_iterations
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.monitor = monitor
        self.mode = mode
        self.parts = save
        self.falls_back = False  # whether a damaged file is passed over: cli.py fit --auto_resume
        self.scores: dict[int, list[float]] = {}
        self.best_model_path = ""  # read by Trainer.validate(ckpt_path="best")
        self.last_saved = -1
        self.failed = False  # whether the newest file could not be written
        self.validation_due = False
        self.io = CheckedIO(None)
        self.stop = StopRequest()
        self.boundary: Boundary | None = None  # after the newest iteration, once training started

    # --- starting and ending ---

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have files verified, before Lightning reads the first.

        Raises:
            ValueError: no checkpoint could hold what the trainer's strategy has, or none would hold
                what --auto_resume needs.
        """
        refuse_sharding(trainer.strategy)
        self.io = CheckedIO(trainer.strategy.checkpoint_io)
        if isinstance(trainer.strategy, FSDP2Strategy):
            self.io.shards_for = trainer.strategy.shards_for
        trainer.strategy.checkpoint_io = self.io
        if stage == "fit":
            require(
                self.parts == "everything" or not self.falls_back,
                "--auto_resume needs whole checkpoints, but checkpoint.save is weights: leave one "
                "of them out.",
            )
            self.io.leaves_out = ONLY_TO_GO_ON if self.parts == "weights" else ()
            self.io.falls_back = self.falls_back
            self.io.needs = TO_GO_ON
            self.io.fits = lambda checkpoint: check_fits(trainer, pl_module, checkpoint)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Remove what a killed run left half written; say what the disk will hold.

        Raises:
            ValueError: the disk has no room for a checkpoint.
        """
        self.boundary = None
        # Asked of all processes: what each has pending goes into the file.
        size = checkpoint_bytes(trainer, pl_module, weights_only=self.parts == "weights")
        if writes_files(trainer):
            for path in folder_of(trainer).glob(".*.tmp"):
                remove(path)
            say_disk_use(folder_of(trainer), size, self.keep_last + self.keep_best + 1)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Signals do again what they did before."""
        self.stop.let_go()

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Any) -> None:
        """From here on our answer to signals replaces Lightning's."""
        self.stop.listen(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Go on from the file that was read, first with the validation that it had yet to see."""
        self.stop.listen(trainer)
        source = self.io.loaded_from
        if source is not None:
            rank_zero_info(f"Going on after iteration {pl_module.iteration}, from {source}")
            self.last_saved = pl_module.iteration
            if writes_files(trainer) and source.parent == folder_of(trainer).resolve():
                make_newest(source)
        self.boundary = Boundary.of(trainer)
        if self.validation_due:
            validate_now(trainer)

    # --- saving ---

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Until its first optimizer step an iteration can be dropped."""
        self.stop.check(trainer)
        self.stop.droppable = True

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        """From its first optimizer step on an iteration is finished."""
        if self.stop.droppable:
            self.stop.check(trainer)
            self.stop.droppable = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when it is time, at the last iteration, and when the process was asked to stop."""
        self.stop.droppable = False
        assert self.boundary is not None
        n, every = pl_module.iteration, self.every_n_iterations
        # An iteration may have several batches (accumulate_grad_batches); it ends with its step.
        if n == self.boundary.iteration:
            return
        log_written(pl_module, self.io)
        self.validation_due = validation_is_due(trainer)
        self.boundary = Boundary.of(trainer)
        if (every and n % every == 0) or n == pl_module.max_iterations:
            self.save(trainer, n)
        self.stop.check(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """A validation can be dropped; the resumed run repeats it."""
        if trainer.state.fn != "fit":
            self.stop.listen(trainer)
        self.stop.check(trainer)
        self.stop.droppable = True

    # Test and predictions can be dropped, too.
    on_test_start = on_predict_start = on_validation_start

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """From here on it is finished: its numbers are about to be logged and counted."""
        self.stop.droppable = False

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save when it is among the best, or over a file that does not know its score yet."""
        if self.boundary is None or trainer.state.fn != "fit":
            return
        self.validation_due = False
        n, report = pl_module.iteration, plain_names(pl_module.evaluation_report)
        if report:
            self.scores[n] = goodness(report, self.monitor, self.mode)
        # Reward functions may have drawn random numbers. The loops stay those of the batch's end.
        self.boundary = replace(self.boundary, random=all_random_state())
        if n in (self.last_saved, *best_of(self.scores, self.keep_best)):
            self.save(trainer, n)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save the final state, if a limit other than `max_iterations` ended the training."""
        self._save_if_missing(trainer, pl_module.iteration)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """When asked to stop, save what stands between iterations; let no save be cut off."""
        if isinstance(exception, Stopped) and self.boundary is not None:
            n = self.boundary.iteration
            set_all_random_state(self.boundary.random)  # a dropped iteration may have drawn
            self._save_if_missing(trainer, n)
            rank_zero_info(f"Stopped after iteration {n}: {STOPPED[self.parts]}")
        self._settle()
        self.stop.let_go()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Leave out what a dropped iteration or a validation has added to the loops' progress."""
        if self.boundary is not None and self.boundary.iteration == pl_module.iteration:
            checkpoint["loops"]["fit_loop"] = self.boundary.fit_loop
            checkpoint["epoch"] = self.boundary.epoch

    def save(self, trainer: Any, iteration: int) -> None:
        """Write `iteration=000100.ckpt` in the background, then point to it and tidy up.

        A disk that refuses costs this file, not the run; the older ones are still there.
        """
        if trainer.fast_dev_run:
            return
        folder = folder_of(trainer)
        best = best_of(self.scores, self.keep_best)
        self._settle()
        self.last_saved, self.failed = iteration, False

        def finish(path: Path) -> None:
            point(folder / LAST, path)
            if tidied(folder, best, self.keep_last):
                self.best_model_path = str(folder / BEST)

        path = folder / f"iteration={iteration:06d}.ckpt"
        trainer.save_checkpoint(path, weights_only=False, storage_options=finish)

    def _save_if_missing(self, trainer: Any, iteration: int) -> None:
        """Save unless this iteration has a file, which the process that writes knows.

        Raises:
            NotSaved: the file could not be written.
        """
        self._settle()
        if trainer.strategy.broadcast(self.failed or self.last_saved != iteration):
            self.save(trainer, iteration)
        try:
            self.io.wait()
        except OSError as error:
            newest = newest_checkpoint(run_folder(trainer))
            earlier = (
                "there is no earlier one" if newest is None else f"the last good one: {newest}"
            )
            raise NotSaved(f"checkpoint not saved: {error}; {earlier}") from error

    def _settle(self) -> None:
        """Wait for the file that is being written; if it fails, a later one may succeed."""
        try:
            self.io.wait()
        except OSError as error:
            self.failed = True
            rank_zero_warn(
                f"checkpoint not saved: {error}; training goes on, and the next one is tried"
            )

    def state_dict(self) -> dict[str, Any]:
        """The scores so far, and whether the newest iteration has yet to be evaluated."""
        scores = {str(n): list(score) for n, score in self.scores.items()}
        return {"scores": scores, "validation_due": self.validation_due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them up."""
        self.scores = {int(n): list(score) for n, score in state_dict["scores"].items()}
        self.validation_due = state_dict["validation_due"]


def tidied(folder: Path, best: list[int], keep_last: int) -> bool:
    """Remove checkpoints that are neither new nor good; whether one is now linked as the best."""
    saved = by_age(folder)
    best = [n for n in best if n in saved]
    for n in best[:1]:
        point(folder / BEST, saved[n])
    for n in set(saved) - set(list(saved)[:keep_last]) - set(best):
        remove(saved[n])
    return bool(best)


def folder_of(trainer: Trainer) -> Path:
    """Where a run's checkpoints are."""
    return checkpoints_of(run_folder(trainer))


def best_of(scores: dict[int, list[float]], number: int) -> list[int]:
    """So many iterations of the highest scores, the best first."""
    known = [n for n, score in scores.items() if not any(map(math.isnan, score))]
    # Of equals the later is better: it has seen more.
    return sorted(known, key=lambda n: (scores[n], n), reverse=True)[:number]


def goodness(report: dict[str, float], monitor: str | None, mode: str | None) -> list[float]:
    """The monitored number of an evaluation, so that larger is better; then what breaks a tie.

    Without a monitor the mean reward breaks a tie, and each number is its mean over the sets of
    prompts that have it.

    Raises:
        ValueError: the evaluation does not have it.
    """
    name = monitor or next(iter(report))
    require(name in report, f"checkpoint.monitor is {name!r}; the evaluation has {list(report)}.")
    sign = SIGN[mode or ("min" if name.endswith("loss") else "max")]
    if monitor is not None:
        return [sign * report[name]]
    wanted = (name.rpartition("/")[2], "reward")
    found = [[x for key, x in report.items() if key.rpartition("/")[2] == own] for own in wanted]
    return [sign * sum(values) / len(values) for values in found if values]


def log_written(pl_module: Any, io: Any) -> None:
    """Log what each finished save took, once."""
    while io.written:
        written = io.written.pop(0)
        numbers = {f"checkpoint/{name}": value for name, value in vars(written).items()}
        pl_module.log_dict(numbers, rank_zero_only=True)


def make_newest(path: Path) -> None:
    """Whatever was written after this checkpoint, it is what a run goes on from."""
    try:
        path.touch()
        point(path.parent / LAST, path)
    except OSError as error:
        rank_zero_warn(f"{path.parent} cannot be written to: {error}; training goes on")


def check_fits(trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
    """Refuse the checkpoint of another model or of other data, before anything is loaded.

    Raises:
        ValueError: what differs.
    """
    found = checkpoint["state_dict"]
    trained = {name for name, weight in pl_module.named_parameters() if weight.requires_grad}
    ours = {n: w for n, w in pl_module.state_dict().items() if n in found or n in trained}
    check_weights(found, ours)
    if trainer.datamodule is None:
        return
    loader = trainer.datamodule.train_dataloader()
    if isinstance(loader, BatchLoader):
        for state in positions_of(checkpoint):
            loader.check(state)
