"""Rows that leave a batch, keep their keys and values, read what they hear, and come back.

Own tokens stand in columns that end at the present one, so a row that comes back takes the last
columns again, whatever the others did meanwhile: nothing has gaps and no position is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from litgrpo.models.leaving import RowsAway
from litgrpo.models.shared_prefix import SharedPrefixCache
from litgrpo.tensors import positions


@dataclass(frozen=True)
class Left:
    """The keys and values of one row that is away; its prompt stays in the cache.

    Args:
        own: for each set of tensors of one shape, [k, H, t, D].
        tokens: t, those that it has been fed.
    """

    own: list[Tensor]
    tokens: int


class CachedRowsAway(RowsAway):
    """Rows of a `SharedPrefixCache`.

    Args:
        model: the library's model without its head.
        head: hidden states [m, E] to logits [m, V].
        cache: of the batch.
        order: [D] the library's number of each entry of the cache's keys; None: the same.
    """

    def __init__(
        self, model: Any, head: Callable[[Tensor], Tensor], cache: Any, order: Tensor | None
    ) -> None:
        self.model, self.head, self.order = model, head, order
        self.cache: SharedPrefixCache = cache
        self.rows: list[Left] = []

    def leave(self, row: int) -> None:
        """See `RowsAway.leave`."""
        self.rows.append(leave(self.cache, row))

    def forget(self, numbers: Sequence[int]) -> None:
        """See `RowsAway.forget`."""
        forget(self.cache, numbers)
        self.rows = [row for number, row in enumerate(self.rows) if number not in numbers]

    def come_back(self, numbers: Sequence[int], ids: Sequence[list[int]]) -> Tensor:
        """See `RowsAway.come_back`."""
        asked = (self.cache, [self.rows[number] for number in numbers], numbers)
        hidden, heard = read(self.model, *asked, ids, self.order)
        come_back(*asked, heard)
        self.rows = [row for number, row in enumerate(self.rows) if number not in numbers]
        return self.head(hidden)


def leave(cache: SharedPrefixCache, row: int) -> Left:
    """Take a live row's keys and values along; the cache drops it with the next `select`."""
    start = int(cache.start[row])
    own = [each[:, row, :, start : cache.fed].clone() for each in cache._own]
    cache.away = torch.cat([cache.away, cache.prompt_of[row : row + 1]])
    return Left(own, cache.fed - start)


def forget(cache: SharedPrefixCache, numbers: Sequence[int]) -> None:
    """Let rows that are away go for good; `numbers` among those that are away."""
    kept = [number for number in range(len(cache.away)) if number not in set(numbers)]
    cache.away = cache.away[kept]


def come_back(
    cache: SharedPrefixCache, rows: Sequence[Left], numbers: Sequence[int], heard: Sequence[Left]
) -> None:
    """Take rows in again, after the live ones.

    Args:
        cache: of the batch.
        rows: m rows as they left.
        numbers: theirs among those that are away.
        heard: keys and values of what each has read since.
    """
    live = len(cache.prompt_of)
    tokens = [row.tokens + more.tokens for row, more in zip(rows, heard, strict=True)]
    cache._make_room(live + len(rows))
    _shift(cache, max(0, max(tokens) - cache.fed))
    least = min([cache.first_start, *(cache.fed - each for each in tokens)])
    for group, own in enumerate(cache._own):
        own[:, :live, :, least : cache.first_start] = 0  # what is masked must be finite
        own[:, live:].zero_()
        for place, (row, more) in enumerate(zip(rows, heard, strict=True), live):
            whole = torch.cat([row.own[group], more.own[group]], 2)
            own[:, place, :, cache.fed - whole.shape[2] : cache.fed] = whole
    device = cache.start.device
    cache.start = torch.cat([cache.start, cache.fed - torch.tensor(tokens, device=device)])
    cache.prompt_of = torch.cat([cache.prompt_of, cache.away[list(numbers)]])
    forget(cache, numbers)
    cache._arrange()


def _shift(cache: SharedPrefixCache, columns: int) -> None:
    """Move the own tokens of all rows to the right, so that longer rows fit."""
    for own in cache._own:
        own[:, :, :, columns : cache.fed + columns] = own[:, :, :, : cache.fed].clone()
    cache.start, cache.fed = cache.start + columns, cache.fed + columns
    cache.first_start += columns


