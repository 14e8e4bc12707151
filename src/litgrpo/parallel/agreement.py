"""Memory that is short on one of several processes: all learn of it, and repeat together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from litgrpo.parallel.comm import Comm
from litgrpo.parallel.memory import is_out_of_memory

Result = TypeVar("Result")


class ShortElsewhere(MemoryError):
    """Memory was short on another process; this one could have gone on."""


def check_others(comm: Comm, *, short: bool = False) -> None:
    """Tell the others whether memory is short here, and hear of them; each asks as often.

    Args:
        comm: of the processes.
        short: here.

    Raises:
        ShortElsewhere: on another.
    """
    if comm.world_size > 1 and bool(comm.max(torch.tensor(float(short)))) and not short:
        raise ShortElsewhere


def on_all(attempt: Callable[[int | None], Result], comm: Comm) -> Callable[[int | None], Result]:
    """The attempt, which fails on all processes where memory is short on one.

    Args:
        attempt: asks for no collective operation after the first pass that needs much memory,
            unless `check_others` comes before it.
        comm: of the processes.
    """

    def together(limit: int | None) -> Result:
        try:
            result = attempt(limit)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error) and not isinstance(error, ShortElsewhere):
                check_others(comm, short=True)
            raise
        check_others(comm)
        return result

    return attempt if comm.world_size == 1 else together


def largest(buckets: Callable[[], list[Tensor]], comm: Comm) -> Callable[[], int]:
    """Asks for the most rows that any process had at once, so that all halve the same.

    Args:
        buckets: [rows] of this process, each of which it had at once.
        comm: of the processes.
    """
    return lambda: int(comm.max(torch.tensor(float(max(map(len, buckets()))))))
