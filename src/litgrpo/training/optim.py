"""The optimizer of a recipe that names none, and schedules with a warm-up."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from litgrpo.arguments import above, at_least, at_most, require


class DefaultAdamW(AdamW):
    """AdamW at the learning rate that is usual for what is trained; a fit says which.

    GRPO: 1e-6 for all weights of a model, 1e-5 for adapters. SFT: 2e-5 and 2e-4. Models that were
    trained from nothing: 3e-4 for the embedded model, 1e-3 for `scratch`.

    Args:
        params: what is trained.
        lr: learning rate; None takes the usual one.
        betas: decay of the running means of gradient and squared gradient.
        eps: added to the denominator.
        weight_decay: share of each weight, times lr, that a step takes away.

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
        """Take this learning rate where none was given."""
        for group in self.param_groups:
            group["lr"] = lr if self.needs_lr else group["lr"]
        self.needs_lr = False


class Warmup(LRScheduler, ABC):
    """A linear rise to the learning rate, then a decay to a share of it, over the whole run.

    What a checkpoint holds is the position alone: a run that is resumed with another length,
    warm-up or learning rate follows the new curve from there.

    Args:
        optimizer: whose learning rates are the peaks.
        warmup: share of all optimizer steps in which the learning rate rises, or their number
            where it is 1 or more.
        min_lr_ratio: where the decay ends, as a share of the peak.
        total_steps: optimizer steps of the run; None takes them from `max_iterations`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup: float = 0.1,
        min_lr_ratio: float = 0.0,
        total_steps: int | None = None,
    ) -> None:
        at_least("lr_scheduler.warmup", warmup, 0)
        at_least("lr_scheduler.min_lr_ratio", min_lr_ratio, 0)
        at_most("lr_scheduler.min_lr_ratio", min_lr_ratio, 1)
        above("lr_scheduler.total_steps", total_steps, 0)
        self.warmup, self.min_lr_ratio, self.total_steps = warmup, min_lr_ratio, total_steps
        super().__init__(optimizer)

    @property
    def warmup_steps(self) -> float:
        """Optimizer steps in which the learning rate rises."""
        return self.warmup if self.warmup >= 1 else self.warmup * (self.total_steps or 0)

    def set_total_steps(self, total_steps: int | None) -> None:
        """Take this length where none was given.

        Args:
            total_steps: optimizer steps of the run, or None where nobody knows them.

        Raises:
            ValueError: nobody knows them, or the warm-up is longer.
        """
        self.total_steps = self.total_steps or total_steps
        name = type(self).__name__
        require(
            self.total_steps is not None,
            f"lr_scheduler {name} decays to the end of the run, which is not known here: set "
            "model.max_iterations, or lr_scheduler.total_steps in optimizer steps.",
        )
        require(
            self.warmup_steps < (self.total_steps or 0),
            f"lr_scheduler {name} warms up for {self.warmup:g} optimizer steps, but the run has "
            f"{self.total_steps}: lower lr_scheduler.warmup (below 1 it is a share).",
        )
        self._apply()

    def get_lr(self) -> list[float | Any]:
        """The learning rate of each parameter group at this step."""
        return [peak * self.factor(self.last_epoch) for peak in self.base_lrs]

    def factor(self, step: int) -> float:
        """Share of the peak at an optimizer step, counted from 0.

        The first step already learns: step n of a warm-up of w steps has (n + 1) / w.
        """
        if self.total_steps is None or step + 1 < self.warmup_steps:
            return (step + 1) / max(1.0, self.warmup_steps)
        done = (step - self.warmup_steps) / max(1.0, self.total_steps - self.warmup_steps)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * self.decay(min(max(done, 0.0), 1.0))

    @abstractmethod
    def decay(self, done: float) -> float:
        """What is left of the peak, between 1 and 0, after this share of the decay."""

    def state_dict(self) -> dict[str, Any]:
        """The position; the curve is the recipe's."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a position."""
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = self.last_epoch + 1
        self._apply()

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr


class WarmupCosine(Warmup):
    """A linear warm-up, then half a cosine down to `min_lr_ratio`. See `Warmup`."""

    def decay(self, done: float) -> float:
        """(1 + cos(pi done)) / 2."""
        return (1 + math.cos(math.pi * done)) / 2


class WarmupLinear(Warmup):
    """A linear warm-up, then a straight line down to `min_lr_ratio`. See `Warmup`."""

    def decay(self, done: float) -> float:
        """1 - done."""
        return 1 - done
