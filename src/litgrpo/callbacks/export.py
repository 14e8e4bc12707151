"""Save the policy as folders that transformers loads: at the end, and at intervals."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint

from litgrpo.arguments import at_least
from litgrpo.callbacks.files import write_text
from litgrpo.callbacks.run_folder import (
    FINAL_ADAPTER,
    FINAL_MODEL,
    TRAINING_STATE,
    NotSaved,
    run_folder,
    writes_files,
)
from litgrpo.distributed.fsdp.units import is_sharded
from litgrpo.distributed.messages import warn_once_on_failure

NAME = re.compile(r"checkpoint-(\d+)")
SAVE_NUMBER = ".save_number"  # in such a folder: 1 for the first that the run saved


class Export(Callback):
    """Saves the policy in Hugging Face format: `final_model/` of the run folder at the end.

    Adapters are merged into it, and also saved as `final_adapter/` in PEFT's format.

    Args:
        final: save `final_model/` when the training ends.

    Example:
        `Trainer(callbacks=[Export()], default_root_dir="runs/demo")` writes `runs/demo/final_model`
    """

    def __init__(self, final: bool = True) -> None:
        self.final = final

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save the trained policy.

        Raises:
            NotSaved: the disk is full, for example.
        """
        folder = run_folder(trainer) / FINAL_MODEL
        if not (self.final and writes_policy(trainer, pl_module)):
            return
        try:
            _write_policy(pl_module, folder)
            _write_adapter(pl_module, run_folder(trainer) / FINAL_ADAPTER)
        except OSError as error:
            raise NotSaved(
                f"{folder} is not complete: {error}; remove it and export the last "
                f"checkpoint: export {run_folder(trainer)} {folder}"
            ) from error


class HFCheckpoints(Checkpoint):
    """Saves `checkpoint-100/` at intervals: the policy in Hugging Face format, and the run's state.

    `from_pretrained` of transformers loads such a folder; `--ckpt_path RUN/checkpoint-100` resumes
    training from it. (The checkpoints in `checkpoints/` are written in any case; they are smaller,
    and only litgrpo reads them.)

    Args:
        every_n_iterations: interval; 0 disables it.
        keep_last: number of newest folders to keep; default: all.

    Example:
        `Trainer(callbacks=[HFCheckpoints(every_n_iterations=100, keep_last=2)])`
    """

    def __init__(self, every_n_iterations: int = 0, keep_last: int | None = None) -> None:
        at_least("hf_checkpoints.every_n_iterations", every_n_iterations, 0)
        at_least("hf_checkpoints.keep_last", keep_last, 1)
        self.every_n_iterations = every_n_iterations
        self.keep_last = keep_last
        self.last_saved = -1

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Remove incomplete folders of a killed run."""
        if writes_files(trainer):
            for folder in run_folder(trainer).glob(".checkpoint-*.tmp"):
                folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is due."""
        n, every = pl_module.iteration, self.every_n_iterations
        # An iteration of SFT may have several batches (accumulate_grad_batches).
        if every > 0 and n > 0 and n % every == 0 and n != self.last_saved:
            self.last_saved = n
            self._save(trainer, pl_module, run_folder(trainer) / f"checkpoint-{n}")

    def _save(self, trainer: Any, pl_module: Any, folder: Path) -> None:
        """Write a folder, which gets its name once it is complete; a failure is logged."""
        if trainer.fast_dev_run:
            return
        unfinished = folder.with_name(f".{folder.name}.tmp")
        try:
            trainer.save_checkpoint(unfinished / TRAINING_STATE)
            if writes_policy(trainer, pl_module):
                _write_policy(pl_module, unfinished)
            if trainer.is_global_zero:
                number = 1 + max(
                    [save_number(each)[0] for each in find_folders(folder.parent)] + [0]
                )
                write_text(unfinished / SAVE_NUMBER, str(number))
                shutil.rmtree(folder, ignore_errors=True)  # of an earlier process
                unfinished.rename(folder)
                self._prune(folder.parent)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            with warn_once_on_failure(f"writing hf_checkpoints to {folder.parent}"):
                raise
        trainer.strategy.barrier("HFCheckpoints")

    def _prune(self, run: Path) -> None:
        # Sorted by save, not by number: a run may resume from an older folder.
        newest_first = sorted(find_folders(run), key=save_number, reverse=True)
        for folder in newest_first[self.keep_last or len(newest_first) :]:
            shutil.rmtree(folder)


def find_folders(run: Path) -> list[Path]:
    """Return the complete `checkpoint-N` folders of a run."""
    return [path for path in run.iterdir() if NAME.fullmatch(path.name)]


def save_number(folder: Path) -> tuple[int, int]:
    """Return the position of a folder in the order of saves, then its iteration.

    Times of files would change when they are copied or the clock is set.
    """
    name = NAME.fullmatch(folder.name)
    file = folder / SAVE_NUMBER
    text = file.read_text(errors="replace") if file.is_file() else ""
    return int(text) if text.isdecimal() else 0, int(name[1]) if name else 0


def writes_policy(trainer: Any, pl_module: Any) -> bool:
    """Return True on ranks that write the policy or hold a shard of it."""
    return writes_files(trainer) or (is_sharded(pl_module.policy) and not trainer.fast_dev_run)


def _write_policy(pl_module: Any, folder: Path) -> None:
    from litgrpo.models.export import export  # slow: imports transformers

    export(pl_module.policy, folder)


def _write_adapter(pl_module: Any, folder: Path) -> None:
    from litgrpo.models.export import export_adapter  # slow: imports transformers

    if pl_module.policy.has_adapter:
        export_adapter(pl_module.policy, folder)
