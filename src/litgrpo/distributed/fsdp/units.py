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
class ShardedUnits:
    """FSDP units of a sharded module, and how many `gathered` blocks are open."""

    # Modules whose weights are gathered together; the last one is the module itself, with all
    # parameters that are in no other unit.
    units: list[FSDPModule]
    reshard: list[bool]  # of each unit: its gathered weights are freed after its forward pass
    open: int = 0

    def gather(self) -> None:
        """Gather all weights and keep them; every rank must take part."""
        for unit in self.units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
            unit.set_requires_gradient_sync(False, recurse=False)
            unit.unshard()

    def reshard_all(self) -> None:
        """Free the gathered weights."""
        for unit, reshard in zip(self.units, self.reshard, strict=True):
            unit.reshard()
            unit.set_reshard_after_forward(reshard, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)
            unit.set_requires_gradient_sync(True, recurse=False)


_sharded: WeakKeyDictionary[nn.Module, ShardedUnits] = WeakKeyDictionary()


def divide(
    module: nn.Module,
    units: Iterable[nn.Module],
    entries: Iterable[str],
    mesh: DeviceMesh,
    *,
    compute: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Shard the parameters of a module over the ranks of a mesh.

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
    # The backward pass needs the last unit at once; a frozen model has none, so it is resharded.
    reshard = [reshard_after_forward] * (len(parts) - 1) + [frozen]
    for part, after_forward in zip(parts, reshard, strict=True):
        fully_shard(part, mesh=mesh, reshard_after_forward=after_forward, mp_policy=precision)
    for name in entries:
        register_fsdp_forward_method(module, name)
    _sharded[module] = ShardedUnits(
        [unit for unit in parts if isinstance(unit, FSDPModule)], reshard
    )


def is_sharded(module: nn.Module) -> bool:
    """Return True if a module is sharded."""
    return module in _sharded


def is_gathered(module: nn.Module) -> bool:
    """Return True if this rank has all weights of a module: inside `gathered`, or not sharded."""
    return module not in _sharded or bool(_sharded[module].open)


@contextmanager
def gathered_root(module: nn.Module) -> Iterator[None]:
    """Gather the weights outside of a sharded module's layers: its embeddings and head.

    All ranks must enter and exit together. Other modules are unchanged.
    """
    root = None if is_gathered(module) else _sharded[module].units[-1]
    if root is not None:
        root.unshard()
    try:
        yield
    finally:
        if root is not None:
            root.reshard()


@contextmanager
def gathered(*modules: nn.Module | None) -> Iterator[None]:
    """Gather the weights of all sharded modules among these and their submodules.

    The counterpart of FSDP1's `summon_full_params`, for FSDP2.
    All ranks must enter and exit together. Inside, gradients are not reduced, and changes of the
    weights are lost.
    """
    parts = [part for module in modules if module is not None for part in module.modules()]
    sharded = [_sharded[part] for part in parts if part in _sharded]
    for module_units in sharded:
        if not module_units.open:
            module_units.gather()
        module_units.open += 1
    try:
        yield
    finally:
        for module_units in sharded:
            module_units.open -= 1
            if not module_units.open:
                module_units.reshard_all()
