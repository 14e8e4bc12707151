"""The policy as folders that plain transformers loads: at the end, and along the way."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint

from litgrpo.arguments import at_least
from litgrpo.callbacks.run_folder import TRAINING_STATE, NotSaved, run_folder, writes_files
from litgrpo.distributed.fsdp.units import is_divided

NAME = re.compile(r"checkpoint-(\d+)")


class Export(Callback):
    """Saves the policy in Hugging Face format: `final_model/` of the run folder at the end.

    With adapters they are merged into it, and saved beside it as `final_adapter/` in PEFT's format.

    Args:
        final: save `final_model/` when the training ends.
    """

    def __init__(self, final: bool = True) -> None:
        self.final = final

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save what was learned.

        Raises:
            NotSaved: the disk refuses.
        """
        folder = run_folder(trainer) / "final_model"
        if not (self.final and takes_part(trainer, pl_module)):
            return
        try:
            _write_policy(pl_module, folder)
            _write_adapter(pl_module, run_folder(trainer) / "final_adapter")
        except OSError as error:
            raise NotSaved(
                f"{folder} is not complete: {error}; remove it and make it from the last "
                f"checkpoint: export {run_folder(trainer)} {folder}"
            ) from error


class HFCheckpoints(Checkpoint):
    """Saves `checkpoint-100/` along the way: the policy in Hugging Face format, and how to go on.

    `from_pretrained` of plain transformers loads such a folder; `--ckpt_path RUN/checkpoint-100`
    goes on training from it. (The checkpoints in `checkpoints/` are kept anyway; they are smaller,
    and only this program reads them.)

    Args:
        every_n_iterations: how often; 0 does not.
        keep_last: how many of the newest to keep; all when not given.
    """

    def __init__(self, every_n_iterations: int = 0, keep_last: int | None = None) -> None:
        at_least("hf_checkpoints.every_n_iterations", every_n_iterations, 0)
        at_least("hf_checkpoints.keep_last", keep_last, 1)
        self.every_n_iterations = every_n_iterations
        self.keep_last = keep_last
        self.last_saved = -1

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Remove what a killed run left half written."""
        if writes_files(trainer):
            for folder in run_folder(trainer).glob(".checkpoint-*.tmp"):
                shutil.rmtree(folder)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when it is time."""
        n, every = pl_module.iteration, self.every_n_iterations
        # An iteration may have several batches (accumulate_grad_batches); it ends with its step.
        if every > 0 and n > 0 and n % every == 0 and n != self.last_saved:
            self.last_saved = n
            self._save(trainer, pl_module, run_folder(trainer) / f"checkpoint-{n}")

    def _save(self, trainer: Any, pl_module: Any, folder: Path) -> None:
        """Write a folder; it gets its name only when it is complete."""
        if trainer.fast_dev_run:
            return
        unfinished = folder.with_name(f".{folder.name}.tmp")
        trainer.save_checkpoint(unfinished / TRAINING_STATE)
        if takes_part(trainer, pl_module):
            _write_policy(pl_module, unfinished)
        if trainer.is_global_zero:
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier process, if it is there
            unfinished.rename(folder)
            self._tidy(folder.parent)
        trainer.strategy.barrier("HFCheckpoints")

    def _tidy(self, run: Path) -> None:
        saved = [path for path in run.iterdir() if NAME.fullmatch(path.name)]
        # By time, not by number: a run may resume from an older one.
        by_age = sorted(saved, key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for folder in set(saved) - set(by_age[: self.keep_last]):  # [:None] is all of them
            shutil.rmtree(folder)


def takes_part(trainer: Any, pl_module: Any) -> bool:
    """Whether this process writes, or has a share of what is written."""
    return writes_files(trainer) or (is_divided(pl_module.policy) and not trainer.fast_dev_run)


def _write_policy(pl_module: Any, folder: Path) -> None:
    from litgrpo.models.export import export  # slow: imports transformers

    export(pl_module.policy, folder)


def _write_adapter(pl_module: Any, folder: Path) -> None:
    from litgrpo.models.export import export_adapter  # slow: imports transformers

    if pl_module.policy.has_adapter:
        export_adapter(pl_module.policy, folder)
