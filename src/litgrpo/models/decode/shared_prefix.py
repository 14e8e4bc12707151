"""Decoding in which the completions of a group share their prompt's keys and values.

Transformers' model code runs unchanged: a `Cache` keeps the keys and values, and an attention
function registered as `SHARED_PREFIX` reads them. The fused decoder reads the same cache. The idea
is published as Hydragen (arXiv:2402.05099).

Between the turns of an episode a row can leave the batch: `RowOffloader` keeps its keys and values,
computes the observation in one pass and puts the row back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from litgrpo.tensors import apply_softcap, positions, query_scale, widen

SHARED_PREFIX = "litgrpo_shared_prefix"


class DecodeState(ABC):
    """KV cache and positions of the rows that a policy is decoding.

    `can_join`: `join` can add the rows of another state of the same rollout. Engines refill free
    slots only if it can.
    """

    can_join: bool = False

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep only the given live rows.

        Args:
            rows: [m] numbers of the rows to keep, in their new order. Engines move the last rows
                into the places of those that leave, so that few rows move.
        """

    def join(self, newcomers: DecodeState) -> None:
        """Append the rows of another state.

        Args:
            newcomers: a state fresh from `Policy.prefill`, of the same capacity.
        """
        raise AssertionError("can_join is False")


class PromptGrid:
    """Grid [B, width] with one cell per row: rows of one prompt become rows of one matrix product.

    Args:
        prompt_of: [n] prompt of each row, in any order.
        num_prompts: B.

    Example:
        >>> PromptGrid(torch.tensor([0, 1, 0]), 2).cell_of_row  # width 2: cells 0, 1 are prompt 0's
        tensor([0, 2, 1])
    """

    def __init__(self, prompt_of: Tensor, num_prompts: int) -> None:
        members = torch.bincount(prompt_of, minlength=num_prompts)
        self.width = int(members.max())
        numbers = torch.arange(len(prompt_of), device=prompt_of.device)
        order = prompt_of.argsort(stable=True)
        # Place among the rows of the same prompt: rank in sorted order minus that of the first.
        place = torch.empty_like(order)
        place[order] = numbers - (members.cumsum(0) - members)[prompt_of[order]]
        self.cell_of_row = prompt_of * self.width + place
        self.row_of_cell = order.new_zeros(num_prompts * self.width)  # empty: any row
        self.row_of_cell[self.cell_of_row] = numbers


class Window(NamedTuple):
    """Keys that the tokens of this step attend to, equal in all layers of one window length.

    Args:
        slot: first prompt slot that any row attends to; P if none attends to any.
        column: first column of own tokens that any row attends to.
        masked: [n, 1, w] True where a row does not attend to one of the first w of these; None if
            all rows attend to all.

    Example:
        Three own tokens, no sliding window, prompts of 5 slots without padding:
        `Window(slot=0, column=0, masked=None)`.
    """

    slot: int
    column: int
    masked: Tensor | None


