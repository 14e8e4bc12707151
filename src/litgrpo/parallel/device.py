"""CPU, CUDA and XLA behind one face: the only file of the core that knows device words."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
# Shapes and settings that one function is compiled for at most: buckets, group sizes, samplings.
MAX_GRAPHS = 64
RUNS_BEFORE_RECORDING = 3  # so that libraries have taken the memory and the kernels that they want


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
    if not compiles_shapes(device):
        return function
    return _compiled(function) if CHIPS.number == 1 else _noted(function, device)


@cache
def _compiled(function: Function) -> Function:
    # Beyond its limit, 8, the compiler would refuse.
    limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    torch._dynamo.config.recompile_limit = limit
    return torch.compile(function, backend="openxla", dynamic=False, fullgraph=True)


@cache
def _noted(function: Function, device: torch.device) -> Function:
    """Noted down call by call: torch-xla 2.9 crashes where it compiles ahead for several chips."""

    def call(*arguments: Any) -> Any:
        mark_step(device)  # so that nothing else becomes a part of this program
        found = function(*arguments)
        mark_step(device)
        return found

    return call


def can_record(device: torch.device) -> bool:
    """Whether `record` works there."""
    return device.type == "cuda"


def record(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Record what a function asks of a CUDA device, as a CUDA graph.

    Args:
        run: gives tensors. No value may be looked at on the way, and no shape depend on one. It is
            run some times before it is recorded.

    Returns:
        A function that does the same again, and what the recorded run gave, into which it writes.
    """
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(RUNS_BEFORE_RECORDING):
            run()
    torch.cuda.current_stream().wait_stream(beside)
    # Copies of weights in lower precision are made in the graph: older ones would never change,
    # and those made there are no one else's.
    torch.clear_autocast_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    torch.clear_autocast_cache()
    return graph.replay, results


def make_ready(device: torch.device) -> None:
    """Fill in what torch's own functions expect of a device and its backend does not bring."""
    if device.type == "xla" and "torch.xla" not in sys.modules:
        # torch.utils.checkpoint asks for a module of this name before it does anything.
        torch._register_device_module("xla", ModuleType("torch.xla"))
    if device.type == "xla":
        from torch_xla import backends

        # Torch's word for it; torch-xla would compute float32 products in bfloat16 on some chips.
        words = {"highest": "highest", "high": "high", "medium": "default"}
        wanted = words[torch.get_float32_matmul_precision()]
        if backends.get_mat_mul_precision() != wanted:
            backends.set_mat_mul_precision(wanted)


def to_host(tensors: list[Tensor]) -> list[Tensor]:
    """Copies in the host's memory, by one wait for the device."""
    if not tensors or tensors[0].device.type != "xla":
        return [tensor.detach().cpu() for tensor in tensors]
    import torch_xla

    tensors = [tensor.detach() for tensor in tensors]
    if CHIPS.number == 1:
        return torch_xla._XLAC._xla_get_cpu_tensors(tensors)
    # Torch-xla would compile a program for each tensor to put its pieces together.
    torch_xla.sync(wait=True)
    pieces = torch_xla._XLAC._get_local_shards(tensors)
    places = torch_xla._XLAC._get_local_shard_replica_and_indices(tensors)
    return list(map(_put_together, tensors, pieces, places))


def _put_together(tensor: Tensor, pieces: list, places: list) -> Tensor:
    """A tensor that is divided among chips, on the host."""
    if pieces[0][0].shape == tensor.shape:
        return pieces[0][0]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for (piece, _), (_, place) in zip(pieces, places, strict=True):
        whole[place] = piece
    return whole


def kept_apart(hidden: Tensor) -> Tensor:
    """The same values, as something new to a compiler that would merge equal computations.

    Without it what is computed a second time to save memory would be kept from the first.
    """
    if hidden.device.type != "xla":
        return hidden
    import torch_xla.core.xla_model as xm

    hidden = hidden.detach().clone().requires_grad_(hidden.requires_grad)
    xm.optimization_barrier_([hidden])
    return hidden


@dataclass
class Chips:
    """The chips that one process drives, and how it divides rows among them.

    Args:
        number: of chips.
        spread: marks a tensor of rows on the device as divided; None: there is nothing to divide.
    """

    number: int = 1
    spread: Callable[[Tensor], None] | None = None


CHIPS = Chips()


def use_chips(number: int, spread: Callable[[Tensor], None]) -> None:
    """Divide rows among so many chips from now on; for strategies."""
    CHIPS.number, CHIPS.spread = number, spread


def rows_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of rows on the device, its rows divided among the chips if there are several."""
    return spread_rows(tensor.to(device))


def number_to(number: Tensor, device: torch.device) -> Tensor:
    """A number [] on the device, as an input of its own of the program that it becomes a part of.

    Torch-xla keeps numbers by their value: one that happens to equal another would share its
    place, and the program would be a new one.
    """
    return number.view(1).to(device).view(())


def spread_rows(tensor: Tensor) -> Tensor:
    """The same tensor of rows, its rows divided among the chips if there are several."""
    if CHIPS.spread is not None and compiles_shapes(tensor.device):
        CHIPS.spread(tensor)
    return tensor


_shapes: dict[str, set[str]] = {}
_new_shapes: list[str] = []


def seen(program: str, **tensors: Tensor) -> None:
    """Note the shapes that a program is given; new ones are what it is compiled anew for."""
    if len(_new_shapes) > MAX_GRAPHS:
        return
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    known = _shapes.setdefault(program, set())
    if shapes not in known:
        known.add(shapes)
        _new_shapes.append(f"{program}: {shapes}")


def new_shapes() -> list[str]:
    """Shapes that were given to a program for the first time since the last call of this."""
    found, _new_shapes[:] = list(_new_shapes), []
    return found


def counters(device: torch.device) -> dict[str, int]:
    """What a compiling device has done so far, in this process; empty for others.

    `compilations`: programs compiled. `host_reads`: times that the host waited for values of the
    device. `cpu_fallbacks`: calls of operators that the device does not have.
    """
    if device.type != "xla":
        return {}
    import torch_xla.debug.metrics as met

    def calls(metric: str) -> int:
        data = met.metric_data(metric)
        return 0 if data is None else int(data[0])

    missing = [name for name in met.counter_names() if name.startswith("aten::")]
    missing = [name for name in missing if name != "aten::_local_scalar_dense"]  # a read
    return {
        "compilations": calls("CompileTime"),
        "host_reads": calls("TransferFromDeviceTime"),
        "cpu_fallbacks": sum(int(met.counter_value(name) or 0) for name in missing),
    }


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


def seed(device: torch.device, number: int) -> None:
    """Start the device's own random numbers, where `torch.manual_seed` does not reach them."""
    if device.type == "xla":
        import torch_xla

        torch_xla.manual_seed(number)


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
