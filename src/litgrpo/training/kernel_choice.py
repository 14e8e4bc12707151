"""Linear kernels: the same on all processes and in the reference, and again when resumed.

They round differently, so a run that changes them on the way does not end in the same digits.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from lightning import LightningModule

from litgrpo.distributed.memory import keep_freed_memory
from litgrpo.distributed.messages import rank_zero_info, rank_zero_warn
from litgrpo.models.kernels.linear import LinearKernels
from litgrpo.models.policy import Policy
from litgrpo.text.counts import plural

KEY = "machine"  # of a checkpoint


def use_everywhere(module: LightningModule, policy: Policy) -> None:
    """Let all processes and all policies compute with the first process's kernels of a policy.

    Args:
        module: attached to its trainer; a reference among its parts follows, too.
        policy: its own.
    """
    chosen = module.trainer.strategy.broadcast(asdict(policy.linear_kernels))
    _use(module, LinearKernels(**chosen))
    if policy.model.device.type == "cpu":
        keep_freed_memory()
        kernels = f"{chosen['decode']} (sampling), {chosen['learn']} (training)"
        rank_zero_info(f"Linear kernels: {kernels}; {plural(torch.get_num_threads(), 'thread')}")


def save_kernels(policy: Policy) -> dict[str, Any]:
    """Return what decides how results are rounded, for a checkpoint."""
    return asdict(policy.linear_kernels) | {"threads": torch.get_num_threads()}


def restore(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Compute as the run did so far, so that resuming gives the same digits.

    The number of threads is the user's (OMP_NUM_THREADS); another one is said, not changed.
    """
    chosen = dict(checkpoint.get(KEY, {}))
    threads = chosen.pop("threads", torch.get_num_threads())
    _use(module, LinearKernels(**chosen))
    if threads != torch.get_num_threads():
        rank_zero_warn(
            f"The checkpoint was computed with {plural(threads, 'thread')}, this process has "
            f"{torch.get_num_threads()}: the last digits will differ from an unbroken run. Set "
            f"OMP_NUM_THREADS={threads} for the same ones."
        )


def _use(module: LightningModule, kernels: LinearKernels) -> None:
    for part in module.modules():
        if isinstance(part, Policy):
            part.set_linear_kernels(kernels)
