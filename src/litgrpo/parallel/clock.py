"""The time that each phase of an iteration takes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from litgrpo.parallel.device import backend
from litgrpo.types import Stats

Method = Callable[..., Any]


class Clock:
    """Seconds of the phases of one iteration.

    Args:
        device: is waited for at the end of each phase.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()

    def restart(self) -> None:
        """Begin an iteration."""
        self.seconds, self.began = {}, time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of what is done within to the phase of this name."""
        started = time.perf_counter()
        yield
        backend(self.device).synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def stats(self, tokens: int) -> Stats:
        """The seconds of each phase and of the step, and tokens per second of the phases, to log.

        The step is the iteration up to here.
        """
        numbers = self.seconds | {"perf/tokens_per_s": tokens / sum(self.seconds.values())}
        numbers["time/step_s"] = time.perf_counter() - self.began
        return {name: torch.tensor(number) for name, number in numbers.items()}


def timed(name: str) -> Callable[[Method], Method]:
    """Count every call of a method as a phase, on the `clock` of its object."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.clock.phase(name):
                return method(self, *args, **kwargs)

        return call

    return decorate