@torch.no_grad()
def read(
    model: Any,
    cache: SharedPrefixCache,
    rows: Sequence[Left],
    numbers: Sequence[int],
    ids: Sequence[list[int]],
    order: Tensor | None = None,
) -> tuple[Tensor, list[Left]]:
    """Let rows that are away read tokens in one pass, after what they have read already.

    Args:
        model: the library's model without its head.
        cache: has the prompts.
        rows: m rows.
        numbers: theirs among those that are away.
        ids: what each reads, one token or more.
        order: [D] the library's number of each entry of the cache's keys; None: the same.

    Returns:
        [m, E] hidden states after the last token of each, and the keys and values of what it read.
    """
    prompt_of = cache.away[list(numbers)]
    prompt_mask, own = cache.prompt_mask[prompt_of], max(row.tokens for row in rows)
    device = prompt_mask.device
    pad = torch.arange(own, device=device) >= torch.tensor(
        [[own - row.tokens] for row in rows], device=device
    )
    # Prompts and own tokens without gaps, padded on the left, as prompts are.
    before = torch.cat([prompt_mask, pad], 1)
    real = torch.argsort(before.long(), dim=1, stable=True)
    width, longest = before.shape[1], max(map(len, ids))
    tokens = torch.zeros(len(rows), longest, dtype=torch.long, device=device)
    new = torch.zeros_like(tokens, dtype=torch.bool)
    for row, each in enumerate(ids):
        tokens[row, : len(each)] = torch.tensor(each, device=device)
        new[row, : len(each)] = True
    mask = torch.cat([before.gather(1, real), new], 1)
    past = DynamicCache()
    tensors = _together(cache, rows, prompt_of, own, real)
    inverse = None if order is None else order.argsort()
    dtype = next(model.parameters()).dtype
    for layer in range(len(tensors) // 2):
        keys, values = tensors[2 * layer].to(dtype), tensors[2 * layer + 1].to(dtype)
        past.update(keys if inverse is None else keys[..., inverse], values, layer)
    output = model(
        input_ids=tokens,
        attention_mask=mask.long(),
        position_ids=positions(mask)[:, width:],
        past_key_values=past,
        use_cache=True,
    )
    lasts = new.sum(1) - 1
    hidden = output.last_hidden_state[torch.arange(len(rows), device=device), lasts]
    return hidden, _apart(cache, past, width, [len(each) for each in ids], order)


def _together(
    cache: SharedPrefixCache, rows: Sequence[Left], prompt_of: Tensor, own: int, real: Tensor
) -> list[Tensor]:
    """Keys and values of every layer [m, H, P + own, D], real ones on the right."""
    found: dict[int, Tensor] = {}
    for group, numbers in enumerate(cache._numbers):
        filled = cache._prompts[group][:, prompt_of]  # [k, m, H, P, D]
        room = filled.new_zeros(*filled.shape[:3], own, filled.shape[4])
        for place, row in enumerate(rows):
            room[:, place, :, own - row.tokens :] = row.own[group]
        whole = torch.cat([filled, room], 3)
        index = real[None, :, None, :, None].expand_as(whole)
        found |= dict(zip(numbers, whole.gather(3, index), strict=True))
    return [found[number] for number in range(len(found))]


def _apart(
    cache: SharedPrefixCache,
    past: DynamicCache,
    width: int,
    lengths: Sequence[int],
    order: Tensor | None,
) -> list[Left]:
    """What each row read, as the cache keeps it."""
    layers: list[Any] = past.layers
    keys = [layer.keys if order is None else layer.keys[..., order] for layer in layers]
    pairs = zip(keys, (layer.values for layer in layers), strict=True)
    tensors = [each[:, :, width:] for pair in pairs for each in pair]
    groups = [
        torch.stack([tensors[number] for number in numbers]).to(cache._own[group].dtype)
        for group, numbers in enumerate(cache._numbers)
    ]
    return [
        Left([each[:, row, :, :length] for each in groups], length)
        for row, length in enumerate(lengths)
    ]
