"""Dimension in which a weight is sharded over chips, for the strategy and the planner."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

MIN_SHARD_SIZE = 1024


def shard_dim(shape: Sequence[int], chips: int, min_size: int = MIN_SHARD_SIZE) -> int | None:
    """Return the largest dimension that can be sharded evenly over chips.

    Args:
        shape: of a tensor.
        chips: n of them.
        min_size: a tensor of fewer elements is kept whole on every chip.

    Returns:
        The dimension, of equal ones the first; None keeps the tensor whole on every chip.

    Example:
        >>> shard_dim((2304, 9216), 8), shard_dim((256, 6), 4), shard_dim((2304,), 7)
        (1, 0, None)
    """
    if chips == 1 or prod(shape) < min_size:
        return None
    even = [dim for dim, size in enumerate(shape) if size % chips == 0]
    return max(even, key=lambda dim: shape[dim], default=None)


def share_of(shape: Sequence[int], chips: int, min_size: int = MIN_SHARD_SIZE) -> int:
    """Return the number of elements of a tensor on each chip.

    Args:
        shape: of the tensor.
        chips: n of them.
        min_size: see `shard_dim`.
    """
    return prod(shape) // (1 if shard_dim(shape, chips, min_size) is None else chips)


class DividesWeights:
    """Strategy that shards weights over chips by `shard_dim`.

    `min_shard_size`, of its arguments: parameters of fewer elements are kept whole on every chip.
    """

    min_shard_size: int
