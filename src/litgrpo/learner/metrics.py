"""Averages over micro-batches and processes, and the time that each phase takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from litgrpo.parallel.device import synchronize
from litgrpo.types import Stats


class Totals:
    """Sums and counts that micro-batches contribute to; their quotients are exact averages."""

    def __init__(self) -> None:
        """Nothing counted yet."""
        self.sums: Stats = {}

    def add(self, stats: Stats) -> None:
        """Count {name: [2] sum and count}."""
        for name, sum_and_count in stats.items():
            self.sums[name] = self.sums.get(name, 0.0) + sum_and_count.detach().double()

    def add_value(self, name: str, value: Tensor) -> None:
        """Count one number."""
        self.add({name: torch.stack([value.detach(), torch.ones_like(value)])})

    def averages(self, reduce: Callable[[Tensor], Tensor]) -> Stats:
        """{name: []} averages over everything counted.

        Args:
            reduce: sums a tensor over processes; called once.
        """
        sums, counts = reduce(torch.stack(list(self.sums.values()))).unbind(-1)
        means = sums / counts.clamp(min=1)
        return dict(zip(self.sums, means.float(), strict=True))


def on_host(value: Any) -> Any:
    """A plain number as a tensor on the host, anything else as it is: a value to log."""
    return torch.tensor(float(value)) if isinstance(value, int | float) else value


class Clock:
    """Seconds of the phases of one iteration, and the tokens that were sampled in it.

    Args:
        device: is waited for at the end of each phase.
    """

    def __init__(self, device: torch.device) -> None:
        """Start the first phase."""
        self.device = device
        self.seconds: dict[str, float] = {}
        self.tokens = 0
        self.started = time.perf_counter()

    def stop(self, name: str) -> None:
        """End the running phase under this name, where it may go on later, and start the next."""
        synchronize(self.device)
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.started
        self.started = now

    def stats(self) -> Stats:
        """The seconds of each phase, and tokens per second of all of them together."""
        per_s = self.tokens / sum(self.seconds.values())
        numbers = self.seconds | {"perf/tokens_per_s": per_s}
        return {name: torch.tensor(number) for name, number in numbers.items()}
