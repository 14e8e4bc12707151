"""Collective operations over the processes (ranks) of a run."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor, distributed

Value = TypeVar("Value")


class Comm(Protocol):
    """Collective operations on tensors; every rank must call them equally often.

    Example:
        >>> import torch
        >>> SingleProcess().sum(torch.tensor(2.0))
        tensor(2.)
    """

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor over ranks; the result is on the tensor's device."""

    def max(self, value: Tensor) -> Tensor:
        """Elementwise maximum of a tensor over ranks, on the tensor's device."""

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate the flat tensors of all ranks, each padded with NaN to the longest."""


class SingleProcess:
    """`Comm` of a run with one process: every operation returns its argument."""

    world_size = 1

    def sum(self, value: Tensor) -> Tensor:
        """Return the value."""
        return value

    def max(self, value: Tensor) -> Tensor:
        """Return the value."""
        return value

    def gather(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values


def is_distributed() -> bool:
    """Return True if torch.distributed is initialized with more than one rank."""
    initialized = distributed.is_available() and distributed.is_initialized()
    return initialized and distributed.get_world_size() > 1


def broadcast_object(value: Value) -> Value:
    """Return rank 0's value on every rank; every rank must call this.

    Args:
        value: of this rank; must be picklable.
    """
    if not is_distributed():
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def all_gather_object(value: Value) -> list[Value]:
    """Return the value of each rank, in order; every rank must call this.

    Args:
        value: of this rank; must be picklable.
    """
    if not is_distributed():
        return [value]
    values: list[Value] = [value] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
