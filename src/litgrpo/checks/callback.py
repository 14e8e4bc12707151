"""The start-up checks of a fit."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from litgrpo.checks.invariants import (
    CheckResult,
    Conditions,
    measure_invariants,
    raise_if_violated,
)
from litgrpo.checks.target_checks import measure_targets
from litgrpo.data.pairs import PairBatch
from litgrpo.distributed.device import backend
from litgrpo.distributed.fsdp.units import gathered
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.learning.steppers import TrainerComm
from litgrpo.lightning_compat import find_training_loader
from litgrpo.types import PromptBatch


class InvariantChecks(Callback):
    """Measures that sampling, learning and reference agree, and raises if they do not."""

    batch_class: ClassVar[type[Any]] = PromptBatch
    checked: ClassVar[str] = "sampling, training and reference agree"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        if backend(module.device).static_shapes:
            rank_zero_info(
                "Start-up checks are skipped on this device, which would compile a program for "
                "each of their rows; a fit of the same recipe with configs/hardware/cpu.yaml runs "
                "them."
            )
            return
        # With a large model, or on a busy machine, the checks take minutes.
        rank_zero_info(f"Checking that {self.checked} ...")
        started = time.perf_counter()
        with isolate_rng(include_cuda=module.device.type != "cpu"):
            batch: Any = first_batch(trainer)
            if not isinstance(batch, self.batch_class):
                return  # training raises its own error
            batch = batch.to(module.device)
            with gathered(module), trainer.precision_plugin.train_step_context():
                results = self.measure(module, batch)
        rank_zero_info(f"Invariants, checked in {time.perf_counter() - started:.1f} s:")
        for result in sorted(results, key=lambda result: result.invariant.number):
            rank_zero_info(f"  {result}")
        raise_if_violated(results)

    def measure(self, module: Any, batch: Any) -> list[CheckResult]:
        """Measure that sampling, learning and reference agree."""
        conditions = Conditions(
            dropout=not module.precision.disable_dropout
            or bool(module.lora and module.lora.dropout),
            fresh_reference=module.reference_path is None and module.iteration == 0,
        )
        return measure_invariants(module.rollouter, module.learner, batch, conditions)


class TargetChecks(InvariantChecks):
    """Measures that the targets of supervised fine-tuning are scored as by a plain forward pass."""

    batch_class = PairBatch
    checked = "targets have the log-probabilities of a plain forward pass"

    def measure(self, module: Any, batch: Any) -> list[CheckResult]:
        return measure_targets(module.policy, module.target_logprobs, batch, TrainerComm(module))


def first_batch(trainer: Any) -> Any:
    """Return the first batch of the training data, or None; the training still starts with it."""
    if trainer.datamodule is not None:
        loader = trainer.datamodule.train_dataloader()
    else:
        loader = find_training_loader(trainer)
    # A data module makes a new loader. That of `fit` is used again: restore its generator.
    generator = loader.generator if isinstance(loader, DataLoader) else None
    if generator is None:
        return next(iter(loader), None)
    state = generator.get_state()
    batch = next(iter(loader), None)
    generator.set_state(state)
    return batch
