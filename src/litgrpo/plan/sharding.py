"""Weights and rows on each of several devices, for each kind of strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Literal

from torch import Tensor

from litgrpo.distributed.sharding import MIN_SHARD_SIZE, share_of

# {phase: (bytes, what they are)} of weights that are temporarily whole on each device.
Gathered = dict[Literal["rollout", "learning"], tuple[int, str]]


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of whole tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class Sharding(ABC):
    """Split of weights and rows over devices.

    Args:
        number: devices.
    """

    number: int = 1
    # Whether a lower compute precision keeps a second copy of a device's weights.
    casts_weights = True

    @abstractmethod
    def share(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of tensors on the device that holds most."""

    @abstractmethod
    def gather(self, blocks: Sequence[Sequence[Tensor]], outside: Sequence[Tensor]) -> Gathered:
        """Count weights that are temporarily whole on each of several devices.

        Args:
            blocks: weights of each layer.
            outside: weights in no layer.
        """

    def rows(self, number: int) -> int:
        """Return the rows of a rollout on each device."""
        return -(-number // self.number)

    def micro_rows(self, rows: int, step_rows: int) -> int:
        """Return the rows of a micro-batch on each device.

        Args:
            rows: rows of a micro-batch in the recipe.
            step_rows: rows of an optimizer step on all devices; 0: equal to `rows`.
        """
        return min(rows, self.rows(step_rows)) if step_rows else rows

    def logit_rows(self, rows: int, step_rows: int) -> int:
        """Return the rows from which chunks of logits are cut."""
        return self.micro_rows(rows, step_rows)


@dataclass(frozen=True)
class XLASharding(Sharding):
    """One process splits every tensor over all chips (SPMD).

    Args:
        min_shard_size: tensors with fewer elements are replicated.
    """

    min_shard_size: int = MIN_SHARD_SIZE

    def share(self, tensors: Iterable[Tensor]) -> int:
        return sum(
            share_of(t.shape, self.number, self.min_shard_size) * t.element_size() for t in tensors
        )

    def gather(self, blocks: Sequence[Sequence[Tensor]], outside: Sequence[Tensor]) -> Gathered:
        # Sharded weights are gathered one at a time.
        largest = max(chain(*blocks, outside), key=Tensor.numel)
        size, text = total_bytes([largest]), "the largest weight whole"
        learning = (size, text)
        if largest.requires_grad:
            learning = (2 * size, "the largest weight, its gradient")
        return {"rollout": (size, text), "learning": learning}

    def rows(self, number: int) -> int:
        # A chip has all rows if they cannot be split evenly.
        return number if number % self.number else number // self.number

    def micro_rows(self, rows: int, step_rows: int) -> int:
        # A micro-batch is split over the chips.
        return -(-rows // self.number)

    def logit_rows(self, rows: int, step_rows: int) -> int:
        # Rows of all chips, padded to equal shares.
        return self.micro_rows(rows, step_rows) * self.number


@dataclass(frozen=True)
class DDPSharding(Sharding):
    """Each process holds the whole model and trains on its share of the rows (DDP)."""

    def share(self, tensors: Iterable[Tensor]) -> int:
        return total_bytes(tensors)

    def gather(self, blocks: Sequence[Sequence[Tensor]], outside: Sequence[Tensor]) -> Gathered:
        # The buckets are a second copy of all gradients.
        trained = (weight for weight in chain(*blocks, outside) if weight.requires_grad)
        return {"learning": (total_bytes(trained), "DDP's buckets of gradients")}


@dataclass(frozen=True)
class SingleDevice(DDPSharding):
    """One device; the strategy supports no others."""


@dataclass(frozen=True)
class FSDPSharding(Sharding):
    """Each process holds a shard of every tensor, split along its first dimension (FSDP2).

    Args:
        replicas: copies of the model (HSDP); each is sharded over number / replicas processes.
    """

    replicas: int = 1
    casts_weights = False  # gathered weights are cast, shards are not

    @property
    def shards(self) -> int:
        """Processes that share one copy of the model."""
        return self.number // self.replicas

    def share(self, tensors: Iterable[Tensor]) -> int:
        # As in `torch.chunk`, the first process holds most: ceil(n / shards) rows of a tensor.
        rows = ((-(-t.shape[0] // self.shards), t) for t in tensors)
        return sum(count * prod(t.shape[1:]) * t.element_size() for count, t in rows)

    def gather(self, blocks: Sequence[Sequence[Tensor]], outside: Sequence[Tensor]) -> Gathered:
        # The next layer is prefetched while one computes. Gradients of a unit are reduced in
        # float32 once all are available.
        layer = max(blocks, key=total_bytes)
        reduced = sum(4 * w.numel() for w in (*layer, *outside) if w.requires_grad)
        learning = 2 * total_bytes(layer) + total_bytes(outside) + reduced
        return {
            "rollout": (total_bytes(chain(*blocks, outside)), "all weights whole"),
            "learning": (learning, "2 layers and the rest, gradients"),
        }
