"""A step that is recorded once for each set of shapes and then replayed by one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

Run = Callable[[], Any]
# Sets of shapes and settings that are kept for each module; each keeps the memory of its tensors.
MOST_KEPT = 4


class Recording(NamedTuple):
    """One recorded step.

    Args:
        places: the tensors that it reads, and may write.
        replay: does it again, with what lies there now.
        results: what it gives, always in the same place.
    """

    places: list[Tensor]
    replay: Run
    results: Any


class Replayed:
    """A function of a module, tensors and constants, recorded at its first call of each kind.

    A replay reads and writes where the recording did. So what a call is given is copied there,
    unless it lies there already, as what a call before gave may do; and what a call gives is good
    until the next one. The module's weights may change in place.

    Args:
        function: its first argument is the module; it may write into the tensors that it is given.
        record: runs something and gives a function that does the same to the same tensors again,
            and what the run gave.
    """

    def __init__(
        self, function: Callable[..., Any], record: Callable[[Run], tuple[Run, Any]]
    ) -> None:
        """Nothing is recorded yet."""
        self.function, self.record = function, record
        self.kept: WeakKeyDictionary[nn.Module, dict[Hashable, Recording]] = WeakKeyDictionary()

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        """What the function gives for these arguments."""
        leaves, form = tree_flatten(arguments)
        key = (*_state(module), *map(_kind, leaves))
        kept = self.kept.setdefault(module, {})
        if key not in kept:
            if len(kept) == MOST_KEPT:
                del kept[next(iter(kept))]
            own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            run = partial(self.function, module, *tree_unflatten(own, form))
            replay, results = self.record(run)
            kept[key] = Recording([x for x in own if isinstance(x, Tensor)], replay, results)
        places, replay, results = kept[key]
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for place, tensor in zip(places, given, strict=True):
            if place.data_ptr() != tensor.data_ptr():
                place.copy_(tensor)
        replay()
        return results


def _state(module: nn.Module) -> tuple[Hashable, ...]:
    """What else a recording depends on: where the weights lie, and what is computed in."""
    weight = next(module.parameters())
    kind = weight.device.type
    lower = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return weight.data_ptr(), weight.dtype, module.training, lower


def _kind(leaf: Any) -> Hashable:
    """What a recording depends on: a tensor's shape and type, a constant's value."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
