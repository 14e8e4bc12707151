"""Rows of several sources in given shares; their order is a pure function of (seed, epoch)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from litgrpo.arguments import require
from litgrpo.data.sampler import shuffled


def quotas(total: int, weights: Sequence[float]) -> list[int]:
    """How many of `total` rows each source gives; the largest remainders are rounded up.

    Example:
        >>> quotas(10, [2, 1, 1])
        [5, 3, 2]
    """
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda n: counts[n] - exact[n])
    for number in order[: total - sum(counts)]:
        counts[number] += 1
    return counts


def mixed(
    sources: Sequence[int], weights: Sequence[float], seed: int, epoch: int, shuffle: bool = True
) -> list[int]:
    """The rows of an epoch: as many as there are, in shares by weight.

    Each source goes on where the epoch before left it, so each of its rows comes once before any
    comes again. A row that comes again within the epoch is given as its number plus a multiple of
    the number of all rows.

    Args:
        sources: [M] number of the source of each row.
        weights: of each source.
        seed: of the order.
        epoch: of the order; negative ones are other epochs.
        shuffle: random order; else each source in its own order, spread evenly.

    Raises:
        ValueError: a source has no row.
    """
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, source in enumerate(sources):
        rows_of[source].append(row)
    empty = [number + 1 for number in range(len(weights)) if not rows_of[number]]
    require(not empty, f"no row is left of source {empty[:1]} of train, which has a weight")
    total, placed = len(sources), []
    for number, quota in enumerate(quotas(total, weights)):
        own, turns = rows_of[number], defaultdict[int, int](int)
        for taken in range(quota):
            turn, place = divmod(epoch * quota + taken, len(own))
            order = _order(len(own), seed + number + 1, turn, shuffle)
            row = own[order[place]]
            placed.append(((taken + 0.5) / quota, number, row + total * turns[row]))
            turns[row] += 1
    if not shuffle:
        return [row for *_, row in sorted(placed)]
    return [placed[place][2] for place in shuffled(total, seed, epoch).tolist()]


@lru_cache(maxsize=8)
def _order(count: int, seed: int, turn: int, shuffle: bool) -> list[int]:
    """The order of a source's rows in one turn; each is asked for once per row."""
    return shuffled(count, seed, turn).tolist() if shuffle else list(range(count))
