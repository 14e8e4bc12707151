"""CPU, CUDA and XLA behind one face: the only file of the core that knows device words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked for, so that a clock tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "xla":
        import torch_xla

        torch_xla.sync(wait=True)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory in use so far: of the device where it says, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with so many threads of the processor, or with fewer if there are fewer."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(number, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
