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
        known: sums and maxima of both processes, as far as they are known.
    """

    world_size = 2

    def __init__(self, known: list[Tensor]) -> None:
        self.known = known
        self.asked: list[Tensor] = []
        self.largest: list[bool] = []  # whether a maximum was asked for

    def sum(self, value: Tensor) -> Tensor:
        """The sum of both where it is known, else the value."""
        return self._answer(value, largest=False)

    def max(self, value: Tensor) -> Tensor:
        """The maximum of both where it is known, else the value."""
        return self._answer(value, largest=True)

    def _answer(self, value: Tensor, *, largest: bool) -> Tensor:
        self.asked.append(value)
        self.largest.append(largest)
        number = len(self.asked)
        return self.known[number - 1] if number <= len(self.known) else value

    def gather(self, values: Tensor) -> Tensor:
        """Not asked for."""
        raise NotImplementedError


def in_turns(*processes: Callable[[Listening], Tensor]) -> list[Tensor]:
    """Results of two processes that take turns: each round knows one more answer, until all are."""
    known: list[Tensor] = []
    while True:
        comms = [Listening(known) for _ in processes]
        results = [process(comm) for process, comm in zip(processes, comms, strict=True)]
        position = len(known)
        if position == len(comms[0].asked):
            return results
        asked = torch.stack([comm.asked[position] for comm in comms])
        known.append(asked.amax(0) if comms[0].largest[position] else asked.sum(0))
