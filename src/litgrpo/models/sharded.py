"""Policies whose weights are divided over processes: read, computed with and exported by shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from litgrpo.arguments import require
from litgrpo.distributed.fsdp.units import is_divided
from litgrpo.models.adapters import LoRA
from litgrpo.models.architectures import ARCHITECTURES
from litgrpo.models.kernels import linear as linears
from litgrpo.models.policy import Policy
from litgrpo.models.shard_files import empty_model, fill_from, weight_files

# What computes with a policy's weights; each gathers those outside of its layers.
ENTRIES = ("logprobs", "predictors", "dense_logits", "prefill", "step")


def units_of(policy: Policy) -> list[nn.Module]:
    """The layers: what the library keeps together, too.

    Embedding and head belong to the policy itself: the head is asked chunk by chunk, as often as a
    process has tokens, and a gathering of its own each time would wait for others in vain.
    """
    kinds: Any = policy.bare_model._no_split_modules or ()
    return [part for part in policy.modules() if type(part).__name__ in kinds]


class Divides(Protocol):
    """What divides modules over processes."""

    def divide(
        self,
        module: nn.Module,
        units: Iterable[nn.Module],
        entries: Iterable[str],
        compute: torch.dtype | None,
    ) -> None:
        """Divide a module; see `litgrpo.distributed.fsdp.units.divide`."""

    def shards_for(self, tensor: Tensor) -> Tensor:
        """Room for this process's shard of a tensor."""


class Whole:
    """Leaves every policy as it is, whole on each process."""

    def __call__(self, policy: Policy) -> None:
        """Nothing to divide."""

    def check(self, quantize: str | None, lora: LoRA | None) -> None:
        """Nothing is refused."""

    def empty_model(self, folder: str, config: Any, dtype: torch.dtype) -> Any:
        """None: weights are read whole."""

    def read(self, policy: Policy, folder: str) -> None:
        """Nothing was left to read."""


class Divided(Whole):
    """Divides policies over the processes of a strategy.

    Args:
        strategy: knows the processes.
    """

    def __init__(self, strategy: Divides) -> None:
        self.strategy = strategy

    def __call__(self, policy: Policy) -> None:
        """Divide a policy's layers, and the rest of it, unless that was done."""
        if is_divided(policy):
            return
        # Torch's own kernels: others keep copies of weights, which come and go here.
        policy.use_kernels(linears.Kernels())
        self.strategy.divide(policy, units_of(policy), ENTRIES, policy.compute_dtype)

    def check(self, quantize: str | None, lora: LoRA | None) -> None:
        """Refuse what needs whole weights.

        Raises:
            ValueError: weights in four bits, DoRA, or modules that are trained beside adapters.
        """
        settings: dict[str, Any] = {"precision.quantize": quantize}
        if lora is not None:
            settings["lora.use_dora"] = lora.use_dora or None
            settings["lora.modules_to_save"] = lora.modules_to_save
        given = [name for name, value in settings.items() if value is not None]
        require(
            not given,
            f"{', '.join(given)}: this needs whole weights, but trainer.strategy divides them over "
            "processes. Leave it out, or take trainer.strategy ddp.",
        )

    def empty_model(self, folder: str, config: Any, dtype: torch.dtype) -> Any:
        """A model without memory for its weights, which `read` reads into shards.

        None where they have to be read whole, and are divided then: weights that are no safetensors
        or that the library renames, and types that are tried before they are used.
        """
        files = weight_files(folder) if config.model_type in ARCHITECTURES else None
        return None if files is None else empty_model(files, config, dtype)

    def read(self, policy: Policy, folder: str) -> None:
        """Read this process's shards of an empty model that was divided."""
        files = weight_files(folder)
        assert files is not None
        fill_from(files, policy.model, self.strategy.shards_for)
        policy._apply(lambda tensor: tensor)  # lets FSDP2 look at its parameters again


Divide = Whole
left_whole = Whole()
