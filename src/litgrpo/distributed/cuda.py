"""A function that is recorded once for each set of shapes, and then replayed by one launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from litgrpo.distributed.device import Backend, Function

Run = Callable[[], Any]
# Recordings that are kept for each module; each keeps the memory of its tensors.
MOST_KEPT = 4
RUNS_BEFORE_RECORDING = 3  # so that libraries have taken the memory and the kernels that they want


class Recording(NamedTuple):
    """A recorded call.

    Args:
        inputs: the tensors that it reads, and may write.
        replay: computes again, from what lies in the inputs now.
        results: what it returns, always in the same memory.
    """

    inputs: list[Tensor]
    replay: Run
    results: Any


def record(run: Run) -> tuple[Run, Any]:
    """Record what a function asks of a CUDA device, as a CUDA graph.

    Args:
        run: returns tensors. No value may be looked at on the way, and no shape depend on one. It
            is run some times before it is recorded.

    Returns:
        A function that does the same again, and what the recorded run returned, into which it
        writes.
    """
    # Warm-up on a stream of its own, as torch asks for: nothing of it may get into the graph.
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(RUNS_BEFORE_RECORDING):
            run()
    torch.cuda.current_stream().wait_stream(warm_up)
    # Autocast caches copies of weights in lower precision. One from before the graph would be read
    # by every replay, though the weights change; one from inside belongs to the graph's memory.
    torch.clear_autocast_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    torch.clear_autocast_cache()
    return graph.replay, results


class Replayed:
    """A function of a module, tensors and constants, recorded at its first call of each kind.

    A replay reads and writes the memory of the recording. So arguments are copied there, unless
    they are there already, as results of the call before may be; and results are good until the
    next call. The module's weights may change in place.

    Args:
        function: its first argument is the module; it may write into the tensors that it is given.
        record: runs a function and returns another one that does the same to the same tensors
            again, and what the run returned.
    """

    def __init__(
        self, function: Callable[..., Any], record: Callable[[Run], tuple[Run, Any]] = record
    ) -> None:
        self.function, self.record = function, record
        self.kept: WeakKeyDictionary[nn.Module, dict[Hashable, Recording]] = WeakKeyDictionary()

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        """What the function returns for these arguments."""
        leaves = tree_leaves(arguments)
        kept = self.kept.setdefault(module, {})
        key = (*_state(module), *map(_kind, leaves))
        if key not in kept:
            kept[key] = self._recorded(module, arguments)
            for oldest in list(kept)[:-MOST_KEPT]:
                del kept[oldest]
        inputs, replay, results = kept[key]
        for own, given in zip(inputs, _tensors(leaves), strict=True):
            if own.data_ptr() != given.data_ptr():
                own.copy_(given)
        replay()
        return results

    def _recorded(self, module: nn.Module, arguments: Any) -> Recording:
        """One call, with inputs of its own."""
        own = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, arguments)
        replay, results = self.record(partial(self.function, module, *own))
        return Recording(_tensors(tree_leaves(own)), replay, results)


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _state(module: nn.Module) -> tuple[Hashable, ...]:
    """What else a recording depends on: where the weights are, and the precision of products."""
    weight = next(module.parameters())
    kind = weight.device.type
    lower = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return weight.data_ptr(), weight.dtype, module.training, lower


def _kind(leaf: Any) -> Hashable:
    """What a recording depends on: a tensor's shape and type, a constant's value."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


class CudaBackend(Backend):
    """A GPU; the functions that are to be replayed become CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.replayed: dict[Function, Replayed] = {}

    def synchronize(self) -> None:
        """See `Backend.synchronize`."""
        torch.cuda.synchronize(self.device)

    def compile(self, function: Function, *, replay: bool = False) -> Function:
        """See `Backend.compile`."""
        if not replay:
            return function
        return self.replayed.setdefault(function, Replayed(function))

    def peak_memory_gib(self) -> float:
        """See `Backend.peak_memory_gib`."""
        return torch.cuda.max_memory_allocated(self.device) / 2**30
