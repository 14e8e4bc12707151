"""CUDA graphs: record a function once for each set of shapes, then replay it in one launch."""

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
# Recordings of each module; each holds the memory of its tensors.
MOST_KEPT = 4
RUNS_BEFORE_RECORDING = 3  # libraries allocate workspaces and select kernels in the first runs


class Recording(NamedTuple):
    """A recorded call.

    Args:
        inputs: tensors that it reads, and may write.
        replay: computes again from the current values of the inputs.
        results: returned values, always in the same memory.
    """

    inputs: list[Tensor]
    replay: Run
    results: Any


def record(run: Run) -> tuple[Run, Any]:
    """Record a function as a CUDA graph.

    Args:
        run: returns tensors. It must not read values of the device, and no shape may depend on
            one. It is run several times before it is recorded.

    Returns:
        A function that replays the run, and the results of the run, which each replay overwrites.
    """
    # torch requires the warm-up on a separate stream: none of it may be captured in the graph.
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
        """Return the results of the function for these arguments."""
        leaves = tree_leaves(arguments)
        kept = self.kept.setdefault(module, {})
        key = (*_state(module), *map(_kind, leaves))
        if key not in kept:
            kept[key] = self._record(module, arguments)
            for oldest in list(kept)[:-MOST_KEPT]:
                del kept[oldest]
        inputs, replay, results = kept[key]
        for own, given in zip(inputs, _tensors(leaves), strict=True):
            if own.data_ptr() != given.data_ptr():
                own.copy_(given)
        replay()
        return results

    def _record(self, module: nn.Module, arguments: Any) -> Recording:
        """Record one call with separate inputs."""
        own = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, arguments)
        replay, results = self.record(partial(self.function, module, *own))
        return Recording(_tensors(tree_leaves(own)), replay, results)


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _state(module: nn.Module) -> tuple[Hashable, ...]:
    """State that a recording depends on: address and dtype of the weights, mode, autocast dtype."""
    weight = next(module.parameters())
    kind = weight.device.type
    lower = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return weight.data_ptr(), weight.dtype, module.training, lower


def _kind(leaf: Any) -> Hashable:
    """Shape and dtype of a tensor, or the value of a constant, which a recording depends on."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


class CudaBackend(Backend):
    """Capabilities of a GPU; functions compiled with `replay` become CUDA graphs."""

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

    def free_memory(self) -> int | None:
        """See `Backend.free_memory`."""
        free, _ = torch.cuda.mem_get_info(self.device)
        # Torch keeps blocks of freed tensors for itself, which the driver counts as used.
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(free + kept)

    def peak_memory_gib(self) -> float:
        """See `Backend.peak_memory_gib`."""
        return torch.cuda.max_memory_allocated(self.device) / 2**30
