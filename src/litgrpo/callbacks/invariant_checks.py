"""The start-up checks of a fit."""

from __future__ import annotations

import time
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from litgrpo.checks.invariants import Conditions, measure_invariants, raise_if_violated
from litgrpo.distributed.device import backend
from litgrpo.distributed.fsdp.units import gathered
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.training.lightning_compat import find_training_loader
from litgrpo.types import PromptBatch


class InvariantChecks(Callback):
    """Measures that sampling, learning and reference agree, and raises if they do not.

    The checks leave no trace: parameters, gradients, random state and position in the data stay
    unchanged.

    Example:
        `Trainer(callbacks=[InvariantChecks()])`; `GRPO.configure_callbacks` adds it.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the checks, and log each with its error.

        Raises:
            ValueError: a check failed.
        """
        module: Any = pl_module
        if backend(module.device).static_shapes:
            rank_zero_info(
                "Start-up checks are skipped on this device, which would compile a program for "
                "each of their rows; a fit of the same recipe with configs/hardware/cpu.yaml runs "
                "them."
            )
            return
        started = time.perf_counter()
        conditions = Conditions(
            dropout=not module.precision.disable_dropout
            or bool(module.lora and module.lora.dropout),
            fresh_reference=module.reference_path is None and module.iteration == 0,
        )
        with isolate_rng(include_cuda=module.device.type != "cpu"):
            prompts = first_batch(trainer)
            if not isinstance(prompts, PromptBatch):
                return  # training raises its own error
            prompts = prompts.to(module.device)
            with gathered(module), trainer.precision_plugin.train_step_context():
                results = measure_invariants(module.rollouter, module.learner, prompts, conditions)
        rank_zero_info(f"Invariants, checked in {time.perf_counter() - started:.1f} s:")
        for result in sorted(results, key=lambda result: result.invariant.number):
            rank_zero_info(f"  {result}")
        raise_if_violated(results)


def first_batch(trainer: Any) -> Any:
    """The first batch of the training data, without moving the position of the training.

    A data module makes a new loader. The iterator of a loader that was passed to `fit` is new, and
    the state of its generator is restored.

    Returns:
        The batch; None if there is none.
    """
    if trainer.datamodule is not None:
        loader = trainer.datamodule.train_dataloader()
    else:
        loader = find_training_loader(trainer)
    generator = loader.generator if isinstance(loader, DataLoader) else None
    if generator is None:
        return next(iter(loader), None)
    state = generator.get_state()
    batch = next(iter(loader), None)
    generator.set_state(state)
    return batch
