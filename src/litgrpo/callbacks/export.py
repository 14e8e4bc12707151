"""Save the policy as folders that transformers loads: at the end, and at intervals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from litgrpo.arguments import at_least
from litgrpo.distributed.fsdp.units import is_sharded
from litgrpo.distributed.messages import warn_once_on_failure
from litgrpo.run_folder import (
    FINAL_ADAPTER,
    FINAL_MODEL,
    NotSaved,
    run_folder,
    writes_files,
)


class Export(Callback):
    """Saves the policy as folders that transformers loads, also during training.

    `final_model/` of the run folder holds the trained policy. Adapters are merged into it, and also
    saved as `final_adapter/` in PEFT's format.

    Args:
        final: save `final_model/` when the training ends.
        every_n_iterations: save `model-100/` at this interval; 0 disables it.

    Example:
        `Trainer(callbacks=[Export()], default_root_dir="runs/demo")` writes `runs/demo/final_model`
    """

    def __init__(self, final: bool = True, every_n_iterations: int = 0) -> None:
        at_least("export.every_n_iterations", every_n_iterations, 0)
        self.final, self.every_n_iterations = final, every_n_iterations
        self.last_saved = -1

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        # A killed run leaves incomplete folders.
        if writes_files(trainer):
            for folder in run_folder(trainer).glob(".model-*.tmp"):
                folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        n, every = pl_module.iteration, self.every_n_iterations
        # An iteration of SFT may have several batches (accumulate_grad_batches).
        if every > 0 and n > 0 and n % every == 0 and n != self.last_saved:
            self.last_saved = n
            if writes_policy(trainer, pl_module):
                with warn_once_on_failure("writing the policy (export.every_n_iterations)"):
                    self._save(trainer, pl_module, run_folder(trainer) / f"model-{n}")

    def _save(self, trainer: Trainer, pl_module: Any, folder: Path) -> None:
        """Write a folder, which gets its name once it is complete."""
        unfinished = folder.with_name(f".{folder.name}.tmp")
        try:
            _write_policy(pl_module, unfinished)
            if trainer.is_global_zero:
                shutil.rmtree(folder, ignore_errors=True)  # of an earlier process
                unfinished.rename(folder)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
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


def writes_policy(trainer: Any, pl_module: Any) -> bool:
    """Return True on ranks that write the policy or hold a shard of it."""
    return writes_files(trainer) or (is_sharded(pl_module.policy) and not trainer.fast_dev_run)


def _write_policy(pl_module: Any, folder: Path) -> None:
    from litgrpo.models.loading.export import export  # slow: imports transformers

    export(pl_module.policy, folder)


def _write_adapter(pl_module: Any, folder: Path) -> None:
    from litgrpo.models.loading.export import export_adapter  # slow: imports transformers

    if pl_module.policy.has_adapter:
        export_adapter(pl_module.policy, folder)
