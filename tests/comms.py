"""Several processes without any: `Comm` objects whose answers are worked out in one."""

from collections.abc import Callable

import torch
from torch import Tensor


class Twins:
    """Two processes that hold the same."""

    world_size = 2

    def sum(self, value: Tensor) -> Tensor:
        """Twice the value."""
        return 2 * value

    def max(self, value: Tensor) -> Tensor:
        """The value."""
        return value

    def gather(self, values: Tensor) -> Tensor:
        """The values, twice."""
        return torch.cat([values, values])


class Listening:
    """One of two processes that are computed in turns, see `in_turns`.

    Args:
        sums: of both processes, as far as they are known.
    """

    world_size = 2

    def __init__(self, sums: list[Tensor]) -> None:
        self.sums = sums
        self.asked: list[Tensor] = []

    def sum(self, value: Tensor) -> Tensor:
        """The sum of both where it is known, else the value."""
        self.asked.append(value)
        number = len(self.asked)
        return self.sums[number - 1] if number <= len(self.sums) else value

    def max(self, value: Tensor) -> Tensor:
        """Not asked for."""
        raise NotImplementedError

    def gather(self, values: Tensor) -> Tensor:
        """Not asked for."""
        raise NotImplementedError


def in_turns(*processes: Callable[[Listening], Tensor]) -> list[Tensor]:
    """Results of two processes that take turns: each round knows one more sum, until all are."""
    sums: list[Tensor] = []
    while True:
        comms = [Listening(sums) for _ in processes]
        results = [process(comm) for process, comm in zip(processes, comms, strict=True)]
        if len(sums) == len(comms[0].asked):
            return results
        position = len(sums)
        sums.append(torch.stack([comm.asked[position] for comm in comms]).sum(0))
