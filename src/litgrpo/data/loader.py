"""The order of batches, a pure function of (seed, epoch), and a loader that resumes exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import count as count_from
from itertools import islice, zip_longest
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from litgrpo.arguments import require
from litgrpo.tensors import length_buckets

Batch = TypeVar("Batch")
BatchPlan = Callable[[int], Sequence[list[int]]]  # epoch -> batches of row numbers


def shuffle_rows(count: int, seed: int, epoch: int) -> Tensor:
    """[count] row numbers in a random order that depends only on the arguments.

    Example:
        >>> sorted(shuffle_rows(4, seed=0, epoch=0).tolist())
        [0, 1, 2, 3]
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator)


def batch_in_order(count: int, batch_size: int) -> list[list[int]]:
    """All rows in their order; the last batch may be smaller.

    Example:
        >>> batch_in_order(5, 2)
        [[0, 1], [2, 3], [4]]
    """
    return [part.tolist() for part in torch.arange(count).split(batch_size)]


def batch_by_set(set_names: Sequence[str], batch_size: int) -> list[list[int]]:
    """All rows in batches of one set each; batches of the sets alternate, each set in its order.

    Example:
        >>> batch_by_set(["a", "a", "a", "b"], batch_size=2)
        [[0, 1], [3], [2]]
    """
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(set_names):
        rows_of.setdefault(name, []).append(row)
    batches = [
        [[rows[position] for position in part] for part in batch_in_order(len(rows), batch_size)]
        for rows in rows_of.values()
    ]
    return [batch for turn in zip_longest(*batches) for batch in turn if batch is not None]


class FullBatches(Sequence[list[int]]):
    """The full batches of an order; a smaller last batch is dropped. 8 bytes per row.

    Example:
        >>> [*FullBatches(torch.arange(5), batch_size=2)]
        [[0, 1], [2, 3]]
    """

    def __init__(self, order: Tensor, batch_size: int) -> None:
        self.batches = order[: len(order) - len(order) % batch_size].view(-1, batch_size)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: Any) -> Any:
        return self.batches[number].tolist()


def shuffle_batches(count: int, batch_size: int, seed: int, epoch: int) -> FullBatches:
    """Full batches in random order; the remaining rows are skipped in this epoch."""
    return FullBatches(shuffle_rows(count, seed, epoch), batch_size)


def batches_in_turn(count: int, batch_size: int, epoch: int) -> FullBatches:
    """Full batches in the order of the rows; the remaining rows are the first of the next epoch.

    Example:
        >>> [[*batches_in_turn(3, 2, epoch)] for epoch in range(3)]
        [[[0, 1]], [[2, 0]], [[1, 2]]]
    """
    size = count - count % batch_size
    return FullBatches((torch.arange(size) + epoch * size) % count, batch_size)


def batch_by_length(
    lengths: Tensor, max_rows: int | None, max_tokens: int | None, seed: int, epoch: int
) -> list[list[int]]:
    """Return all rows in batches of about equal length, in random order.

    Example:
        >>> batches = batch_by_length(torch.tensor([3, 40, 3, 41]), 2, None, seed=0, epoch=0)
        >>> sorted(map(sorted, batches))
        [[0, 2], [1, 3]]
    """
    # Lengths are rounded up to five binary digits (by at most 1/16), rows of the same rounded
    # length are shuffled, and batches are cut from long to short. The rounded lengths are the same
    # in every epoch, so the number of batches is as well. Tokens of a batch include its padding; a
    # row of more than `max_tokens` is a batch of one.
    order = shuffle_rows(len(lengths), seed, epoch)
    # Of the b binary digits of n, five are kept: lengths are multiples of 2^(b-5).
    steps = torch.tensor([1 << max(0, int(n).bit_length() - 5) for n in lengths])
    rounded = (lengths + steps - 1) // steps * steps
    buckets = length_buckets(rounded[order], max_rows=max_rows, max_tokens=max_tokens)
    turn = shuffle_rows(len(buckets), seed, epoch).tolist()
    return [order[buckets[number]].tolist() for number in turn]


