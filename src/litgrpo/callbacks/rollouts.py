"""Writes training rollouts, which another run can train on."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer

from litgrpo.arguments import require
from litgrpo.distributed.messages import warn_once_on_failure
from litgrpo.protocol import RolloutModule
from litgrpo.rollout.groups import pack_rollout
from litgrpo.rollout.sources.stored import describe_settings, find_rollout_files, rollout_file
from litgrpo.run_folder import ROLLOUTS, run_folder
from litgrpo.tensor_files import copy_to_host, write_file


class SaveRollouts(Callback):
    """Writes each training rollout of each rank to `rollouts/` in the run folder.

    It is the rollout that the iteration trained on, after dynamic sampling. A file that cannot be
    written is skipped with a warning, and training continues.

    Example:
        `Trainer(callbacks=[SaveRollouts()])`; `GRPO(..., source=StoredRollouts("runs/demo"))` reads
        what a run in `runs/demo` wrote.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        require(
            isinstance(pl_module, RolloutModule),
            f"SaveRollouts writes the rollouts of GRPO, and {type(pl_module).__name__} has none. "
            "Leave out the callback.",
        )
        self.settings = describe_settings(pl_module, pl_module.policy.tokenizer, trainer.world_size)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = run_folder(trainer) / ROLLOUTS
        for iteration, ranks in find_rollout_files(folder).items():
            if iteration > pl_module.iteration and trainer.global_rank in ranks:
                rollout_file(folder, iteration, trainer.global_rank).unlink()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = run_folder(trainer) / ROLLOUTS
        with warn_once_on_failure(f"writing rollouts to {folder}"):
            content = {
                "rollout": copy_to_host(pack_rollout(outputs["iteration"].rollout)),
                "settings": self.settings,
            }
            write_file(content, rollout_file(folder, pl_module.iteration, trainer.global_rank))
