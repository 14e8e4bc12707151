"""Memory that is short on one of several processes: all learn of it, and repeat together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from litgrpo.distributed.comm import Comm
from litgrpo.distributed.memory import free_memory, is_out_of_memory

Result = TypeVar("Result")


ALONE = (
    "Out of memory in learning, on one of several processes that wait for each other within a pass "
    "and cannot repeat it: lower update.micro_batch_size or update.micro_batch_tokens, or set "
    "model.precision.gradient_checkpointing."
)


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
    if bool(comm.max(torch.tensor(float(short)))) and not short:
        raise ShortElsewhere


def on_all(
    attempt: Callable[[int | None], Result], comm: Comm, *, repeats: bool
) -> Callable[[int | None], Result]:
    """The attempt, begun anew on all processes where memory is short on one.

    That one raises its error, and is called again with a lower limit; the others keep theirs.

    Args:
        attempt: asks for no collective operation after the first pass that needs much memory,
            unless `check_others` comes before it.
        comm: of the processes.
        repeats: whether that is so; else the error says what to do, and nothing is repeated.
    """

    def together(limit: int | None) -> Result:
        while True:
            try:
                result = attempt(limit)
                check_others(comm)
            except ShortElsewhere:
                free_memory()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if not repeats:
                    raise RuntimeError(ALONE) from error
                check_others(comm, short=True)
                raise
            else:
                return result

    return together
