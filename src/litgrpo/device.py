"""CPU, CUDA and XLA behind one face: the only file of the core that knows device words."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

Function = Callable[..., Any]
# Shapes and settings that one function is compiled for at most: buckets, group sizes, samplings.
MAX_GRAPHS = 64


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked for, so that a clock tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "xla":
        import torch_xla

        torch_xla.sync(wait=True)


def mark_step(device: torch.device) -> None:
    """Begin what was asked for so far, where a device only notes it down; do not wait for it."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync(wait=False)


def compiles_shapes(device: torch.device) -> bool:
    """Whether the device compiles a program for each set of shapes, which takes it seconds."""
    return device.type == "xla"


def compile_step(function: Function, device: torch.device) -> Function:
    """The same function as one graph for each set of shapes, where a device wants graphs.

    The first call of each set of shapes compiles; later ones do not, whatever the tensors hold.
    Weights of modules among the arguments are inputs of the graph: they may change in place.
    Elsewhere this is the function as it is.

    Args:
        function: of tensors, modules and constants, defined at the top of a file, so that the
            next call gives the same compiled function; shapes must not depend on values.
        device: to run it on.

    Returns:
        The function, to be called with the same arguments.
    """
    return _compiled(function) if compiles_shapes(device) else function


@cache
def _compiled(function: Function) -> Function:
    # Beyond its limit, 8, the compiler would refuse.
    limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    torch._dynamo.config.recompile_limit = limit
    return torch.compile(function, backend="openxla", dynamic=False, fullgraph=True)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory in use so far: of the device where it says, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with so many threads of the processor, or with fewer if there are fewer."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(number, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_state() -> dict[str, Any]:
    """Where torch's random numbers stand on the host and on each device, as tensors and numbers."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "torch_xla" in sys.modules:
        import torch_xla.core.xla_model as xm

        state["xla"] = int(xm.get_rng_state())
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` gave, as far as the devices are there."""
    torch.set_rng_state(state["cpu"])
    for number, own in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(own, number)
    if "xla" in state and "torch_xla" in sys.modules:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(state["xla"])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice; each device says it in its own way."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = ("can't allocate memory", "not enough memory", "RESOURCE_EXHAUSTED")
    return isinstance(error, RuntimeError) and any(each in str(error) for each in words)


def free_memory() -> None:
    """Give cached memory back to the device, after what needed it is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
