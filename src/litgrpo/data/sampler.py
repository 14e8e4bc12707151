"""The order of batches, a pure function of (seed, epoch), and a loader that knows its position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count as count_from
from itertools import islice, zip_longest
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from litgrpo.tensors import length_buckets

Batch = TypeVar("Batch")
Plan = Callable[[int], Sequence[list[int]]]  # epoch -> batches of row numbers


def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    """[count] a permutation that depends on nothing but its arguments."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator)


def fixed_batches(count: int, batch_size: int) -> list[list[int]]:
    """All rows in their order; the last batch may be smaller."""
    return [part.tolist() for part in torch.arange(count).split(batch_size)]


def batches_by_set(set_names: Sequence[str], batch_size: int) -> list[list[int]]:
    """All rows in batches of one set each; the sets take turns, each in its order.

    Example:
        >>> batches_by_set(["a", "a", "a", "b"], batch_size=2)
        [[0, 1], [3], [2]]
    """
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(set_names):
        rows_of.setdefault(name, []).append(row)
    batches = [
        [[rows[place] for place in part] for part in fixed_batches(len(rows), batch_size)]
        for rows in rows_of.values()
    ]
    return [batch for turn in zip_longest(*batches) for batch in turn if batch is not None]


class FullBatches(Sequence[list[int]]):
    """The full batches of an order; the rows that fill no batch sit out. 8 bytes for each row.

    Args:
        order: [count] row numbers.
        batch_size: rows of a batch.

    Example:
        >>> [*FullBatches(torch.arange(5), batch_size=2)]
        [[0, 1], [2, 3]]
    """

    def __init__(self, order: Tensor, batch_size: int) -> None:
        self.batches = order[: len(order) - len(order) % batch_size].view(-1, batch_size)

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.batches)

    def __getitem__(self, number: Any) -> Any:
        """One batch, or a list of them."""
        return self.batches[number].tolist()


def shuffled_batches(count: int, batch_size: int, seed: int, epoch: int) -> FullBatches:
    """Full batches in random order; the rows that fill no batch sit out this epoch."""
    return FullBatches(shuffled(count, seed, epoch), batch_size)


def bucketed_batches(
    lengths: Tensor, max_rows: int | None, max_tokens: int | None, seed: int, epoch: int
) -> list[list[int]]:
    """All rows in batches of about equal length, in random order.

    Lengths are rounded up to five binary digits (by at most 1/16), rows of the same rounded length
    change places at random, and batches are cut from long to short. The rounded lengths are the
    same in every epoch, so the number of batches is too.

    Args:
        lengths: [M] tokens of each row.
        max_rows: rows of a batch at most.
        max_tokens: tokens of a batch at most, padding included (a longer row is alone).
        seed: of the order.
        epoch: of the order.

    Returns:
        Lists of row numbers.
    """
    order = shuffled(len(lengths), seed, epoch)
    # With n = 2^(b-1) + ... of b binary digits, five of them are kept: a step is 2^(b-5).
    steps = torch.tensor([1 << max(0, int(n).bit_length() - 5) for n in lengths])
    rounded = (lengths + steps - 1) // steps * steps
    buckets = length_buckets(rounded[order], max_rows=max_rows, max_tokens=max_tokens)
    turn = shuffled(len(buckets), seed, epoch).tolist()
    return [order[buckets[place]].tolist() for place in turn]