def allocate_rows(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` rows among sources by weight; the largest remainders are rounded up.

    Example:
        >>> allocate_rows(10, [2, 1, 1])
        [5, 3, 2]
    """
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda n: counts[n] - exact[n])
    for number in order[: total - sum(counts)]:
        counts[number] += 1
    return counts


def mix_sources(
    sources: Sequence[int],  # [M] number of the source of each row
    weights: Sequence[float],
    seed: int,
    epoch: int,  # negative ones are further epochs
    shuffle: bool = True,  # False keeps each source in its own order, spread evenly
    count: int | None = None,  # rows of an epoch; by default M
) -> list[int]:
    """Return the row numbers of one epoch of weighted sources.

    Example:
        >>> mix_sources([0, 0, 1, 1], [3, 1], seed=0, epoch=0, shuffle=False)  # row 0 again: 0 + 4
        [0, 1, 2, 4]
    """
    # Each source continues where the previous epoch stopped, so each of its rows is used once
    # before any is repeated. A row that is repeated within the epoch is returned as its number plus
    # a multiple of the number of all rows.
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, source in enumerate(sources):
        rows_of[source].append(row)
    for number in range(len(weights)):
        require(bool(rows_of[number]), f"source {number + 1} of train has a weight and no rows")
    total, keyed = len(sources), []
    count = total if count is None else count
    for number, quota in enumerate(allocate_rows(count, weights)):
        require(
            quota > 0,
            f"source {number + 1} of train has so small a weight ({weights[number]:g} of "
            f"{sum(weights):g}) that none of the {count} rows of an epoch is its; raise it",
        )
        source_rows, repeats = rows_of[number], defaultdict[int, int](int)
        for taken in range(quota):
            turn, position = divmod(epoch * quota + taken, len(source_rows))
            order = _source_order(len(source_rows), seed + number + 1, turn, shuffle)
            row = source_rows[order[position]]
            keyed.append(((taken + 0.5) / quota, number, row + total * repeats[row]))
            repeats[row] += 1
    if not shuffle:
        return [row for *_, row in sorted(keyed)]
    return [keyed[position][2] for position in shuffle_rows(count, seed, epoch).tolist()]


@lru_cache(maxsize=8)  # called once for each row
def _source_order(count: int, seed: int, turn: int, shuffle: bool) -> list[int]:
    return shuffle_rows(count, seed, turn).tolist() if shuffle else list(range(count))


def compute_padded_length(rows: Sequence[Sequence[int]], multiple: int) -> int:
    """Length of the longest row, rounded up to a multiple."""
    return -(-max(map(len, rows)) // multiple) * multiple


def select_rank_rows(batch: list[int], rank: int, world_size: int) -> list[int]:
    """The rows of one rank: a slice of the batch, equal slices if the batch size is divisible.

    Example:
        >>> [select_rank_rows([4, 2, 7, 5], rank, world_size=2) for rank in range(2)]
        [[4, 2], [7, 5]]
    """
    # Every rank needs a row to take part in collectives. If the batch is smaller than the number of
    # ranks, the first row is repeated.
    start, stop = (len(batch) * r // world_size for r in (rank, rank + 1))
    return batch[start:stop] or batch[:1]


class BatchOrder(Sampler[list[int]]):
    """Batches of row numbers, epoch by epoch, each split among the ranks.

    Example:
        >>> order = BatchOrder(lambda epoch: [[0, 1], [2, 3]], rank=1, world_size=2)
        >>> list(order)
        [[1], [3]]
    """

    # `plan` maps an epoch to the batches of all ranks together, the same number in every epoch.

    def __init__(self, plan: BatchPlan, rank: int = 0, world_size: int = 1) -> None:
        self.plan, self.rank, self.world_size = plan, rank, world_size
        self.num_batches = len(plan(0))
        self.epoch = 0
        self.start = 0  # batches of the epoch to skip

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (called by Lightning); a different epoch starts at its first batch."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's part of each batch from `start` on."""
        batches = self.plan(self.epoch)
        for number in range(self.start, len(batches)):
            yield select_rank_rows(batches[number], self.rank, self.world_size)

    def peek(self, epoch: int, done: int, ahead: int) -> list[int]:
        """Return a coming batch of all ranks: `ahead` 1 is the next after `done` of the epoch."""
        later, number = divmod(done + ahead - 1, self.num_batches)
        return self.plan(epoch + later)[number]

    def draw(self, count: int, start: int) -> tuple[list[int], int]:
        """Return further rows for all ranks, and the next start; no batch of an epoch changes.

        They follow a separate order, each row once before any is repeated.
        """
        # Training uses epochs from 0 on, so epochs below 0 are free for extra rows.
        epochs = (self.plan(-number) for number in count_from(1))
        order = (row for batches in epochs for batch in batches for row in batch)
        return list(islice(order, start, start + count)), start + count

    def state_dict(self) -> dict[str, Any]:
        """Return what the order depends on in addition to the position."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""


class BatchLoader(Generic[Batch]):
    """Loader whose position is part of the checkpoint."""

    # Lightning saves `state_dict()` under loops/fit_loop/combined_loader and calls `set_epoch` of
    # `sampler`. This is not a `DataLoader`, because Lightning rebuilds those for prediction and
    # warns about the number of their workers. A checkpoint with another `identity`, the settings
    # and data that a saved position depends on, is rejected.

    def __init__(
        self, dataset: Dataset[Batch], sampler: BatchOrder, identity: dict[str, Any] | None = None
    ) -> None:
        self.dataset, self.sampler = dataset, sampler
        self.batch_sampler = None  # Lightning reads it of every loader that has a `sampler`
        self.identity = identity or {}
        self._position = (0, 0)  # epoch, number of its batches that were returned
        self._resuming = False
        self._num_drawn = 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of an epoch; after `load_state_dict`, those that remain of it."""
        # A generator: no code runs before the first batch is requested. Lightning creates the
        # iterator before it sets the epoch.
        if not self._resuming:
            self.sampler.start = 0
        self._resuming = False
        epoch, done = self.sampler.epoch, self.sampler.start
        for number, rows in enumerate(self.sampler, start=done + 1):
            batch = self.dataset[rows]
            self._position = (epoch, number)
            yield batch

    def peek(self, ahead: int = 1) -> Batch:
        """Return a coming batch without advancing: 1 is the next one, 2 the one after it."""
        rows = self.sampler.peek(*self._position, ahead)
        return self.dataset[select_rank_rows(rows, self.sampler.rank, self.sampler.world_size)]

    def draw(self, count: int) -> Batch:
        """Return `count` extra rows for dynamic sampling; no batch of an epoch changes.

        All ranks must call this together with the same count, and get different rows.
        """
        rank, wanted = self.sampler.rank, count * self.sampler.world_size
        rows, self._num_drawn = self.sampler.draw(wanted, self._num_drawn)
        return self.dataset[rows[rank * count : (rank + 1) * count]]

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, number of its batches returned, extra rows drawn, and the identity."""
        epoch, done = self._position
        # A new epoch was set, and none of its batches returned.
        if epoch != self.sampler.epoch:
            epoch, done = self.sampler.epoch, 0
        return {"epoch": epoch, "batches": done} | self.order_state() | self.identity

    def order_state(self) -> dict[str, Any]:
        """Return what further batches depend on in addition to the position within the epoch."""
        return {"drawn": self._num_drawn} | self.sampler.state_dict()

    def load_order_state(self, state: dict[str, Any]) -> None:
        """Restore what `order_state` returned."""
        self._num_drawn = state["drawn"]
        self.sampler.load_state_dict(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved position."""
        self.check_state(state)
        self._position = (state["epoch"], state["batches"])
        self.load_order_state(state)
        self.sampler.epoch, self.sampler.start = self._position
        self._resuming = True

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that a saved position refers to the same order of batches."""
        for name, value in self.identity.items():
            if state.get(name) != value:
                rendered = name.startswith("rendered")
                what = "template, chat, tools and tokenizer" if rendered else "the setting"
                raise ValueError(
                    f"the checkpoint was made with data {name}={state.get(name)!r}, now it is "
                    f"{value!r}: prompts would be skipped, repeated or read in another form; "
                    f"restore {what}, or start a new run from the exported weights"
                )
