"""Backward passes and optimizer steps, with a Lightning trainer and without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from lightning import LightningModule
from torch import Tensor
from torch.nn import Parameter

from litgrpo.distributed.device import backend
from litgrpo.distributed.fsdp.units import is_sharded
from litgrpo.distributed.memory import check_other_ranks
from litgrpo.lightning_compat import find_trainer
from litgrpo.tensors import full_tensor
from litgrpo.types import Stats

# Clips the gradients of these parameters, or drops them and returns None.
ClipGradients = Callable[[list[Parameter]], Stats | None]


class Stepper(Protocol):
    """Backward passes and optimizer steps, as the learner needs them."""

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a loss.

        Args:
            loss: [] of one micro-batch.
            is_last: True for the last micro-batch of an optimizer step on this rank: its backward
                pass averages the gradients over ranks (on XLA devices `step` does).
        """

    def step(self, clip_gradients: ClipGradients) -> Stats | None:
        """Take an optimizer step, step the schedule and clear the gradients.

        Args:
            clip_gradients: is called once with the trained parameters, when their gradients are
                averaged over ranks and unscaled, just before the optimizer uses them.

        Returns:
            The result of `clip_gradients`.
        """


class PlainStepper:
    """Steps of a torch optimizer in one process, without a trainer: for notebooks and tests.

    Args:
        optimizer: over the trained parameters.
        lr_scheduler: is stepped after each optimizer step.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> stepper = PlainStepper(torch.optim.SGD([weight], lr=0.5))
        >>> stepper.backward((2 * weight).sum(), is_last=True)
        >>> stepper.step(lambda parameters: {})
        {}
        >>> weight.item()
        0.0
    """

    def __init__(self, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a loss."""
        loss.backward()

    def step(self, clip_gradients: ClipGradients) -> Stats | None:
        """Clip the gradients and take an optimizer step."""
        stats = clip_gradients(list_parameters(self.optimizer))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        return stats


class TrainerStepper:
    """Steps through Lightning's strategy and precision plugin, by manual optimization.

    Args:
        module: attached to its trainer; its `on_before_optimizer_step` calls
            `clip_before_step`.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.optimizer: Any = module.optimizers()
        self.clip_gradients: ClipGradients | None = None
        self.stats: Stats | None = None
        several = module.trainer.world_size > 1 and not backend(module.device).static_shapes
        self.checks_other_ranks = several
        # DDP averages in backward passes; sharded weights (FSDP2) have their own collectives there.
        self.averages_last = several and not any(map(is_sharded, module.modules()))

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a loss; after the last one, average the gradients over ranks."""
        if is_last and self.averages_last:
            # A separate pass: a rank that runs out of memory in a backward pass must not leave
            # the others waiting in the all-reduce of the same pass.
            self._add_gradient(loss, average=False)
            check_other_ranks(TrainerComm(self.module))
            self._add_gradient(zero_loss(list_parameters(self.optimizer)), average=True)
            return
        if is_last and self.checks_other_ranks:
            # A rank that ran out of memory will not reach the collectives of this pass.
            check_other_ranks(TrainerComm(self.module))
        self._add_gradient(loss, average=is_last)

    def _add_gradient(self, loss: Tensor, *, average: bool) -> None:
        with self.optimizer.toggle_model(sync_grad=average):
            self.module.manual_backward(loss)

    def step(self, clip_gradients: ClipGradients) -> Stats | None:
        """Take an optimizer step and one of the schedule."""
        # Inside of Lightning's `step` gradients are unscaled (fp16) and averaged over ranks (XLA);
        # it then calls the module's hook, where they can be clipped. The calls are
        # optimizer.step -> GRPO.on_before_optimizer_step -> clip_before_step -> clip_gradients
        # (Learner._clip_gradients). Hooks return nothing, so the result is left in `self.stats`.
        self.clip_gradients = clip_gradients
        self.optimizer.step()
        self.clip_gradients = None
        self.optimizer.zero_grad()
        scheduler: Any = self.module.lr_schedulers()
        if scheduler is not None:
            scheduler.step()
        return self.stats

    def clip_before_step(self) -> None:
        """Clip the gradients, which are complete now."""
        assert self.clip_gradients is not None
        self.stats = self.clip_gradients(list_parameters(self.optimizer))


def list_parameters(optimizer: Any) -> list[Parameter]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def clip_to_norm(parameters: list[Parameter], max_norm: float | None) -> Tensor:
    """Scale gradients down to this norm, None leaves them; return their norm [] before."""
    limit = torch.inf if max_norm is None else max_norm
    return full_tensor(torch.nn.utils.clip_grad_norm_(parameters, limit))


def drop_gradients(parameters: list[Parameter]) -> None:
    """Remove the gradients: optimizers then change neither weights nor their state."""
    for parameter in parameters:
        parameter.grad = None


class _ZeroLoss(torch.autograd.Function):
    """See `zero_loss`."""

    @staticmethod
    def forward(ctx: Any, *parameters: Parameter) -> Tensor:
        ctx.parameters = parameters
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return tuple(parameter.new_zeros(()).expand_as(parameter) for parameter in ctx.parameters)


def zero_loss(parameters: list[Parameter]) -> Tensor:
    """Return a loss [] of 0, whose backward pass adds 0 to all gradients.

    DDP averages the gradient of a parameter over ranks when a backward pass reaches it, with what
    earlier passes have added. This pass needs no activations, so it does not run out of memory.

    Args:
        parameters: at least one.

    Example:
        >>> weight = Parameter(torch.ones(2))
        >>> zero_loss([weight]).backward()
        >>> weight.grad
        tensor([0., 0.])
    """
    loss: Tensor = _ZeroLoss.apply(*parameters)
    return loss


class TrainerComm:
    """`Comm` of the trainer that a module is attached to; one process without a trainer.

    Args:
        module: may be attached to a trainer later.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.module.trainer.world_size if is_attached(self.module) else 1

    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor over ranks."""
        return self._reduce(value, "sum")

    def max(self, value: Tensor) -> Tensor:
        """Elementwise maximum over ranks."""
        return self._reduce(value, "max")

    def _reduce(self, value: Tensor, operation: str) -> Tensor:
        if self.world_size == 1:
            return value
        on_device = value.to(self.module.device)  # NCCL cannot reduce host tensors
        reduced = self.module.trainer.strategy.reduce(on_device, reduce_op=operation)
        return reduced.to(value.device)

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate the flat tensors of all ranks, each padded with NaN to the longest."""
        if self.world_size == 1:
            return values
        missing = int(self.max(torch.tensor(float(len(values))))) - len(values)
        padded = torch.nn.functional.pad(values, (0, missing), value=torch.nan)
        on_device = padded.to(self.module.device)  # NCCL cannot gather host tensors
        return self.module.trainer.strategy.all_gather(on_device).flatten().to(values.device)


def is_attached(module: Any) -> bool:
    """Return True if a module has a trainer; `module.trainer` raises if it has none."""
    return find_trainer(module) is not None