def padded_length(rows: Sequence[Sequence[int]], multiple: int) -> int:
    """The length of the longest row, rounded up to a multiple."""
    return -(-max(map(len, rows)) // multiple) * multiple


def share(batch: list[int], rank: int, world_size: int) -> list[int]:
    """The rows of one process: a slice of the batch, equal slices where the batch divides.

    Every process gets a row, so that all take part in every step: where there are too few, the
    first row is given again.

    Example:
        >>> [share([4, 2, 7, 5], rank, world_size=2) for rank in range(2)]
        [[4, 2], [7, 5]]
    """
    start, stop = (len(batch) * r // world_size for r in (rank, rank + 1))
    return batch[start:stop] or batch[:1]


class BatchOrder(Sampler[list[int]]):
    """Batches of row numbers, epoch by epoch, each cut into one share per process.

    Args:
        plan: epoch -> the batches of all processes together, as many in every epoch.
        rank: this process.
        world_size: number of processes.
    """

    def __init__(self, plan: Plan, rank: int = 0, world_size: int = 1) -> None:
        self.plan, self.rank, self.world_size = plan, rank, world_size
        self.num_batches = len(plan(0))
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; Lightning calls this. Another epoch than the one at hand starts at 0."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __len__(self) -> int:
        """Number of batches of an epoch, whatever has been handed out of it."""
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of the epoch at hand that are not behind `start`."""
        batches = self.plan(self.epoch)
        for number in range(self.start, len(batches)):
            yield share(batches[number], self.rank, self.world_size)


class BatchLoader(Generic[Batch]):
    """Batches whose position is part of the checkpoint.

    Lightning saves `state_dict()` under loops/fit_loop/combined_loader and calls `set_epoch` of
    `sampler`. The position counts what was handed out, not what workers read ahead. This is no
    `DataLoader`, because Lightning builds those anew for prediction and advises on their workers;
    it uses one, with a generator of its own, because each start of iteration draws from it.

    Args:
        dataset: row numbers -> batch.
        sampler: which rows, in which order.
        num_workers: processes that build batches ahead.
        identity: what a saved position depends on; a checkpoint with another one is refused.
    """

    def __init__(
        self,
        dataset: Dataset[Batch],
        sampler: BatchOrder,
        num_workers: int = 0,
        identity: dict[str, Any] | None = None,
    ) -> None:
        self.dataset, self.sampler = dataset, sampler
        self.batch_sampler = None  # Lightning asks for it where there is a `sampler`
        self.num_workers, self.identity = num_workers, identity or {}
        self._position = (0, 0)
        self._resuming = False
        self._drawn = 0

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of an epoch; the first time after a load, those that are left of it.

        Nothing happens before the first batch is asked for: Lightning starts an iterator before it
        sets the epoch.
        """
        if not self._resuming:
            self.sampler.start = 0
        self._resuming = False
        epoch, done = self.sampler.epoch, self.sampler.start
        loader = DataLoader(
            self.dataset,
            batch_size=None,
            sampler=self.sampler,
            num_workers=self.num_workers,
            generator=torch.Generator(),
            collate_fn=_unchanged,
        )
        for number, batch in enumerate(loader, start=done + 1):
            self._position = (epoch, number)
            yield batch

    def ahead(self) -> Batch:
        """The batch after the one that was handed out last, which stays to come."""
        epoch, done = self._position
        if done == len(self):
            epoch, done = epoch + 1, 0
        rows = self.sampler.plan(epoch)[done]
        return self.dataset[share(rows, self.sampler.rank, self.sampler.world_size)]

    def more(self, count: int) -> Batch:
        """Rows out of turn, for dynamic sampling: the batches to come stay the same.

        They come in an order of their own, each row once before any comes again. Processes ask at
        the same time for the same number, and get different rows.

        Args:
            count: rows for this process.
        """
        rank, wanted = self.sampler.rank, count * self.sampler.world_size
        # The batches to come are of epochs from 0 on, so these come from epochs below 0.
        epochs = (self.sampler.plan(-number) for number in count_from(1))
        order = (row for batches in epochs for batch in batches for row in batch)
        rows = list(islice(order, self._drawn, self._drawn + wanted))
        self._drawn += wanted
        return self.dataset[rows[rank * count : (rank + 1) * count]]

    def state_dict(self) -> dict[str, Any]:
        """Epoch, number of its batches handed out, rows out of turn, what they depend on."""
        epoch, done = self._position
        # A new epoch has been set and nothing of it handed out.
        if epoch != self.sampler.epoch:
            epoch, done = self.sampler.epoch, 0
        return {"epoch": epoch, "batches": done, "drawn": self._drawn, **self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position; refuse one in another order of batches."""
        self.check(state)
        self._position = (state["epoch"], state["batches"])
        self._drawn = state["drawn"]
        self.sampler.epoch, self.sampler.start = self._position
        self._resuming = True

    def check(self, state: dict[str, Any]) -> None:
        """Refuse a position in another order of batches.

        Raises:
            ValueError: what the order depends on has another value here.
        """
        for name, ours in self.identity.items():
            if state.get(name) != ours:
                raise ValueError(
                    f"the checkpoint was made with data {name}={state.get(name)!r}, now it is "
                    f"{ours!r}: prompts would be skipped or repeated; restore the setting, or "
                    "start a new run from the exported weights"
                )


def _unchanged(batch: Batch) -> Batch:
    return batch