class SharedPrefixCache(Cache, DecodeState):
    """KV cache with each prompt stored once, and the own tokens of each live row.

    Own tokens are stored in columns: a step writes the same column of all rows. A row that joins
    later starts in a later column.

    Args:
        prefill: the cache of one forward pass over the [B, P] prompts.
        prompt_mask: [B, P] True marks a real token.
        group_size: G rows continue each prompt.
        capacity: maximum number of tokens that a row is fed, C.

    Example:
        4 prompts of 100 tokens with 8 completions each of 50 tokens hold keys of 4 * 100 + 32 * 50
        positions instead of 32 * 150.
    """

    def __init__(
        self, prefill: DynamicCache, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> None:
        # The base class reads only the flags of its layers; the tensors are kept here.
        super().__init__(layers=[DynamicLayer() for _ in prefill.layers])
        layers: list[Any] = prefill.layers
        tensors = [each for layer in layers for each in (layer.keys, layer.values)]
        rows = len(prompt_mask) * group_size
        self.capacity = capacity
        self.fed = 0
        self.prompt_mask = prompt_mask
        self.prompt_of = torch.arange(rows, device=prompt_mask.device) // group_size
        self.start = torch.zeros_like(self.prompt_of)  # the column in which a row begins
        self.offloaded = self.prompt_of[:0]  # prompts of rows in a `RowOffloader`
        # Layers of equal shape are stacked, so that one operation moves the rows of all of them.
        alike: dict[torch.Size, list[int]] = defaultdict(list)
        for number, tensor in enumerate(tensors):
            alike[tensor.shape].append(number)
        self._numbers = list(alike.values())
        self._prompts = [torch.stack([tensors[i] for i in each]) for each in self._numbers]
        self._own = [_allocate(each, rows, capacity) for each in self._prompts]
        self._arrange()

    # --- rows join and leave ---

    def _arrange(self) -> None:
        """Arrange the live rows of each prompt side by side in a grid [b, g]; build the views."""
        grid = PromptGrid(self.prompt_of, len(self.prompt_mask))
        self.grid_width = grid.width
        self._cell, self._row_of_cell = grid.cell_of_row, grid.row_of_cell
        self._maps: dict[int, tuple[Tensor, Tensor]] = {}
        self.position_of_column_0 = self.prompt_mask.sum(1)[self.prompt_of] - self.start
        starts = self.start if len(self.start) else self.start.new_tensor([self.fed])
        self.first_start, self.last_start = (int(each) for each in starts.aminmax())
        padding = ~self.prompt_mask[self.prompt_of]
        self.padding = padding[:, None] if bool(padding.any()) else None
        self._windows: dict[int | None, Window] = {}
        self._view()

    def _view(self) -> None:
        """Build the views of every layer once, because building them for every token is slow."""
        rows, views = len(self.prompt_of), dict[int, tuple[Tensor, Tensor]]()
        for numbers, prompts, own in zip(self._numbers, self._prompts, self._own, strict=True):
            views |= dict(zip(numbers, zip(prompts, own[:, :rows], strict=True), strict=True))
        ordered = [views[number] for number in range(len(views))]
        self.prompt_keys = [prompt for prompt, _ in ordered[::2]]  # each [b, H, P, D]
        self.prompt_values = [prompt for prompt, _ in ordered[1::2]]
        self.keys = [own for _, own in ordered[::2]]  # each [n, H, columns, D]
        self.values = [own for _, own in ordered[1::2]]
        # The same, flat over rows and heads, keys transposed: factors of matrix products.
        self._products = [
            tuple(each.flatten(0, 1) for each in (pk.mT, pv, k.mT, v))
            for pk, pv, k, v in zip(
                self.prompt_keys, self.prompt_values, self.keys, self.values, strict=True
            )
        ]

    def select(self, rows: Tensor) -> None:
        """Keep the given rows in the given order, and the prompts that they continue."""
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().squeeze(1)
        used = slice(self.first_start, self.fed)
        if len(moved):
            for own in self._own:
                own[:, moved, :, used] = own[:, rows[moved], :, used]
        self.start = self.start[rows]
        used_by = torch.cat([self.prompt_of[rows], self.offloaded])
        prompts, used_by = torch.unique(used_by, return_inverse=True)
        self.prompt_of, self.offloaded = used_by.split([len(rows), len(self.offloaded)])
        if len(prompts) < len(self.prompt_mask):
            self._prompts = [each[:, prompts] for each in self._prompts]
            self.prompt_mask = self.prompt_mask[prompts]
        self._arrange()

    def join(self, newcomers: DecodeState) -> None:
        """Append the rows of a cache fresh from prefill, which may have fed a start token (T5)."""
        assert isinstance(newcomers, SharedPrefixCache)
        rows, begun = len(self.prompt_of), newcomers.fed
        self._grow(rows + len(newcomers.prompt_of))
        for own in self._own:  # 0 * NaN is NaN: masked entries must be finite
            own[:, rows:].zero_()
        if begun:
            last = slice(self.fed - begun, self.fed)
            for own, new in zip(self._own, newcomers._own, strict=True):
                own[:, rows : rows + new.shape[1], :, last] = new[:, :, :, :begun]
        self.start = torch.cat([self.start, newcomers.start + self.fed - begun])
        self.prompt_of = torch.cat([self.prompt_of, newcomers.prompt_of + len(self.prompt_mask)])
        self.prompt_mask = torch.cat([self.prompt_mask, newcomers.prompt_mask])
        both = zip(self._prompts, newcomers._prompts, strict=True)
        self._prompts = [torch.cat(each, 1) for each in both]
        self._arrange()

    def _grow(self, rows: int) -> None:
        """Allocate this many rows, and 1.5 times the columns of one row, so that rows can join."""
        columns = self.capacity + (self.capacity + 1) // 2
        for number, own in enumerate(self._own):
            if rows > own.shape[1] or columns > own.shape[3]:
                larger = _allocate(self._prompts[number], max(rows, own.shape[1]), columns)
                larger[:, : own.shape[1], :, : self.fed] = own[:, :, :, : self.fed]
                self._own[number] = larger

    def begin_step(self) -> Tensor:
        """Free a column for the next token and return the token's positions [n, 1]."""
        if self._own and self.fed == self._own[0].shape[3]:  # drop columns of rows that left
            unused = self.first_start
            for own in self._own:
                own[:, :, :, : self.fed - unused] = own[:, :, :, unused:].clone()
            self.start, self.fed = self.start - unused, self.fed - unused
            self._arrange()
        self._windows.clear()
        return (self.position_of_column_0 + self.fed)[:, None]

    # --- one token ---

    def update(  # type: ignore[override]
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token's keys and values [n, H, 1, D]; return all of the row's own so far."""
        self.write(layer, keys.squeeze(2), values.squeeze(2))
        return self.keys[layer][:, :, : self.fed + 1], self.values[layer][:, :, : self.fed + 1]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store one token's keys and values [n, H, D]."""
        self.keys[layer].select(2, self.fed).copy_(keys)
        self.values[layer].select(2, self.fed).copy_(values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots filled before this token."""
        return self.prompt_mask.shape[1] + self.fed

    def attend(
        self, layer: int, query: Tensor, *, softcap: float | None, window: int | None
    ) -> Tensor:
        """Compute attention of one query per row to its shared prompt and its own tokens.

        The query heads that share a key/value head, and the rows that share a prompt, become rows
        of one matrix product, so no key or value is ever copied.

        Args:
            layer: number of the layer.
            query: [n * H, r, D] for r query heads to a key/value head, scaled; divided by the
                soft-cap if there is one.
            softcap: scores become softcap * tanh(query @ key).
            window: positions that a token attends to, itself included; None: all.

        Returns:
            [n * H, r, D].
        """
        prompt_keys, prompt_values, keys, values = self._products[layer]
        reach = self._window(window)
        columns = self.fed + 1 - reach.column
        slots = prompt_values.shape[1] - reach.slot
        scores = query.bmm(keys.narrow(2, reach.column, columns))
        if slots:
            on_prompt = self._to_cells(query).bmm(prompt_keys.narrow(2, reach.slot, slots))
            scores = torch.cat([self._to_rows(on_prompt, query.shape), scores], -1)  # [nH, r, S]
        scores = apply_softcap(scores, softcap)
        if reach.masked is not None:
            each_row = scores.view(len(self.prompt_of), -1, scores.shape[2])
            each_row[..., : reach.masked.shape[2]].masked_fill_(reach.masked, -torch.inf)
        weights = widen(scores).softmax(-1).to(values.dtype)
        values = values.narrow(1, reach.column, columns)
        if not slots:
            return weights.bmm(values)
        from_prompt = self._to_cells(weights).narrow(2, 0, slots)
        from_prompt = from_prompt.bmm(prompt_values.narrow(1, reach.slot, slots))
        from_prompt = self._to_rows(from_prompt, query.shape)
        return torch.baddbmm(from_prompt, weights.narrow(2, slots, columns), values)

    def _window(self, window: int | None) -> Window:
        """Return the keys that this step's tokens attend to."""
        if window in self._windows:
            return self._windows[window]
        slots, now = self.prompt_mask.shape[1], self.fed + 1
        reach = slots + now if window is None else window
        slot = min(max(0, slots + now - self.last_start - reach), slots)
        column, masked = max(self.first_start, now - reach), None
        if self.first_start < self.last_start:
            start = self.start[:, None, None]
            prompt = torch.arange(slot, slots, device=start.device)
            masked = prompt < slots + now - start - reach
            if self.padding is not None:
                masked = masked | self.padding[:, :, slot:]
            own = torch.arange(column, now, device=start.device)
            masked = torch.cat([masked, own < start], 2)
        elif self.padding is not None and slot < slots:
            masked = self.padding[:, :, slot:]
        self._windows[window] = Window(slot, column, masked)
        return self._windows[window]

    # --- the grid ---

    def _to_cells(self, rows: Tensor) -> Tensor:
        """[n * H, r, X] -> [b * H, g * r, X]."""
        count, repeats, size = rows.shape
        cells = rows.index_select(0, self._map(count // len(self.prompt_of))[0])
        return cells.view(-1, self.grid_width * repeats, size)

    def _to_rows(self, cells: Tensor, shape: torch.Size) -> Tensor:
        """[b * H, g * r, X] -> [n * H, r, X]; `shape` begins with n * H, r."""
        cells = cells.view(-1, shape[1], cells.shape[2])
        return cells.index_select(0, self._map(shape[0] // len(self.prompt_of))[1])

    def _map(self, heads: int) -> tuple[Tensor, Tensor]:
        """Return the row of each cell [b * H * g], and the cell of each row [n * H]."""
        if heads not in self._maps:
            head = torch.arange(heads, device=self._cell.device)
            rows = self._row_of_cell.view(-1, 1, self.grid_width) * heads + head[:, None]
            cell, width = self._cell[:, None], self.grid_width
            cells = (cell // width * heads + head) * width + cell % width
            self._maps[heads] = rows.flatten(), cells.flatten()
        return self._maps[heads]


def _allocate(prompts: Tensor, rows: int, columns: int) -> Tensor:
    """Allocate [k, n, H, columns, D] for k tensors [b, H, P, D]."""
    layers, _, heads, _, size = prompts.shape
    return prompts.new_empty(layers, rows, heads, columns, size)


def attend_shared_prefix(
    module: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor | None,
    *,
    shared_prefix: SharedPrefixCache,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers' modules call; see `SharedPrefixCache.attend`.

    Args:
        module: the attention module; its `layer_idx` names the layer.
        query: [n, heads, 1, D].
        keys: [n, H, t, D] of the row's own tokens.
        values: of the row's own tokens; the cache has them as well.
        attention_mask: unused; the cache knows the padding.
        shared_prefix: the cache.
        scaling: multiplies the scores.
        sliding_window: positions that a token attends to, itself included; None: all.
        softcap: scores become softcap * tanh(score / softcap).
        kwargs: arguments of other attention functions, ignored.

    Returns:
        [n, 1, heads, D] and no attention weights.
    """
    n, heads, _, size = query.shape
    groups = keys.shape[1]
    query = query.reshape(n * groups, heads // groups, size)
    query = query * query_scale(scaling, softcap)
    output = shared_prefix.attend(module.layer_idx, query, softcap=softcap, window=sliding_window)
    return output.reshape(n, 1, heads, -1), None


# --- rows that leave the batch between turns ---
#
# Own tokens end in the present column, so a row that comes back takes the last columns again,
# however far the others have advanced: no gap arises and no position is lost.


@dataclass(frozen=True)
class OffloadedRow:
    """Keys and values of one row outside the batch; its prompt stays in the cache.

    Args:
        own: for each set of tensors of one shape, [k, H, t, D].
        tokens: t, the number of tokens that the row has been fed.

    Example:
        A row of 7 generated tokens, 4 layers of 2 heads of size 8 (keys and values: k = 8):
        `OffloadedRow([torch.zeros(8, 2, 7, 8)], tokens=7)`.
    """

    own: list[Tensor]
    tokens: int


class RowOffloader(ABC):
    """Rows outside the batch, numbered in the order in which they left.

    Args:
        cache: of the batch.

    Example:
        `offloader.offload(3)` when row 3 ends its turn; once its observation is known,
        `logits = offloader.restore([0], [observation_ids])` appends it to the batch.
    """

    def __init__(self, cache: SharedPrefixCache) -> None:
        self.cache = cache
        self.rows: list[OffloadedRow] = []

    @abstractmethod
    def extend(
        self, rows: Sequence[OffloadedRow], prompt_of: Tensor, ids: Sequence[list[int]]
    ) -> tuple[Tensor, list[OffloadedRow]]:
        """Compute new tokens of offloaded rows in one forward pass.

        Args:
            rows: m rows.
            prompt_of: [m] their prompts.
            ids: new tokens of each, at least one.

        Returns:
            [m, V] logits after the last token of each, and the keys and values of its new tokens.
        """

    def offload(self, row: int) -> None:
        """Copy a live row's keys and values; the next `select` of the cache must drop it."""
        cache = self.cache
        start = int(cache.start[row])
        own = [each[:, row, :, start : cache.fed].clone() for each in cache._own]
        cache.offloaded = torch.cat([cache.offloaded, cache.prompt_of[row : row + 1]])
        self.rows.append(OffloadedRow(own, cache.fed - start))

    def discard(self, numbers: Sequence[int]) -> None:
        """Drop rows that ended; the remaining ones are renumbered."""
        dropped = set(numbers)
        kept = [number for number in range(len(self.rows)) if number not in dropped]
        self.cache.offloaded = self.cache.offloaded[kept]
        self.rows = [self.rows[number] for number in kept]

    def restore(self, numbers: Sequence[int], ids: Sequence[list[int]]) -> Tensor:
        """Append rows to the batch after computing new tokens of each in one pass.

        Args:
            numbers: of m rows; the remaining ones are renumbered.
            ids: new tokens of each row (its observation), at least one.

        Returns:
            [m, V] logits of their next tokens.
        """
        rows = [self.rows[number] for number in numbers]
        prompt_of = self.cache.offloaded[list(numbers)]
        logits, added = self.extend(rows, prompt_of, ids)
        _insert_rows(self.cache, rows, added, prompt_of)
        self.discard(numbers)
        self.cache._arrange()
        return logits


def _insert_rows(
    cache: SharedPrefixCache,
    rows: Sequence[OffloadedRow],
    added: Sequence[OffloadedRow],
    prompt_of: Tensor,
) -> None:
    """Append rows to the cache, each with the keys and values of its new tokens.

    Args:
        cache: of the batch.
        rows: m rows as they left.
        added: keys and values of the new tokens of each.
        prompt_of: [m] their prompts.
    """
    live = len(cache.prompt_of)
    tokens = [row.tokens + more.tokens for row, more in zip(rows, added, strict=True)]
    cache._grow(live + len(rows))
    _shift_columns(cache, max(0, max(tokens) - cache.fed))
    least = min([cache.first_start, *(cache.fed - each for each in tokens)])
    for group, own in enumerate(cache._own):
        own[:, :live, :, least : cache.first_start] = 0  # 0 * NaN is NaN: keep masked ones finite
        own[:, live:].zero_()
        for place, (row, more) in enumerate(zip(rows, added, strict=True), live):
            whole = torch.cat([row.own[group], more.own[group]], 2)
            own[:, place, :, cache.fed - whole.shape[2] : cache.fed] = whole
    device = cache.start.device
    cache.start = torch.cat([cache.start, cache.fed - torch.tensor(tokens, device=device)])
    cache.prompt_of = torch.cat([cache.prompt_of, prompt_of])


def _shift_columns(cache: SharedPrefixCache, columns: int) -> None:
    """Move the own tokens of all rows to the right, so that longer rows fit."""
    for own in cache._own:
        own[:, :, :, columns : cache.fed + columns] = own[:, :, :, : cache.fed].clone()
    cache.start, cache.fed = cache.start + columns, cache.fed + columns
    cache.first_start += columns


class CausalRowOffloader(RowOffloader):
    """Rows of a decoder-only model.

    Args:
        model: the transformers model without its head.
        head: hidden states [m, E] to logits [m, V].
        cache: of the batch.
        order: [D] transformers' index of each entry of the cache's keys (the fused decoder permutes
            them); None: the same order.
    """

    def __init__(
        self,
        model: Any,
        head: Callable[[Tensor], Tensor],
        cache: SharedPrefixCache,
        order: Tensor | None,
    ) -> None:
        super().__init__(cache)
        self.model, self.head, self.order = model, head, order

    @torch.no_grad()
    def extend(
        self, rows: Sequence[OffloadedRow], prompt_of: Tensor, ids: Sequence[list[int]]
    ) -> tuple[Tensor, list[OffloadedRow]]:
        """See `RowOffloader.extend`."""
        new = NewTokens(rows, ids, self.cache.prompt_mask.device)
        # Prompts and own tokens without gaps, padded on the left, as prompts are.
        before = torch.cat([self.cache.prompt_mask[prompt_of], new.own_mask], 1)
        real = torch.argsort(before.long(), dim=1, stable=True)
        width = before.shape[1]
        mask = torch.cat([before.gather(1, real), new.mask], 1)
        past = DynamicCache()
        tensors = _gather_past(self.cache, rows, prompt_of, new.own_mask.shape[1], real)
        inverse = None if self.order is None else self.order.argsort()
        dtype = next(self.model.parameters()).dtype
        for layer in range(len(tensors) // 2):
            keys, values = tensors[2 * layer].to(dtype), tensors[2 * layer + 1].to(dtype)
            past.update(keys if inverse is None else keys[..., inverse], values, layer)
        output = self.model(
            input_ids=new.ids,
            attention_mask=mask.long(),
            position_ids=positions(mask)[:, width:],
            past_key_values=past,
            use_cache=True,
        )
        logits = self.head(new.last(output.last_hidden_state))
        return logits, split_rows(self.cache, past, width, new.lengths, self.order)


class NewTokens:
    """New tokens of m rows, padded on the right.

    Args:
        rows: m rows as they left.
        ids: new tokens of each, at least one.
        device: of the tensors.

    Attributes:
        ids: [m, t] new tokens.
        mask: [m, t] True marks a new token.
        own_mask: [m, o] True marks a token that the row has been fed, padded on the left.
        lengths: number of new tokens of each row.
    """

    def __init__(
        self, rows: Sequence[OffloadedRow], ids: Sequence[list[int]], device: torch.device
    ) -> None:
        self.lengths = [len(row_ids) for row_ids in ids]
        self.ids = torch.zeros(len(rows), max(self.lengths), dtype=torch.long, device=device)
        self.mask = torch.zeros_like(self.ids, dtype=torch.bool)
        for row, row_ids in enumerate(ids):
            self.ids[row, : len(row_ids)] = torch.tensor(row_ids, device=device)
            self.mask[row, : len(row_ids)] = True
        own = max(row.tokens for row in rows)
        padding = torch.tensor([[own - row.tokens] for row in rows], device=device)
        self.own_mask = torch.arange(own, device=device) >= padding

    def last(self, hidden: Tensor) -> Tensor:
        """Return the hidden states [m, E] of the last new tokens, of all of them [m, t, E]."""
        rows = torch.arange(len(hidden), device=hidden.device)
        return hidden[rows, self.mask.sum(1) - 1]


def gather_own(
    cache: SharedPrefixCache, rows: Sequence[OffloadedRow], columns: int
) -> list[Tensor]:
    """Return the own tokens of rows, for each set of tensors of one shape [k, m, H, columns, D]."""
    gathered = []
    for group, own in enumerate(cache._own):
        room = own.new_zeros(own.shape[0], len(rows), own.shape[2], columns, own.shape[4])
        for place, row in enumerate(rows):
            room[:, place, :, columns - row.tokens :] = row.own[group]
        gathered.append(room)
    return gathered


def _gather_past(
    cache: SharedPrefixCache,
    rows: Sequence[OffloadedRow],
    prompt_of: Tensor,
    own: int,
    real: Tensor,
) -> list[Tensor]:
    """Return keys and values of every layer [m, H, P + own, D], real ones on the right."""
    tensors: dict[int, Tensor] = {}
    own_tokens = gather_own(cache, rows, own)
    for numbers, prompts, own_of_rows in zip(
        cache._numbers, cache._prompts, own_tokens, strict=True
    ):
        joined = torch.cat([prompts[:, prompt_of], own_of_rows], 3)
        index = real[None, :, None, :, None].expand_as(joined)
        tensors |= dict(zip(numbers, joined.gather(3, index), strict=True))
    return [tensors[number] for number in range(len(tensors))]


def split_rows(
    cache: SharedPrefixCache,
    past: DynamicCache,
    width: int,
    lengths: Sequence[int],
    order: Tensor | None,
) -> list[OffloadedRow]:
    """Return the new tokens of each row, in the layout of the cache."""
    layers: list[Any] = past.layers
    keys = [layer.keys if order is None else layer.keys[..., order] for layer in layers]
    pairs = zip(keys, (layer.values for layer in layers), strict=True)
    tensors = [each[:, :, width:] for pair in pairs for each in pair]
    groups = [
        torch.stack([tensors[number] for number in numbers]).to(cache._own[group].dtype)
        for group, numbers in enumerate(cache._numbers)
    ]
    return [
        OffloadedRow([each[:, row, :, :length] for each in groups], length)
        for row, length in enumerate(lengths)
    ]
