"""Linear kernels and sizes of a pass: equal on all ranks, in the reference, and when resumed.

They round differently, so a run that changes them on the way does not end in the same digits.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from lightning import LightningModule

from litgrpo.distributed.collectives import all_gather_object
from litgrpo.distributed.device import backend
from litgrpo.distributed.memory import keep_freed_memory
from litgrpo.distributed.messages import rank_zero_info, rank_zero_warn
from litgrpo.learning.steppers import is_attached
from litgrpo.learning.update_config import BYTES_PER_OUTPUT, DeviceSizes
from litgrpo.models.kernels.linear import LinearKernels, count_linear_outputs
from litgrpo.models.policy import Policy
from litgrpo.models.transformers_compat import checkpoints_activations
from litgrpo.tensors import local
from litgrpo.text.tables import plural

KEY = "machine"  # of a checkpoint


def use_everywhere(module: LightningModule, policy: Policy) -> None:
    """Let all processes and all policies compute with the first process's kernels of a policy.

    Args:
        module: attached to its trainer; a reference among its parts follows, too.
        policy: its own.
    """
    chosen = module.trainer.strategy.broadcast(asdict(policy.linear_kernels))
    _use(module, LinearKernels(**chosen))
    if _trains_on_cpu(module):
        keep_freed_memory()
        kernels = f"{chosen['decode']} (sampling), {chosen['learn']} (training)"
        rank_zero_info(f"Linear kernels: {kernels}; {plural(torch.get_num_threads(), 'thread')}")


def choose_sizes(policy: Policy, device: torch.device) -> DeviceSizes | None:
    """Return sizes that fit into the free memory of every rank's device; None on a CPU.

    Every rank must call this.

    Args:
        policy: the policy that is trained, on any device.
        device: where it is trained.
    """
    free = backend(device).available_memory()
    if free is None:
        return None
    for parameter in policy.parameters():
        size = local(parameter).numel() * parameter.element_size()
        free -= size * (parameter.device != device)  # it will move there
        free -= size * 3 * parameter.requires_grad  # the gradient and Adam's two running means
    return DeviceSizes.of(min(all_gather_object(max(0, free))), _kept_bytes_per_token(policy))


def _kept_bytes_per_token(policy: Policy) -> float:
    """Estimate the memory of a token's activations until the backward pass."""
    model = policy.bare_model
    outputs = BYTES_PER_OUTPUT * count_linear_outputs(policy.model)
    if not checkpoints_activations(model):
        return outputs
    config = model.config
    # The input of each layer is kept, and all activations of the layer that is recomputed.
    return outputs / config.num_hidden_layers + 4.0 * config.hidden_size * config.num_hidden_layers


def follows_memory(module: LightningModule) -> bool:
    """Check that sizes follow the memory of the device that a module is trained on."""
    device = module.trainer.strategy.root_device if is_attached(module) else module.device
    return backend(device).available_memory() is not None


def set_logits(module: LightningModule, logits: int) -> None:
    """Set the number of logits that exist at once in all policies of a module."""
    for part in module.modules():
        if isinstance(part, Policy):
            part.few_logits = logits


def save_kernels(policy: Policy) -> dict[str, Any]:
    """Return what decides how results are rounded, for a checkpoint."""
    sizes = {"threads": torch.get_num_threads(), "logits": policy.few_logits}
    return asdict(policy.linear_kernels) | sizes


def restore(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Compute as the run did so far, so that resuming gives the same digits.

    The number of threads is the user's (OMP_NUM_THREADS); another one is said, not changed.
    """
    kernels = dict(checkpoint.get(KEY, {}))
    threads = kernels.pop("threads", torch.get_num_threads())
    logits = kernels.pop("logits", None)
    if logits is not None and follows_memory(module):
        set_logits(module, logits)
    _use(module, LinearKernels(**kernels))
    if _trains_on_cpu(module) and threads != torch.get_num_threads():
        rank_zero_warn(
            f"The checkpoint was computed with {plural(threads, 'thread')}, this process has "
            f"{torch.get_num_threads()}: the last digits will differ from an unbroken run. Set "
            f"OMP_NUM_THREADS={threads} for the same ones."
        )


def _trains_on_cpu(module: LightningModule) -> bool:
    """Return True without a trainer, or if its device is a CPU: other devices have no choice."""
    return not is_attached(module) or module.trainer.strategy.root_device.type == "cpu"


def _use(module: LightningModule, kernels: LinearKernels) -> None:
    if not _trains_on_cpu(module):
        kernels = LinearKernels()
    for part in module.modules():
        if isinstance(part, Policy):
            part.set_linear_kernels(kernels)
