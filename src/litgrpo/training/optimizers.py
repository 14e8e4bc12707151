"""The optimizer that a module starts its training with, and its schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule
from torch.nn import Parameter

from litgrpo.arguments import require


def optimizer_and_schedule(
    module: LightningModule,
    optimizer: Callable[[list[Parameter]], torch.optim.Optimizer],
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
) -> Any:
    """The optimizer over what a module trains, and its schedule, stepped with it."""
    made = optimizer([p for p in module.parameters() if p.requires_grad])
    check_small_numbers(made)
    if lr_scheduler is None:
        return made
    schedule = {"scheduler": lr_scheduler(made), "interval": "step"}
    return {"optimizer": made, "lr_scheduler": schedule}


def check_small_numbers(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose divisor becomes 0 in the number format of its weights.

    Raises:
        ValueError: `eps` is 0 in float16, so that the first step would not be finite.
    """
    for group in optimizer.param_groups:
        eps = group.get("eps")
        rounded = eps and any(torch.tensor(eps, dtype=p.dtype) == 0 for p in group["params"][:1])
        require(
            not rounded,
            f"The optimizer's eps is {eps}, which is 0 in {group['params'][0].dtype}: its first "
            "step would not be finite. Give precision.dtype float32 (with trainer.precision "
            "16-mixed for speed) or bfloat16, or optimizer.eps 1e-4.",
        )
