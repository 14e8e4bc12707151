"""Capabilities of devices: `backend(device)`; no other package asks for a device's name."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from litgrpo.arguments import import_by_path
from litgrpo.types import Stats

Function = Callable[..., Any]
# {kind of device: import path of its backend}, and the import paths of checks of the machine.
BACKENDS = {"cuda": "litgrpo.distributed.cuda.CudaBackend"}
BACKENDS["xla"] = "litgrpo.xla.backend.XlaBackend"
PREFLIGHTS = ("litgrpo.xla.preflight.check",)


class Backend:
    """The capabilities of a device; the defaults are those of the CPU.

    `static_shapes`: True if the device compiles a program for each set of shapes, which takes
    seconds. Then shapes must not follow the content, and rollouts and numbers stay on the host.
    `records_steps`: True if `record` saves the host most of the work of a repeated function, as a
    CUDA graph does.
    `num_chips`: chips that the device represents; the rows of a micro-batch are divided among them.

    Args:
        device: one device of the process.
    """

    static_shapes = False
    records_steps = False
    num_chips = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def data_device(self) -> torch.device:
        """Device of prompts, rollouts and numbers to log: the host if shapes are static."""
        return torch.device("cpu") if self.static_shapes else self.device

    def prepare(self) -> None:
        """Set up what torch expects of a device; called before a model is put there."""

    def seed(self, number: int) -> None:
        """Seed random numbers that `torch.manual_seed` does not reach; by default nothing."""

    def random_state(self) -> dict[str, Any]:
        """State of these random numbers, under a name that no other backend uses."""
        return {}

    def set_random_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `random_state`."""

    def synchronize(self) -> None:
        """Wait until the device has finished all submitted work."""

    def flush(self) -> None:
        """Start the recorded work on devices that record lazily; do not wait."""

    def compile(self, function: Function) -> Function:
        """The same function, prepared for many calls with the same shapes.

        The first call with new shapes may take long. Weights of modules among the arguments may
        change in place. By default this is the function itself.

        Args:
            function: of a module, tensors and constants, defined at the top of a file. No shape may
                depend on a value, and no value is read.
        """
        return function

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats a run with the memory of the same tensors.

        Args:
            run: has run before. It reads and writes tensors that exist outside of it, and must not
                read values of the device. All of them must outlive the result.
        """
        return run

    def optimization_barrier(self, hidden: Tensor) -> Tensor:
        """The same values, as something that a compiler does not merge with equal computations.

        Without it activations that are computed a second time, to save memory, would be merged
        with the first ones, and kept.
        """
        return hidden

    def to_host(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copy tensors to the host, with one wait for the device."""
        return [tensor.detach().cpu() for tensor in tensors]

    def rows_to(self, tensor: Tensor) -> Tensor:
        """A tensor of rows on the device, its rows divided among the chips."""
        return tensor.to(self.device)

    def number_to(self, number: Tensor) -> Tensor:
        """A number [] on the device; programs that differ in its value alone are the same."""
        return number.to(self.device)

    def note_shapes(self, program: str, **tensors: Tensor) -> None:
        """Record the shapes that a program is given; it is compiled again for new ones."""

    def new_shapes(self) -> list[str]:
        """Shapes that were noted for the first time since the last call of this."""
        return []

    def counters(self) -> dict[str, int]:
        """Counters of the compiler in this process; empty if the device compiles nothing.

        `compilations`: programs compiled. `host_reads`: times that the host waited for values of
        the device. `cpu_fallbacks`: calls of operators that the device does not have.
        """
        return {}

    def available_memory(self) -> int | None:
        """Bytes of the device's memory that this process can still use; None: decide without it.

        Sizes that follow it decide in which order sums are rounded, so a CPU, whose free memory is
        other programs', has fixed ones.
        """
        return None

    def peak_memory_gib(self) -> float:
        """Peak memory in GiB, of the device if it reports it, else of this process."""
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


_backends: dict[torch.device, Backend] = {}


def backend(device: torch.device) -> Backend:
    """Return the capabilities of a device, the same object in every call."""
    if device not in _backends:
        kind = import_by_path(BACKENDS.get(device.type, "litgrpo.distributed.device.Backend"))
        set_backend(kind(device))
    return _backends[device]


def set_backend(new_backend: Backend) -> None:
    """Replace the backend of a device, for strategies that know more about it."""
    _backends[new_backend.device] = new_backend


def check_machine(trainer: Any, rows: int | None) -> None:
    """Check that this machine has what a trainer needs, before one is built.

    Args:
        trainer: settings of the Trainer, `accelerator` and `strategy` among them.
        rows: N = B * G rows of a rollout, or None.

    Raises:
        ValueError: what is missing and what to do.
    """
    for path in PREFLIGHTS:
        import_by_path(path)(trainer, rows)


def known_backends() -> list[Backend]:
    """Return the backends of all devices used so far."""
    return list(_backends.values())


def to_host(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors of one device to the host, with one wait."""
    return backend(tensors[0].device).to_host(tensors) if tensors else []


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with at most this many threads of the processor."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(number, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


Method = Callable[..., Any]


class Clock:
    """Seconds of the phases of one iteration.

    Args:
        device: synchronized at the end of each phase.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()

    def restart(self) -> None:
        """Begin an iteration."""
        self.seconds, self.began = {}, time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to the phase of this name."""
        started = time.perf_counter()
        yield
        backend(self.device).synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def stats(self, tokens: int) -> Stats:
        """The seconds of each phase and of the step, and tokens per second of the phases, to log.

        The step is the iteration up to here.
        """
        numbers = self.seconds | {"perf/tokens_per_s": tokens / sum(self.seconds.values())}
        numbers["time/step_s"] = time.perf_counter() - self.began
        return {name: torch.tensor(number) for name, number in numbers.items()}


def time_phase(name: str) -> Callable[[Method], Method]:
    """Decorate a method to add its seconds to a phase of the object's `clock`."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.clock.phase(name):
                return method(self, *args, **kwargs)

        return call

    return decorate
