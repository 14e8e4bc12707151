"""What each of several devices holds of weights and rows: one way for each kind of strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from litgrpo.distributed.sharding import MIN_SHARD_SIZE, share_of


def size(tensor: Tensor) -> int:
    """Bytes of one element."""
    return tensor.element_size()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of these tensors, whole."""
    return sum(tensor.numel() * size(tensor) for tensor in tensors)


@dataclass(frozen=True)
class Gathered:
    """Bytes of weights that are whole for a while on each device.

    Args:
        rollout: in a rollout, and what they are.
        learning: in the update.
        what_learning: what these are.
    """

    rollout: tuple[int, str] = (0, "")
    learning: int = 0
    what_learning: str = ""


@dataclass(frozen=True)
class Division(ABC):
    """Weights and rows divided over devices.

    Args:
        number: n devices.
    """

    number: int = 1
    # Whether a lower precision keeps all of a device's weights once more.
    casts_weights = True

    @abstractmethod
    def share(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of these tensors on the device that holds most."""

    @abstractmethod
    def gathered(
        self,
        weights: Sequence[Tensor],
        blocks: Sequence[Sequence[Tensor]],
        outside: Sequence[Tensor],
    ) -> Gathered:
        """What is whole for a while; see `litgrpo.tools.plan.memory.Blueprint`."""

    def rows(self, number: int) -> int:
        """Rows of a rollout on each device."""
        return -(-number // self.number)

    def micro_rows(self, rows: int, step_rows: int) -> int:
        """Rows of a micro-batch on each device.

        Args:
            rows: of a micro-batch as the recipe has it.
            step_rows: rows that share an optimizer step, on all devices; 0: as many as `rows`.
        """
        return min(rows, self.rows(step_rows)) if step_rows else rows

    def head_rows(self, rows: int, step_rows: int) -> int:
        """Rows whose logits a chunk is cut from."""
        return self.micro_rows(rows, step_rows)


@dataclass(frozen=True)
class Chips(Division):
    """One process cuts every tensor over all chips (SPMD).

    Args:
        min_shard_size: tensors of fewer elements are kept whole on every chip.
    """

    min_shard_size: int = MIN_SHARD_SIZE

    def share(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of these tensors on each chip."""
        return sum(share_of(t.shape, self.number, self.min_shard_size) * size(t) for t in tensors)

    def rows(self, number: int) -> int:
        """Rows of a batch on each chip: all of them where they cannot be divided evenly."""
        return number if number % self.number else number // self.number

    def head_rows(self, rows: int, step_rows: int) -> int:
        """Those of a micro-batch on all chips, filled up to whole shares."""
        return self.micro_rows(rows, step_rows) * self.number

    def micro_rows(self, rows: int, step_rows: int) -> int:
        """A micro-batch is cut, too."""
        return -(-rows // self.number)

    def gathered(
        self,
        weights: Sequence[Tensor],
        blocks: Sequence[Sequence[Tensor]],
        outside: Sequence[Tensor],
    ) -> Gathered:
        """Divided weights are gathered one at a time; a chip alone has them whole."""
        largest = max(weights, key=Tensor.numel)
        whole = bytes_of([largest]) * (self.number > 1)
        how = "the largest weight whole"
        copies, words = ((1, how), (2, f"{how}, and its gradient"))[largest.requires_grad]
        return Gathered((whole, how), copies * whole, words)


@dataclass(frozen=True)
class Replicas(Division):
    """Each process holds the whole model, and learns from its share of the rows (DDP)."""

    def share(self, tensors: Iterable[Tensor]) -> int:
        """All of it."""
        return bytes_of(tensors)

    def gathered(
        self,
        weights: Sequence[Tensor],
        blocks: Sequence[Sequence[Tensor]],
        outside: Sequence[Tensor],
    ) -> Gathered:
        """DDP sums gradients in buckets, which are one more copy of all of them."""
        buckets = bytes_of(weight for weight in weights if weight.requires_grad)
        return Gathered((0, ""), buckets * (self.number > 1), "DDP's buckets of gradients")


@dataclass(frozen=True)
class Alone(Replicas):
    """One device; the strategy knows no others."""


@dataclass(frozen=True)
class FullShard(Division):
    """Each process holds a shard of every tensor, cut along its first dimension (FSDP2).

    Args:
        replicas: copies of the model (HSDP); each is divided over number / replicas processes.
    """

    replicas: int = 1
    casts_weights = False  # what is gathered is cast

    @property
    def shards(self) -> int:
        """Processes that share one copy."""
        return self.number // self.replicas

    def shard_numel(self, shape: Sequence[int], rank: int) -> int:
        """Numbers of a tensor that the process of this rank within its replica holds.

        `torch.chunk`'s rule: ceil(n / shards) rows each until there are none left.

        Example:
            >>> [FullShard(4).shard_numel((10, 3), rank) for rank in range(4)]
            [9, 9, 9, 3]
        """
        each = -(-shape[0] // self.shards)
        rows = max(0, min(each, shape[0] - rank * each))
        return rows * prod(shape[1:])

    def share_of_rank(self, tensors: Iterable[Tensor], rank: int) -> int:
        """Bytes of these tensors' shards on one process."""
        return sum(self.shard_numel(t.shape, rank) * size(t) for t in tensors)

    def share(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of these tensors on the first process, which holds most."""
        return self.share_of_rank(tensors, 0)

    def gathered(
        self,
        weights: Sequence[Tensor],
        blocks: Sequence[Sequence[Tensor]],
        outside: Sequence[Tensor],
    ) -> Gathered:
        """A rollout has all weights whole; the update two layers, a layer's gradient, the rest."""
        several = self.number > 1
        layer = max(blocks, key=bytes_of)
        learning = 2 * bytes_of(layer) + bytes_of(outside)
        # Gradients are reduced in float32, when all of a unit's are there.
        learning += sum(4 * w.numel() for w in (*layer, *outside) if w.requires_grad)
        how = "two layers, and what is in none, with the gradients of one and the rest"
        whole = (several * bytes_of(weights), "all weights whole")
        return Gathered(whole, several * learning, how)
