"""Random state of the host and of every device in use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from litgrpo.distributed.device import known_backends


def random_state() -> dict[str, Any]:
    """Return torch's random state on the host and on each device, as tensors and numbers."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    for each in known_backends():
        state |= each.random_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the result of `random_state` on the devices that exist."""
    torch.set_rng_state(state["cpu"])
    for number, own in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(own, number)
    for each in known_backends():
        each.set_random_state(state)


@contextmanager
def seeded_on_cpu(seed: int) -> Iterator[None]:
    """Create tensors on the CPU from this seed; the random state of every device is unchanged.

    Lightning builds models within `torch.device("cuda")`. Weights drawn there would be others than
    on a CPU, and `torch.manual_seed` would seed the numbers of all devices.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield
