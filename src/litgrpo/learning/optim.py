"""The default optimizer, and learning-rate schedules with a warm-up."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from litgrpo.arguments import above, at_least, at_most, require


def check_max_grad_norm(name: str, value: float | None) -> None:
    """Reject a limit of 0 or less: it would remove every gradient."""
    require(
        value is None or value > 0,
        f"{name} is {value}; it must be above 0. Set it to null to leave gradients as they are "
        "(in TRL and transformers, 0 does that).",
    )


class DefaultAdamW(AdamW):
    """AdamW whose default learning rate depends on what is trained; logged at start-up.

    GRPO: 1e-6 for all weights, 1e-5 for adapters. SFT: 2e-5 and 2e-4. Models trained from
    scratch: 3e-4 for the embedded model, 1e-3 for `scratch`.

    Args:
        params: trained parameters.
        lr: learning rate; None: the default above.
        betas: decay of the running means of gradient and squared gradient.
        eps: added to the denominator.
        weight_decay: fraction of each weight, times lr, that a step subtracts.

    Source: defaults and table of learning rates of TRL (GRPOConfig, SFTConfig, PEFT integration).
    """

    def __init__(
        self,
        params: Iterable[Parameter],
        lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, lr or 0.0, betas, eps, weight_decay)
        self.needs_lr = lr is None

    def set_default_lr(self, lr: float) -> None:
        """Set the learning rate, unless the user gave one."""
        for group in self.param_groups:
            group["lr"] = lr if self.needs_lr else group["lr"]
        self.needs_lr = False


class Warmup(LRScheduler, ABC):
    """Linear warm-up to the learning rate, then a decay to a fraction of it.

    A checkpoint only holds the position: a run resumed with another length, warm-up or learning
    rate follows the new curve from there.

    Args:
        optimizer: whose learning rates are the peaks.
        warmup: fraction of all optimizer steps in which the learning rate rises, or their number
            if it is 1 or more.
        min_lr_ratio: final learning rate, as a fraction of the peak.
        total_steps: optimizer steps of the run; None takes them from `max_iterations`, or from
            `trainer.max_epochs` or `max_steps`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup: float = 0.1,
        min_lr_ratio: float = 0.0,
        total_steps: int | None = None,
    ) -> None:
        at_least("model.lr_scheduler.warmup", warmup, 0)
        at_least("model.lr_scheduler.min_lr_ratio", min_lr_ratio, 0)
        at_most("model.lr_scheduler.min_lr_ratio", min_lr_ratio, 1)
        above("model.lr_scheduler.total_steps", total_steps, 0)
        self.warmup, self.min_lr_ratio, self.total_steps = warmup, min_lr_ratio, total_steps
        super().__init__(optimizer)

    @property
    def warmup_steps(self) -> float:
        """Optimizer steps in which the learning rate rises."""
        return self.warmup if self.warmup >= 1 else self.warmup * (self.total_steps or 0)

    def set_total_steps(self, total_steps: int | None) -> None:
        """Set the length of the schedule, unless the user gave one.

        Args:
            total_steps: optimizer steps of the run, or None if unknown.

        Raises:
            ValueError: the length is unknown, or the warm-up is longer.
        """
        self.total_steps = self.total_steps or total_steps
        name = type(self).__name__
        require(
            self.total_steps is not None,
            f"lr_scheduler {name} decays to the end of the run, which is unknown: set "
            "model.max_iterations, or model.lr_scheduler.total_steps in optimizer steps.",
        )
        require(
            self.warmup_steps < (self.total_steps or 0),
            f"lr_scheduler {name} warms up for {self.warmup:g} optimizer steps, but the run has "
            f"{self.total_steps}: lower model.lr_scheduler.warmup (values below 1 are fractions).",
        )
        self._apply()

    def get_lr(self) -> list[float | Any]:
        """The learning rate of each parameter group at this step."""
        return [peak * self.factor(self.last_epoch) for peak in self.base_lrs]

    def factor(self, step: int) -> float:
        """Fraction of the peak at an optimizer step, counted from 0.

        Step n of a warm-up of w steps has (n + 1) / w, so the first step is not wasted at 0.
        """
        if self.total_steps is None or step + 1 < self.warmup_steps:
            return (step + 1) / max(1.0, self.warmup_steps)
        done = (step - self.warmup_steps) / max(1.0, self.total_steps - self.warmup_steps)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * self.decay(min(max(done, 0.0), 1.0))

    @abstractmethod
    def decay(self, done: float) -> float:
        """Fraction of the peak, from 1 to 0, after this fraction of the decay."""

    def state_dict(self) -> dict[str, Any]:
        """The position; the curve comes from the config."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at a position."""
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = self.last_epoch + 1
        self._apply()

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr


class WarmupCosine(Warmup):
    """Linear warm-up, then half a cosine down to `min_lr_ratio`. See `Warmup`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> schedule = WarmupCosine(optimizer, warmup=2, total_steps=10)
        >>> [schedule.factor(step) for step in (0, 1, 6)]
        [0.5, 1.0, 0.5]
    """

    def decay(self, done: float) -> float:
        """(1 + cos(pi done)) / 2."""
        return (1 + math.cos(math.pi * done)) / 2


class WarmupLinear(Warmup):
    """Linear warm-up, then a straight line down to `min_lr_ratio`. See `Warmup`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> WarmupLinear(optimizer, warmup=2, total_steps=10).factor(4)
        0.75
    """

    def decay(self, done: float) -> float:
        """1 - done."""
        return 1 - done
