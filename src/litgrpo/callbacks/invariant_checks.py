"""The checks before training, at the start of a fit."""

from __future__ import annotations

import time
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from litgrpo.checks.invariants import Conditions, measured, refuse
from litgrpo.distributed.device import backend
from litgrpo.distributed.fsdp.units import gathered
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.types import PromptBatch


class InvariantChecks(Callback):
    """Measures that sampling, learning and reference agree, and refuses to train where they do not.

    Nothing is left behind: no parameter, gradient, random state or position in the data changes.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check, and log each statement with its error.

        Raises:
            ValueError: a statement is not true.
        """
        module: Any = pl_module
        if backend(module.device).static_shapes:
            rank_zero_info(
                "Invariants are not measured here, because every row of theirs would be compiled; "
                "a fit of the same recipe with configs/hardware/cpu.yaml measures them."
            )
            return
        started = time.perf_counter()
        conditions = Conditions(
            dropout=not module.settings.precision.disable_dropout
            or bool(module.lora and module.lora.dropout),
            fresh_reference=module.reference_path is None and module.iteration == 0,
        )
        with isolate_rng(include_cuda=module.device.type != "cpu"):
            prompts = first_batch(trainer)
            if not isinstance(prompts, PromptBatch):
                return  # training complains about it
            prompts = prompts.to(module.device)
            with gathered(module), trainer.precision_plugin.train_step_context():
                findings = measured(module.rollouter, module.learner, prompts, conditions)
        rank_zero_info(f"Invariants, checked in {time.perf_counter() - started:.1f} s:")
        for finding in sorted(findings, key=lambda finding: int(finding.name.split()[0])):
            rank_zero_info(f"  {finding}")
        refuse(findings)


def first_batch(trainer: Trainer) -> Any:
    """The first batch of the training data, from a loader of our own where there is a choice.

    None if there is none.
    """
    # Lightning has no public name for where the loader comes from. A data module makes a new one;
    # the iterator of a loader that was given directly is new, and its generator is put back.
    loader = trainer.fit_loop._data_source.dataloader()
    generator = loader.generator if isinstance(loader, DataLoader) else None
    state = None if generator is None else generator.get_state()
    batch = next(iter(loader), None)
    if generator is not None and state is not None:
        generator.set_state(state)
    return batch
