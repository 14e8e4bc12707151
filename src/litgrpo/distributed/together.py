"""What one of several processes does for all, and what all say."""

from __future__ import annotations

from typing import TypeVar

from torch import distributed

Value = TypeVar("Value")


def several() -> bool:
    """Whether processes of torch.distributed train together."""
    there = distributed.is_available() and distributed.is_initialized()
    return there and distributed.get_world_size() > 1


def from_first(value: Value) -> Value:
    """The value of process 0; every process must take part.

    Args:
        value: of this process; one that can be pickled.
    """
    if not several():
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def from_all(value: Value) -> list[Value]:
    """The value of each process; every process must take part.

    Args:
        value: of this process; one that can be pickled.
    """
    if not several():
        return [value]
    values: list[Value] = [value] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
