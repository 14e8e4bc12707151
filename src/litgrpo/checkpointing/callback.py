"""Checkpoints between iterations: the newest, the best, and whole files only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from litgrpo.callbacks.report import plain_names
from litgrpo.callbacks.run_folder import (
    BEST,
    LAST,
    by_age,
    checkpoints_of,
    may_write,
    run_folder,
)
from litgrpo.callbacks.validating import validate_now, validation_is_due
from litgrpo.checkpointing.io import CheckedIO, point
from litgrpo.checkpointing.manifest import positions_of, rebuilt
from litgrpo.checkpointing.signals import Stopped, StopRequest
from litgrpo.data.sampler import BatchLoader
from litgrpo.models.loading import check_weights


class IterationCheckpoint(Checkpoint):
    """Saves the whole state of the training between two iterations, to `checkpoints/`.

    `last.ckpt` and `best.ckpt` point to the newest and the best. The file is written beside the
    training, which waits for the copy to the host's memory only. On SIGTERM or SIGINT the
    iteration is dropped before its first optimizer step and finished after it, then the state is
    saved and the program ends with 143 or 130; a second signal ends it at once. (Lightning's
    ModelCheckpoint counts optimizer steps, of which an iteration may take many or none.)

    Args:
        every_n_iterations: how often to save; 0 saves the best and the final state only.
        keep_last: how many of the newest to keep.
        keep_best: how many of the best to keep; 0 keeps none for being good.
        monitor: which number of an evaluation says how good; the first one when not given.
        mode: whether the largest or the smallest is best; when not given, the smallest of a loss
            and the largest of anything else.
    """

    def __init__(
        self,
        every_n_iterations: int = 50,
        keep_last: int = 2,
        keep_best: int = 1,
        monitor: str | None = None,
        mode: Literal["max", "min"] | None = None,
    ) -> None:
        """Check the numbers."""
        if keep_last < 1:
            raise ValueError(f"checkpoint.keep_last is {keep_last}: last.ckpt needs at least 1.")
        if every_n_iterations < 0 or keep_best < 0:
            raise ValueError("checkpoint.every_n_iterations and keep_best must not be negative.")
        self.every_n_iterations = every_n_iterations
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.monitor = monitor
        self.mode = mode
        self.falls_back = False  # whether a damaged file is passed over: cli.py fit --auto_resume
        self.scores: dict[int, float] = {}
        self.best_model_path = ""  # read by Trainer.validate(ckpt_path="best")
        self.last_saved = -1
        self.failed = False  # whether the newest file could not be written
        self.validation_due = False
        self.io = CheckedIO(None)
        self.stop = StopRequest()
        # The state after the newest iteration: what is saved, now or when a later one is dropped.
        self.between: dict[str, Any] = {}

    # --- starting ---

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have files verified, before Lightning reads the first."""
        self.io = CheckedIO(trainer.strategy.checkpoint_io)
        trainer.strategy.checkpoint_io = self.io
        if stage == "fit":
            self.io.falls_back = self.falls_back
            self.io.fits = lambda checkpoint: check_fits(trainer, pl_module, checkpoint)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Remove what a killed run left half written."""
        if may_write(trainer):
            for path in self._folder(trainer).glob(".*.tmp"):
                path.unlink()

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
            if may_write(trainer) and source.parent == self._folder(trainer).resolve():
                make_newest(source)
        self._remember(trainer)
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
        n, every = pl_module.iteration, self.every_n_iterations
        # An iteration may have several batches (accumulate_grad_batches); it ends with its step.
        if n == self.between["iteration"]:
            return
        self._report(pl_module)
        self.validation_due = validation_is_due(trainer)
        self._remember(trainer)
        if (every and n % every == 0) or n == pl_module.max_iterations:
            self.save(trainer, n)
        self.stop.check(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """A validation can be dropped; the resumed run repeats it."""
        if trainer.state.fn != "fit":
            self.stop.listen(trainer)
        self.stop.check(trainer)
        self.stop.droppable = True

    def on_test_start(self, trainer: Trainer, pl_module: Any) -> None:
        """A test can be dropped."""
        self.on_validation_start(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Predictions can be dropped."""
        self.on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save when it is among the best, or over a file that does not know its score yet."""
        self.stop.droppable = False
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self.validation_due = False
        n, goodness = pl_module.iteration, self._goodness(plain_names(pl_module.evaluation_report))
        if self.keep_best and not math.isnan(goodness):
            self.scores[n] = goodness
        self._remember(trainer, at_batch_end=False)
        if n in (self.last_saved, *self._best()):
            self.save(trainer, n)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save the final state, if a limit other than `max_iterations` ended the training."""
        self._settled(trainer, strict=False)
        if self._missing(trainer, pl_module.iteration):
            self._remember(trainer, at_batch_end=False)
            self.save(trainer, pl_module.iteration)
        self._settled(trainer, strict=True)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """When asked to stop, save what stands between iterations; let no save be cut off."""
        if isinstance(exception, Stopped) and self.between:
            n = self.between["iteration"]
            self._settled(trainer, strict=False)
            if self._missing(trainer, n):
                self.save(trainer, n)
            self._settled(trainer, strict=True)
            rank_zero_info(f"Stopped after iteration {n}: `--ckpt_path last` goes on from there.")
        else:
            self._settled(trainer, strict=False)

    def _remember(self, trainer: Any, *, at_batch_end: bool = True) -> None:
        """Take down what a checkpoint of now holds.

        Weights and moments are not copied: a state is saved before the next optimizer step
        changes them. Lightning resumes from the loops as they are at the end of a batch, so a
        later state keeps those.
        """
        loops = self.between.get("loops")
        # Lightning has no public name for what `trainer.save_checkpoint` writes.
        dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if not at_batch_end and loops is not None:
            dumped["loops"] = loops
        self.between = rebuilt(dumped, lambda tensor: tensor)
        self.between["iteration"] = trainer.lightning_module.iteration

    def save(self, trainer: Any, iteration: int) -> None:
        """Write `iteration=000100.ckpt` in the background, then point to it and tidy up.

        A disk that refuses costs this file, not the run; the older ones are still there.
        """
        if trainer.fast_dev_run:
            return
        folder = self._folder(trainer)
        path = folder / f"iteration={iteration:06d}.ckpt"
        best = self._best()
        self._settled(trainer, strict=False)
        self.last_saved, self.failed = iteration, False

        def finish(path: Path) -> None:
            point(folder / LAST, path)
            self._tidy(folder, best)

        trainer.strategy.save_checkpoint(self.between, path, storage_options=finish)
        trainer.strategy.barrier("IterationCheckpoint.save")

    def _settled(self, trainer: Trainer, *, strict: bool) -> None:
        """Wait for the file that is being written."""
        try:
            self.io.wait()
        except OSError as error:
            said = f"checkpoint not saved: {error}"
            if strict:
                raise RuntimeError(
                    f"{said}; the last good one is in {self._folder(trainer)}"
                ) from error
            self.failed = True
            rank_zero_warn(f"{said}; training goes on, the older ones are still there")

    def _missing(self, trainer: Any, iteration: int) -> bool:
        """Whether this iteration has no file; the process that writes knows."""
        return bool(trainer.strategy.broadcast(self.failed or self.last_saved != iteration))

    def _report(self, pl_module: Any) -> None:
        """Log what the newest file took, once."""
        written, self.io.written = self.io.written, None
        if written is not None:
            numbers = {f"checkpoint/{name}": value for name, value in vars(written).items()}
            pl_module.log_dict(numbers, rank_zero_only=True)

    def _tidy(self, folder: Path, best: list[int]) -> None:
        saved = by_age(folder)
        best = [n for n in best if n in saved]
        if best:
            point(folder / BEST, saved[best[0]])
            self.best_model_path = str(folder / BEST)
        for n in set(saved) - set(list(saved)[: self.keep_last]) - set(best):
            saved[n].unlink()

    def _best(self) -> list[int]:
        # Of equals the later is better: it has seen more.
        return sorted(self.scores, key=lambda n: (-self.scores[n], -n))[: self.keep_best]

    def _goodness(self, report: dict[str, float]) -> float:
        if not report:
            return math.nan
        name = next(iter(report)) if self.monitor is None else self.monitor
        if name not in report:
            raise ValueError(f"checkpoint.monitor is {name!r}; the evaluation has {list(report)}.")
        mode = self.mode or ("min" if name.endswith("loss") else "max")
        return report[name] if mode == "max" else -report[name]

    def _folder(self, trainer: Trainer) -> Path:
        return checkpoints_of(run_folder(trainer))

    def state_dict(self) -> dict[str, Any]:
        """The scores so far, and whether the newest iteration has yet to be evaluated."""
        scores = {str(n): score for n, score in self.scores.items()}
        return {"scores": scores, "validation_due": self.validation_due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them up."""
        self.scores = {int(n): score for n, score in state_dict["scores"].items()}
        self.validation_due = state_dict["validation_due"]


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
