"""The trained policy as a folder that plain transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from litgrpo.callbacks.run_folder import may_write, run_folder


class Export(Callback):
    """Saves the policy in Hugging Face format: `final_model/` of the run folder at the end.

    Args:
        final: save `final_model/` when the training ends.
        every_n_iterations: how often to save to `exports/iteration-000100/`, too; 0 does not.
    """

    def __init__(self, final: bool = True, every_n_iterations: int = 0) -> None:
        """Hold the choices."""
        self.final = final
        self.every_n_iterations = every_n_iterations

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when it is time."""
        n = pl_module.iteration
        folder = run_folder(trainer) / "exports" / f"iteration-{n:06d}"
        due = n > 0 and self.every_n_iterations > 0 and n % self.every_n_iterations == 0
        if due and not folder.exists():
            self._save(trainer, pl_module, folder)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save what was learned."""
        if self.final:
            self._save(trainer, pl_module, run_folder(trainer) / "final_model")

    def _save(self, trainer: Trainer, pl_module: Any, folder: Path) -> None:
        if may_write(trainer):
            from litgrpo.policies.loading import export  # slow: imports transformers

            export(pl_module.policy, folder)
