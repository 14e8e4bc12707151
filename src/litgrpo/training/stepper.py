"""What the learner needs of an optimizer, so that it need not know who drives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

Result = TypeVar("Result")


class Stepper(Protocol):
    """Backward passes and optimizer steps."""

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a loss.

        Args:
            loss: [] of one micro-batch.
            last: whether it is the last one of its optimizer step on this process; gradients are
                averaged over processes then, and not before.
        """

    def step(self, finish: Callable[[list[Parameter]], Result]) -> Result:
        """Take an optimizer step and forget the gradients.

        Args:
            finish: is called once with the trained parameters, when their gradients are those of
                all processes and in their true scale. It may change gradients or drop them.

        Returns:
            What `finish` returned.
        """


class PlainStepper:
    """A torch optimizer in one process, without a trainer: for notebooks and tests.

    Args:
        optimizer: over the trained parameters.
        lr_scheduler: is stepped after each optimizer step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a loss."""
        loss.backward()

    def step(self, finish: Callable[[list[Parameter]], Result]) -> Result:
        """Take an optimizer step; see `Stepper.step`."""
        result = finish([p for group in self.optimizer.param_groups for p in group["params"]])
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        return result
