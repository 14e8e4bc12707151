"""What processes tell each other: sums, maxima, and tensors of all of them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Comm(Protocol):
    """Collective operations over all processes of a run; every process must take part."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over processes, on the tensor's device."""

    def max(self, value: Tensor) -> Tensor:
        """The elementwise maximum of a tensor over processes, on the tensor's device."""

    def gather(self, values: Tensor) -> Tensor:
        """A flat tensor of every process, one after another, each filled up with NaN."""


class SingleProcess:
    """A run of one process: everything is known already."""

    world_size = 1

    def sum(self, value: Tensor) -> Tensor:
        """The value."""
        return value

    def max(self, value: Tensor) -> Tensor:
        """The value."""
        return value

    def gather(self, values: Tensor) -> Tensor:
        """The values."""
        return values
