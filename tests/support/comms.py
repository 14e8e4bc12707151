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
        known: answers to both processes, as far as they are known.
    """

    world_size = 2

    def __init__(self, known: list[Tensor]) -> None:
        self.known = known
        self.asked: list[Tensor] = []
        self.joined: list[Callable[[list[Tensor]], Tensor]] = []  # how the answers are joined

    def sum(self, value: Tensor) -> Tensor:
        """The sum of both where it is known, else the value."""
        return self._answer(value, lambda values: torch.stack(values).sum(0))

    def max(self, value: Tensor) -> Tensor:
        """The maximum of both where it is known, else the value."""
        return self._answer(value, lambda values: torch.stack(values).amax(0))

    def gather(self, values: Tensor) -> Tensor:
        """The values of both where they are known, padded with NaN, else the values."""
        return self._answer(values, _concatenate)

    def _answer(self, value: Tensor, join: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self.asked.append(value)
        self.joined.append(join)
        number = len(self.asked)
        return self.known[number - 1] if number <= len(self.known) else value


def _concatenate(values: list[Tensor]) -> Tensor:
    longest = max(map(len, values))
    pad = torch.nn.functional.pad
    return torch.cat([pad(part, (0, longest - len(part)), value=torch.nan) for part in values])


def in_turns(*processes: Callable[[Listening], Tensor]) -> list[Tensor]:
    """Results of two processes that take turns: each round knows one more answer, until all are."""
    known: list[Tensor] = []
    while True:
        comms = [Listening(known) for _ in processes]
        results = [process(comm) for process, comm in zip(processes, comms, strict=True)]
        position = len(known)
        if position == len(comms[0].asked):
            return results
        known.append(comms[0].joined[position]([comm.asked[position] for comm in comms]))
