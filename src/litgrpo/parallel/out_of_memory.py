"""When memory is short: repeat a computation with half as many rows at once."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")
# How allocators that raise a plain RuntimeError say it: two of torch's on the CPU, and XLA's.
MESSAGES = ("can't allocate memory", "not enough memory", "RESOURCE_EXHAUSTED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice; each device says it in its own way."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in MESSAGES)


def free_memory() -> None:
    """Give cached memory back to the device, after the tensors that filled it are gone."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA has not been used


def with_halving(
    attempt: Callable[[int | None], Result],
    *,
    rows: Callable[[], int],
    limit: int | None,
    on_halved: Callable[[int], None],
    what: str,
    setting: str,
    unchanged: str,
    remedy: str,
    least: int = 1,
) -> Result:
    """The result of an attempt, repeated with half as many rows at once while memory is short.

    Only for what may be repeated: the attempt must begin anew when it is called again, and no
    other process may wait for this one in the middle of it.

    Args:
        attempt: called with the limit on rows at once; None: no limit.
        rows: how many rows the attempt that failed had at once; may be fewer than the limit.
        limit: of the first attempt.
        on_halved: called with each lower limit, so that later computations begin with it.
        what: which part of the iteration, for messages.
        setting: which setting the limit is, for messages.
        unchanged: what a lower limit does not change, for messages.
        remedy: what the user can do where nothing is left to halve.
        least: the lowest limit; rows below it cannot be divided.

    Returns:
        What the first attempt with enough memory returned.

    Raises:
        RuntimeError: memory does not suffice for `least` rows either.
    """
    while True:
        try:
            return attempt(limit)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed = rows()
            if failed <= least:
                at_once = "a single row" if least == 1 else f"{least} rows"
                raise RuntimeError(
                    f"Out of memory in {what}, with {at_once} at once: {remedy}."
                ) from error
        # Here, behind the handler, the error is gone, and with it the frames that held tensors.
        limit = max(least, failed // 2)
        on_halved(limit)
        free_memory()
        warnings.warn(
            f"out of memory in {what}: {setting} is {limit} from now on "
            f"({unchanged} will be the same)",
            stacklevel=2,
        )
