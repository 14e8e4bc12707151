"""Weights divided over processes by torch's FSDP2, and gathered for as long as they are needed.

A divided module holds a shard of every parameter (a DTensor cut along its first dimension). Each of
its units gathers its own parameters for its forward and backward pass, which every process must
take part in. Within `gathered` all of them are whole on every process, and nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)


@dataclass
class Division:
    """How a module is divided.

    Args:
        units: what is gathered together, the module itself last: it has what is in no other.
        reshard: of each unit, whether its gathered weights are let go after its forward pass.
        open: how many `gathered` it is in.
    """

    units: list[FSDPModule]
    reshard: list[bool]
    open: int = 0

    def gather(self) -> None:
        """Make all weights whole, and keep them so; every process must take part."""
        for unit in self.units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
            unit.set_requires_gradient_sync(False, recurse=False)
            unit.unshard()

    def divide_again(self) -> None:
        """Let the gathered weights go."""
        for unit, reshard in zip(self.units, self.reshard, strict=True):
            unit.reshard()
            unit.set_reshard_after_forward(reshard, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)
            unit.set_requires_gradient_sync(True, recurse=False)


_divided: WeakKeyDictionary[nn.Module, Division] = WeakKeyDictionary()


def divide(
    module: nn.Module,
    units: Iterable[nn.Module],
    entries: Iterable[str],
    mesh: DeviceMesh,
    *,
    compute: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Divide the parameters of a module over the processes of a mesh.

    Args:
        module: its parameters become shards in place, on the mesh's device.
        units: parts of it that are gathered one at a time, such as layers.
        entries: methods of the module that compute with its weights; each gathers them.
        mesh: of one dimension, or of two: replicas, and the processes that share one.
        compute: dtype that weights are gathered and computed in; gradients are reduced in float32.
            None computes in the weights' own.
        reshard_after_forward: gather a unit again for its backward pass, which saves memory.
    """
    low = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    precision = MixedPrecisionPolicy() if compute is None else low
    frozen = not any(parameter.requires_grad for parameter in module.parameters())
    parts = [*units, module]
    # The last is needed again at once by its backward pass; without one it is let go, too.
    reshard = [reshard_after_forward] * (len(parts) - 1) + [frozen]
    for part, after_forward in zip(parts, reshard, strict=True):
        fully_shard(part, mesh=mesh, reshard_after_forward=after_forward, mp_policy=precision)
    for name in entries:
        register_fsdp_forward_method(module, name)
    _divided[module] = Division([unit for unit in parts if isinstance(unit, FSDPModule)], reshard)


def is_divided(module: nn.Module) -> bool:
    """Whether a module was divided."""
    return module in _divided


def is_gathered(module: nn.Module) -> bool:
    """Whether all of a module's weights are whole here: within `gathered`, or never divided."""
    return module not in _divided or bool(_divided[module].open)


@contextmanager
def gathered(*modules: nn.Module | None) -> Iterator[None]:
    """Whole weights of all divided modules among these and their parts; others are left alone.

    Every process must enter and leave together. No gradient is reduced within, and weights that
    change within are lost.
    """
    parts = [part for module in modules if module is not None for part in module.modules()]
    found = [_divided[part] for part in parts if part in _divided]
    for division in found:
        if not division.open:
            division.gather()
        division.open += 1
    try:
        yield
    finally:
        for division in found:
            division.open -= 1
            if not division.open:
                division.divide_again()
