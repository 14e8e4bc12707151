"""Detect out-of-memory errors, retry with fewer rows, release cached memory, tune glibc malloc."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from litgrpo.distributed.collectives import Comm, SingleProcess

Result = TypeVar("Result")
# Attempt(max_rows) -> result: a computation with at most `max_rows` rows at once (None: no limit).
# It can be called again after it ran out of memory, and then starts from the beginning.
Attempt = Callable[[int | None], Result]

# Messages of allocations that raise a plain RuntimeError. CUDA's driver, graphs and libraries
# allocate outside of torch's allocator, and late, when memory is almost full. The final errors of
# this file begin with a capital letter, so they do not match.
MESSAGES = (
    "can't allocate memory",  # CPU
    "not enough memory",  # CPU
    "RESOURCE_EXHAUSTED",  # XLA's compiler
    "out of memory",  # drivers of CUDA and HIP, NCCL, MPS
    "ERROR_OUT_OF_MEMORY",  # CUDA's driver, called by Triton
    "_ALLOC_FAILED",  # cuBLAS, cuDNN, cuSPARSE, cuSOLVER
)
# Parameters of glibc's mallopt, and the environment variables that set the same.
TRIM_THRESHOLD, MMAP_MAX = -1, -4
SET_BY_THE_USER = ("MALLOC_", "GLIBC_TUNABLES")

with torch.inference_mode(False), torch.enable_grad():
    # A graph older than that of any pass of this thread; see `free_memory`.
    OLDEST_LEAF = torch.zeros((), device="cpu", requires_grad=True)
    OLDEST_RESULT = OLDEST_LEAF + 0


@dataclass
class RowLimit:
    """Largest number of rows computed at once, halved after each out-of-memory error.

    The limit is kept for the rest of the run and saved in checkpoints: it decides in which order
    sums are rounded.

    Args:
        setting: full key of the option that sets the same limit, for messages.
        remedy: what to change if even the smallest number of rows does not fit.
        max_rows: current limit; None: no limit.
    """

    setting: str
    remedy: str
    max_rows: int | None = None

    def run(
        self,
        attempt: Attempt[Result],
        rows_in_use: Callable[[], int],
        *,
        least: int = 1,
        comm: Comm | None = None,
        computes_alone: bool = True,
    ) -> Result:
        """Return the result of an attempt, halving the number of rows until it fits into memory.

        With several ranks all repeat it if one of them runs out of memory: that one with fewer
        rows, the others with the limit that they have.

        Args:
            attempt: is called with the limit on rows. It calls no collective after the first pass
                that needs much memory, unless `check_other_ranks` comes before it.
            rows_in_use: number of rows that the failed attempt computed at once, which may be less
                than the limit.
            least: rows that cannot be split.
            comm: collectives of the ranks that repeat it together; None: this rank alone.
            computes_alone: False if ranks exchange weights within a pass (FSDP), which one of them
                cannot repeat alone.

        Raises:
            NotEnoughMemory: not even `least` rows fit, or the pass cannot be repeated.
        """
        comm = SingleProcess() if comm is None else comm
        result: Result | None
        while True:
            try:
                result = attempt(self.max_rows)
                check_other_ranks(comm)
                return result
            except OutOfMemoryElsewhere:
                rows = None
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if comm.world_size > 1 and not computes_alone:
                    raise NotEnoughMemory(
                        "Out of memory on one rank, in a pass of sharded weights that ranks "
                        f"cannot repeat: lower {self.setting}, or set "
                        "model.precision.gradient_checkpointing."
                    ) from error
                check_other_ranks(comm, out_of_memory=True)
                rows = rows_in_use()
                if rows <= least:
                    raise NotEnoughMemory(
                        f"Out of memory with {rows} row(s) at once ({self.setting}): {self.remedy}."
                    ) from error
            # The retry is outside of the handlers: there the error would keep the frames of the
            # failed attempt, and with them its tensors, alive.
            result = None
            if rows is not None:
                self._halve(rows, least)
            free_memory()

    def _halve(self, rows: int, least: int) -> None:
        self.max_rows = max(least, rows // 2)
        warnings.warn(
            f"Out of memory with {rows} rows at once; continuing with {self.setting} = "
            f"{self.max_rows}. Results do not change.",
            stacklevel=3,
        )


class NotEnoughMemory(RuntimeError):
    """Not even the smallest size fits into memory; the message names options that change that."""

    exit_code = 2  # of the program: the user can fix it


class OutOfMemoryElsewhere(MemoryError):
    """Another rank ran out of memory; this rank has to repeat the pass with it."""


def check_other_ranks(comm: Comm, *, out_of_memory: bool = False) -> None:
    """Exchange the out-of-memory status with the other ranks; all must call this equally often.

    Raises:
        OutOfMemoryElsewhere: another rank ran out of memory, this one did not.
    """
    if bool(comm.max(torch.tensor(float(out_of_memory)))) and not out_of_memory:
        raise OutOfMemoryElsewhere


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error reports a failed allocation; each device has its own way."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def free_memory() -> None:
    """Return cached memory to the devices, after the tensors that filled it are gone."""
    # After a backward pass that failed, autograd's queue of this thread still holds its graph. The
    # queue begins with the latest nodes, so a pass of the oldest ones empties it.
    torch.autograd.grad(OLDEST_RESULT, OLDEST_LEAF, retain_graph=True)
    gc.collect()
    torch.cuda.empty_cache()  # does nothing if CUDA has not been used
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def keep_freed_memory() -> bool:
    """Keep the memory of freed tensors in this process for later ones, if the C library is glibc.

    By default glibc maps and unmaps each large tensor, so that every step touches new pages, which
    is slow on virtual machines. Values set in the environment are kept.

    Returns:
        True if freed memory is kept from now on.
    """
    libc = _glibc()
    if libc is None or any(name.startswith(SET_BY_THE_USER) for name in os.environ):
        return False
    return bool(libc.mallopt(MMAP_MAX, 0)) and bool(libc.mallopt(TRIM_THRESHOLD, -1))


def _glibc() -> Any:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
