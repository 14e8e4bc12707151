"""How memory that is short shows, how to give memory back, and how to keep what was freed."""

import ctypes
import gc
import os
import platform
from typing import Any

import torch

# How allocators that raise a plain RuntimeError say it: two on the CPU, one of compilers.
MESSAGES = ("can't allocate memory", "not enough memory", "RESOURCE_EXHAUSTED")
# Parameters of glibc's mallopt, and the environment's names for the same.
TRIM_THRESHOLD, MMAP_MAX = -1, -4
SET_BY_THE_USER = ("MALLOC_", "GLIBC_TUNABLES")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice; each device says it in its own way."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in MESSAGES)


def free_memory() -> None:
    """Give cached memory back to the device, after the tensors that filled it are gone."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA has not been used
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def keep_freed_memory() -> bool:
    """Let this process keep the memory of freed tensors for the next ones, where it has glibc.

    glibc asks the system for each large tensor and gives it back with the tensor, so that a
    step touches new pages all the time, which a virtual machine pays dearly. What is set in the
    environment stays.

    Returns:
        Whether it does from now on.
    """
    libc = _glibc()
    if libc is None or any(name.startswith(SET_BY_THE_USER) for name in os.environ):
        return False
    return bool(libc.mallopt(MMAP_MAX, 0)) and bool(libc.mallopt(TRIM_THRESHOLD, -1))


def _glibc() -> Any:
    """The C library of this process, or None where it is another one."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
