"""Give torch.cuda the functions of the simulated device, and count what code asks it to do.

from tests.cuda_device.device import count_work

with count_work() as work:
    policy(prompts)
work.num_launches, work.num_waits
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.cuda_device import flash, nccl, storages, streams
from tests.cuda_device.library import index_of, native


@dataclass
class Work:
    """What a block of code asked of the device, by operator.

    Args:
        launches: kernels and graphs that the host launched; a replayed graph is one.
        waits: times that the host waited for the device.
    """

    launches: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)

    @property
    def num_launches(self) -> int:
        """Launches of all operators."""
        return sum(self.launches.values())

    @property
    def num_waits(self) -> int:
        """Waits for all operators."""
        return sum(self.waits.values())


@contextlib.contextmanager
def count_work() -> Iterator[Work]:
    """Count launches and waits of the block; they are complete when it ends."""
    work = Work()
    native.reset_counters()
    native.count(True)
    try:
        yield work
    finally:
        native.count(False)
        work.launches, work.waits = native.counters()


def set_memory_limit(num_bytes: int) -> None:
    """Limit the memory of every device; more raises torch.OutOfMemoryError. 0: 80 GiB."""
    native.set_memory_limit(num_bytes)


class Properties:
    """torch.cuda.get_device_properties of an H100 with this memory limit."""

    name = "NVIDIA H100 80GB HBM3 (simulated)"
    major, minor = 9, 0
    multi_processor_count = 132
    warp_size = 32
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    shared_memory_per_block = 49152
    shared_memory_per_block_optin = 232448
    shared_memory_per_multiprocessor = 233472
    L2_cache_size = 50 * 2**20
    is_integrated = False
    gcnArchName = ""
    uuid = "simulated"

    @property
    def total_memory(self) -> int:
        """Memory of the device in bytes."""
        return native.memory_limit()


class CurrentDevice(contextlib.ContextDecorator):
    """torch.cuda.device: change the current device for a block."""

    def __init__(self, device: Any) -> None:
        self.device = index_of(device)

    def __enter__(self) -> None:
        self.before = native.current_device()
        native.set_current_device(self.device)

    def __exit__(self, *_: object) -> None:
        native.set_current_device(self.before)


def _exchange_device(device: int) -> int:
    before = native.current_device()
    if device >= 0:
        native.set_current_device(device)
    return before


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """State of a device's generator."""
    return native.generator(index_of(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    """Set the state of a device's generator, from a CPU tensor."""
    native.generator(index_of(device)).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    """States of all devices."""
    return [get_rng_state(device) for device in range(native.device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    """Set the states of all devices."""
    for device, state in enumerate(states):
        set_rng_state(state, device)


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    native.generator(native.current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed all devices."""
    for device in range(native.device_count()):
        native.generator(device).manual_seed(int(seed))


def memory_allocated(device: Any = None) -> int:
    """Bytes of tensors on a device. There is no caching allocator: reserved is the same."""
    return native.memory_used(index_of(device))


def max_memory_allocated(device: Any = None) -> int:
    """Peak of `memory_allocated`."""
    return native.memory_peak(index_of(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start a new peak."""
    native.reset_memory_peak(index_of(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes of a device."""
    total = native.memory_limit()
    return max(0, total - memory_allocated(device)), total


def memory_stats(device: Any = None) -> dict[str, int]:
    """The statistics of torch.cuda.memory_stats that have a meaning here."""
    now, peak = memory_allocated(device), max_memory_allocated(device)
    return {
        f"{kind}_bytes.all.{name}": value
        for kind in ("allocated", "reserved", "active")
        for name, value in (("current", now), ("peak", peak))
    }


def _nothing(*_: Any, **__: Any) -> None:
    return None


# Replacements of torch.cuda; what is not here works by the hooks of device.cpp, or is absent.
FUNCTIONS: dict[str, Any] = {
    # State
    "_lazy_init": _nothing,
    "_lazy_call": lambda call, **_: call(),
    "_is_compiled": lambda: True,
    "_is_in_bad_fork": lambda: False,
    "_check_capability": _nothing,
    "init": _nothing,
    "is_initialized": lambda: True,
    "is_available": lambda: native.device_count() > 0,
    # Devices
    "device": CurrentDevice,
    "device_count": native.device_count,
    "current_device": native.current_device,
    "set_device": lambda device: native.set_current_device(index_of(device)),
    "synchronize": lambda device=None: native.wait("torch.cuda.synchronize"),
    "get_device_name": lambda device=None: Properties.name,
    "get_device_capability": lambda device=None: (Properties.major, Properties.minor),
    "get_device_properties": lambda device=None: Properties(),
    "get_arch_list": lambda: ["sm_90"],
    "get_sync_debug_mode": lambda: 0,
    "is_bf16_supported": lambda *_, **__: True,
    "can_device_access_peer": lambda device, other: True,
    "utilization": lambda device=None: 0,
    # Memory
    "empty_cache": _nothing,
    "ipc_collect": _nothing,
    "memory_allocated": memory_allocated,
    "memory_reserved": memory_allocated,
    "max_memory_allocated": max_memory_allocated,
    "max_memory_reserved": max_memory_allocated,
    "reset_peak_memory_stats": reset_peak_memory_stats,
    "memory_stats": memory_stats,
    "mem_get_info": mem_get_info,
    # Random numbers
    "get_rng_state": get_rng_state,
    "set_rng_state": set_rng_state,
    "get_rng_state_all": get_rng_state_all,
    "set_rng_state_all": set_rng_state_all,
    "manual_seed": manual_seed,
    "manual_seed_all": manual_seed_all,
    "seed_all": _nothing,
    "initial_seed": lambda: native.generator(native.current_device()).initial_seed(),
    # Streams and graphs
    "Stream": streams.Stream,
    "ExternalStream": streams.Stream,
    "Event": streams.Event,
    "stream": streams.use_stream,
    "set_stream": _nothing,
    "current_stream": streams.Stream,
    "default_stream": streams.Stream,
    "CUDAGraph": streams.CUDAGraph,
    "graph": streams.capture_graph,
    "graph_pool_handle": lambda: (0, 0),
    "is_current_stream_capturing": native.is_capturing,
}
# Of torch._C: what the CPU build lacks and torch's Python calls.
BUILT_IN: dict[str, Any] = {
    "_has_cuda": True,
    "_cuda_clearCublasWorkspaces": _nothing,
    "_cuda_getDeviceCount": native.device_count,
    "_cuda_getDevice": native.current_device,
    "_cuda_setDevice": native.set_current_device,
    "_cuda_exchangeDevice": _exchange_device,
    "_cuda_maybeExchangeDevice": _exchange_device,
    "_cuda_getCurrentRawStream": lambda device: 0,
}


def install() -> None:
    """Give torch the device. The library was loaded before torch, by startup/sitecustomize.py."""
    if limit_mb := os.environ.get("CUDA_DEVICE_LIMIT_MB"):
        set_memory_limit(int(float(limit_mb) * 2**20))
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.graphs):
        for name, function in FUNCTIONS.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, function)
    for name, function in BUILT_IN.items():
        setattr(torch._C, name, function)
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "13.0"  # of which kernels are chosen by litgrpo and its libraries
    storages.install()
    nccl.install()
    flash.install()
