"""What a run chose for its machine: the same on all processes, and again when it is resumed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from litgrpo.models.kernels.linear import Kernels
from litgrpo.models.policy import Policy

KEY = "machine"


def agree(module: LightningModule) -> None:
    """Let every process and every policy compute as the first process chose for its policy.

    Args:
        module: its `policy`, and a reference if that is a model of its own.
    """
    chosen = module.trainer.strategy.broadcast(asdict(_policy(module).kernels))
    for part in module.modules():
        if isinstance(part, Policy):
            part.use_kernels(Kernels(**chosen))
    if module.device.type == "cpu":
        kernels = ", ".join(f"{kernel} to {phase}" for phase, kernel in chosen.items())
        rank_zero_info(f"Linear layers: {kernels}; {torch.get_num_threads()} threads")


def save(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Note what decides how results are rounded."""
    checkpoint[KEY] = asdict(_policy(module).kernels) | {"threads": torch.get_num_threads()}


def restore(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Compute as the run did so far, so that resuming gives the same digits.

    The number of threads is the user's (OMP_NUM_THREADS); another one is said, not changed.
    """
    chosen = dict(checkpoint.get(KEY, {}))
    threads = chosen.pop("threads", torch.get_num_threads())
    _policy(module).use_kernels(Kernels(**chosen))
    if threads != torch.get_num_threads():
        rank_zero_warn(
            f"The checkpoint was computed with {threads} threads, this process has "
            f"{torch.get_num_threads()}: the last digits will differ from an unbroken run. Set "
            f"OMP_NUM_THREADS={threads} for the same ones."
        )


def _policy(module: LightningModule) -> Policy:
    policy = module.policy
    assert isinstance(policy, Policy)
    return policy
