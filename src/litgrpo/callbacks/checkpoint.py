"""Checkpoints between iterations: the newest, the best, and whole files only."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from litgrpo.callbacks.report import plain_names
from litgrpo.callbacks.run_folder import CHECKPOINTS, may_write, run_folder

LAST = "last.ckpt"
BEST = "best.ckpt"
NAME = re.compile(r"iteration=(\d+)\.ckpt")


class IterationCheckpoint(Checkpoint):
    """Saves the whole state of the training between two iterations, to `checkpoints/`.

    `last.ckpt` and `best.ckpt` point to the newest and the best. (Lightning's ModelCheckpoint
    counts optimizer steps, of which an iteration may take many or none.)

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
        self.scores: dict[int, float] = {}
        self.best_model_path = ""  # read by Trainer.validate(ckpt_path="best")
        self.last_saved = -1

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Remove what a killed run left half written."""
        if may_write(trainer):
            for path in self._folder(trainer).glob(".*.tmp"):
                path.unlink()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when it is time, at the last iteration, and when the process was asked to stop."""
        n, every = pl_module.iteration, self.every_n_iterations
        due = (every and n % every == 0) or n == pl_module.max_iterations
        # An iteration may have several batches (accumulate_grad_batches); it ends with its step.
        if n > 0 and n != self.last_saved and (due or trainer.received_sigterm):
            self.save(trainer, n)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save when it is among the best, over a file that does not know its score yet."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or not self.keep_best:
            return
        goodness = self._goodness(plain_names(pl_module.evaluation_report))
        if math.isnan(goodness):
            return
        self.scores[pl_module.iteration] = goodness
        if pl_module.iteration in self._best():
            self.save(trainer, pl_module.iteration)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save the final state, if a limit other than `max_iterations` ended the training."""
        if self.last_saved != pl_module.iteration:
            self.save(trainer, pl_module.iteration)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Save when the process was asked to stop after an iteration or in a validation."""
        stopped = isinstance(exception, SIGTERMException) and trainer.state.fn == "fit"
        if stopped and pl_module.iteration not in (0, self.last_saved):
            # A resumed run must not finish half a validation: it lost the other half's answers.
            trainer.fit_loop.epoch_loop.val_loop.batch_progress.reset()
            self.save(trainer, pl_module.iteration)

    def save(self, trainer: Any, iteration: int) -> None:
        """Write `iteration=000100.ckpt`, point to it, and delete what is no longer kept.

        The file gets its name only when it is complete, so a killed save leaves the older ones.
        """
        if trainer.fast_dev_run:
            return
        folder = self._folder(trainer)
        path = folder / f"iteration={iteration:06d}.ckpt"
        unfinished = folder / f".{path.name}.tmp"
        self.last_saved = iteration
        trainer.save_checkpoint(unfinished, weights_only=False)
        if trainer.is_global_zero:
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
            _point(folder / LAST, path)
            self._tidy(folder)
        trainer.strategy.barrier("IterationCheckpoint.save")

    def _tidy(self, folder: Path) -> None:
        saved = {
            int(found[1]): path for path in folder.iterdir() if (found := NAME.fullmatch(path.name))
        }
        # By time, not by number: a run may resume from an older checkpoint.
        by_age = sorted(saved, key=lambda n: saved[n].stat().st_mtime_ns)
        best = [n for n in self._best() if n in saved]
        if best:
            _point(folder / BEST, saved[best[0]])
            self.best_model_path = str(folder / BEST)
        for n in set(saved) - set(by_age[-self.keep_last :]) - set(best):
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
        return run_folder(trainer) / CHECKPOINTS

    def state_dict(self) -> dict[str, Any]:
        """The scores so far, so that a resumed run still knows its best."""
        return {"scores": {str(n): score for n, score in self.scores.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the scores up."""
        self.scores = {int(n): score for n, score in state_dict["scores"].items()}


def _point(link: Path, target: Path) -> None:
    """Make `link` a link to `target` in the same folder, in one step."""
    unfinished = link.with_name(f".{link.name}.tmp")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(target.name)
    unfinished.replace(link)
