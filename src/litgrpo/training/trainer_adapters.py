"""What Lightning's trainer does for the learner: collective operations, optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import Parameter

from litgrpo.distributed.agreement import check_others
from litgrpo.distributed.device import backend
from litgrpo.training.lightning_compat import find_trainer
from litgrpo.training.stepper import Result


class TrainerComm:
    """`Comm` of the trainer that a module is attached to; one process where there is none.

    Args:
        module: attached to its trainer, or not yet.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.module.trainer.world_size if is_attached(self.module) else 1

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over processes."""
        return self._reduced(value, "sum")

    def max(self, value: Tensor) -> Tensor:
        """The elementwise maximum of a tensor over processes."""
        return self._reduced(value, "max")

    def _reduced(self, value: Tensor, operation: str) -> Tensor:
        if self.world_size == 1:
            return value
        there = value.to(self.module.device)  # backends reduce what is on their device
        return self.module.trainer.strategy.reduce(there, reduce_op=operation).to(value.device)

    def gather(self, values: Tensor) -> Tensor:
        """A flat tensor of every process, one after another, each filled up with NaN."""
        if self.world_size == 1:
            return values
        missing = int(self.max(torch.tensor(float(len(values))))) - len(values)
        padded = torch.nn.functional.pad(values, (0, missing), value=torch.nan)
        return self.module.trainer.strategy.all_gather(padded).flatten()


def is_attached(module: LightningModule) -> bool:
    """Return True for a module that has a trainer."""
    return find_trainer(module) is not None


def passes_over_data(module: LightningModule) -> float:
    """How often the training prompts have been seen, the batch at hand included."""
    trainer = module.trainer
    return trainer.current_epoch + (trainer.fit_loop.batch_idx + 1) / trainer.num_training_batches


class TrainerStepper:
    """`Stepper` that backpropagates and steps through Lightning's strategy and precision plugin.

    Args:
        module: in manual optimization, attached to its trainer.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.optimizer: Any = module.optimizers()
        self.agrees = module.trainer.world_size > 1 and not backend(module.device).static_shapes

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a loss; processes average theirs after the last one."""
        if last and self.agrees:
            check_others(TrainerComm(self.module))  # before they wait for each other
        with self.optimizer.toggle_model(sync_grad=last):
            self.module.manual_backward(loss)

    def step(self, finish: Callable[[list[Parameter]], Result]) -> Result:
        """Take an optimizer step and one of the schedule; see `Stepper.step`.

        Gradients are unscaled and reduced inside of Lightning's `step`, just before its hook
        `on_before_optimizer_step`: they are clipped there, by a callback that lives for this step.
        """
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        results: list[Result] = []
        hook = _BeforeStep(lambda: results.append(finish(trained)))
        callbacks = self.module.trainer.callbacks  # type: ignore[attr-defined]
        callbacks.append(hook)
        try:
            self.optimizer.step()
        finally:
            callbacks.remove(hook)
        self.optimizer.zero_grad()
        scheduler: Any = self.module.lr_schedulers()
        if scheduler is not None:
            scheduler.step()
        return results[0]


class _BeforeStep(Callback):
    """Calls a function when gradients are ready."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.function()
