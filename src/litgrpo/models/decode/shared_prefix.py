"""Decoding in which the completions of a group share their prompt's keys and values.

Transformers' model code runs unchanged: a `Cache` keeps the keys and values, and an attention
function registered as `SHARED_PREFIX` reads them. The fused decoder reads the same cache. The idea
is published as Hydragen (arXiv:2402.05099).

Between the turns of an episode a row can leave the batch: `RowOffloader` keeps its keys and values,
computes the observation in one pass and puts the row back.

Shapes: b prompts and n live rows, H kv heads, r query heads per kv head, D head size. Tensors of
one shape, of all layers, are stacked: k is their number, keys and values.
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
        """Keep only some of the live rows.

        Args:
            rows: [m] numbers of the rows to keep, in their new order. Engines move the last rows
                into the slots of those that leave, so that few rows move.
        """

    def join(self, new_rows: DecodeState) -> None:
        """Append the rows of another state.

        Args:
            new_rows: a state fresh from `Policy.prefill`, of the same capacity.
        """
        raise AssertionError("can_join is False")


class PromptGrid:
    """Grid [B, width] with one cell per row: rows of one prompt become rows of one matrix product.

    Example:
        >>> PromptGrid(torch.tensor([0, 1, 0]), 2).cell_of_row  # width 2: cells 0, 1 are prompt 0's
        tensor([0, 2, 1])
    """

    def __init__(self, prompt_of: Tensor, num_prompts: int) -> None:
        group_sizes = torch.bincount(prompt_of, minlength=num_prompts)
        self.width = int(group_sizes.max())
        rows = torch.arange(len(prompt_of), device=prompt_of.device)
        order = prompt_of.argsort(stable=True)
        # Column of a row: its rank in sorted order minus that of the first row of its prompt.
        column = torch.empty_like(order)
        column[order] = rows - (group_sizes.cumsum(0) - group_sizes)[prompt_of[order]]
        self.cell_of_row = prompt_of * self.width + column  # [n]
        self.row_of_cell = order.new_zeros(num_prompts * self.width)  # cells without a row: any row
        self.row_of_cell[self.cell_of_row] = rows


class VisibleKeys(NamedTuple):
    """Keys that the tokens of this step attend to, equal in all layers of one window length."""

    first_slot: int  # of the prompt that any row attends to; P if none attends to any
    first_column: int  # of the completions that any row attends to
    # [n, 1, w] True where a row does not attend to one of the first w; None: all attend to all.
    masked: Tensor | None


class SharedPrefixCache(Cache, DecodeState):
    """KV cache with each prompt stored once, and the completion tokens of each live row.

    Completion tokens are stored in columns: a step writes the same column of all rows. A row that
    joins later starts in a later column. 4 prompts of 100 tokens with 8 completions each of 50
    tokens hold keys of 4 * 100 + 32 * 50 positions instead of 32 * 150.
    """

    def __init__(
        self, prefill: DynamicCache, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> None:
        # The base class reads only the flags of its layers; the tensors are kept here.
        super().__init__(layers=[DynamicLayer() for _ in prefill.layers])
        layers: list[Any] = prefill.layers
        tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        num_rows = len(prompt_mask) * group_size
        self.capacity = capacity  # maximum number of tokens that a row is fed
        self.num_fed = 0  # columns in use
        self.prompt_mask = prompt_mask  # [b, P]
        self.prompt_of = torch.arange(num_rows, device=prompt_mask.device) // group_size  # [n]
        self.start = torch.zeros_like(self.prompt_of)  # [n] the column in which a row begins
        self.offloaded_prompt_of = self.prompt_of[:0]  # prompts of the rows of a `RowOffloader`
        # Layers of equal shape are stacked, so that one operation moves the rows of all of them.
        numbers_by_shape: dict[torch.Size, list[int]] = defaultdict(list)
        for number, tensor in enumerate(tensors):
            numbers_by_shape[tensor.shape].append(number)
        self._numbers = list(numbers_by_shape.values())
        # For each stack, prompts [k, b, H, P, D] and completions [k, rows, H, columns, D].
        self._prompts = [torch.stack([tensors[i] for i in stack]) for stack in self._numbers]
        self._completions = [_allocate(stack, num_rows, capacity) for stack in self._prompts]
        self._arrange()

    # --- rows join and leave ---

    def _arrange(self) -> None:
        """Arrange the live rows of each prompt side by side in a grid [b, g]; build the views."""
        grid = PromptGrid(self.prompt_of, len(self.prompt_mask))
        self.grid_width = grid.width
        self._cell_of_row, self._row_of_cell = grid.cell_of_row, grid.row_of_cell
        self._head_maps: dict[int, tuple[Tensor, Tensor]] = {}
        self.position_of_column_0 = self.prompt_mask.sum(1)[self.prompt_of] - self.start  # [n]
        starts = self.start if len(self.start) else self.start.new_tensor([self.num_fed])
        self.min_start, self.max_start = (int(start) for start in starts.aminmax())
        padding = ~self.prompt_mask[self.prompt_of]
        self.padding = padding[:, None] if bool(padding.any()) else None  # [n, 1, P]
        self._visible_keys: dict[int | None, VisibleKeys] = {}
        self._build_views()

    def _build_views(self) -> None:
        """Build the views of every layer once, because building them for every token is slow."""
        num_rows, views = len(self.prompt_of), dict[int, tuple[Tensor, Tensor]]()
        stacks = zip(self._numbers, self._prompts, self._completions, strict=True)
        for numbers, prompts, completions in stacks:
            pairs = zip(prompts, completions[:, :num_rows], strict=True)
            views |= dict(zip(numbers, pairs, strict=True))
        ordered = [views[number] for number in range(len(views))]
        # One per layer: prompts [b, H, P, D], completions [n, H, columns, D].
        self.prompt_keys = [prompts for prompts, _ in ordered[::2]]
        self.prompt_values = [prompts for prompts, _ in ordered[1::2]]
        self.keys = [completions for _, completions in ordered[::2]]
        self.values = [completions for _, completions in ordered[1::2]]
        # The same, flat over rows and heads, keys transposed: factors of matrix products.
        self._products = [
            tuple(tensor.flatten(0, 1) for tensor in (pk.mT, pv, k.mT, v))
            for pk, pv, k, v in zip(
                self.prompt_keys, self.prompt_values, self.keys, self.values, strict=True
            )
        ]

    def select(self, rows: Tensor) -> None:
        """Keep some rows in their new order, and the prompts that they continue."""
        moved_rows = (rows != torch.arange(len(rows), device=rows.device)).nonzero().squeeze(1)
        columns = slice(self.min_start, self.num_fed)
        if len(moved_rows):
            for stack in self._completions:
                stack[:, moved_rows, :, columns] = stack[:, rows[moved_rows], :, columns]
        self.start = self.start[rows]
        num_offloaded = len(self.offloaded_prompt_of)
        prompts, prompt_of = torch.unique(
            torch.cat([self.prompt_of[rows], self.offloaded_prompt_of]), return_inverse=True
        )
        self.prompt_of, self.offloaded_prompt_of = prompt_of.split([len(rows), num_offloaded])
        if len(prompts) < len(self.prompt_mask):
            self._prompts = [stack[:, prompts] for stack in self._prompts]
            self.prompt_mask = self.prompt_mask[prompts]
        self._arrange()

    def join(self, new_rows: DecodeState) -> None:
        """Append the rows of a cache fresh from prefill, which may have fed a start token (T5)."""
        assert isinstance(new_rows, SharedPrefixCache)
        num_rows, num_started = len(self.prompt_of), new_rows.num_fed
        self._grow(num_rows + len(new_rows.prompt_of))
        for stack in self._completions:  # 0 * NaN is NaN: masked entries must be finite
            stack[:, num_rows:].zero_()
        if num_started:
            columns = slice(self.num_fed - num_started, self.num_fed)
            for stack, new_stack in zip(self._completions, new_rows._completions, strict=True):
                rows = slice(num_rows, num_rows + new_stack.shape[1])
                stack[:, rows, :, columns] = new_stack[:, :, :, :num_started]
        self.start = torch.cat([self.start, new_rows.start + self.num_fed - num_started])
        self.prompt_of = torch.cat([self.prompt_of, new_rows.prompt_of + len(self.prompt_mask)])
        self.prompt_mask = torch.cat([self.prompt_mask, new_rows.prompt_mask])
        stacks = zip(self._prompts, new_rows._prompts, strict=True)
        self._prompts = [torch.cat(pair, 1) for pair in stacks]
        self._arrange()

    def _grow(self, rows: int) -> None:
        """Allocate this many rows, and 1.5 times the columns of one row, so that rows can join."""
        columns = self.capacity + (self.capacity + 1) // 2
        for number, stack in enumerate(self._completions):
            num_rows, num_columns = stack.shape[1], stack.shape[3]
            if rows > num_rows or columns > num_columns:
                larger = _allocate(self._prompts[number], max(rows, num_rows), columns)
                larger[:, :num_rows, :, : self.num_fed] = stack[:, :, :, : self.num_fed]
                self._completions[number] = larger

    def begin_step(self) -> Tensor:
        """Free a column for the next token and return the token's positions [n, 1]."""
        if self._completions and self.num_fed == self._completions[0].shape[3]:
            num_unused = self.min_start  # columns that only rows which left had tokens in
            for stack in self._completions:
                live = stack[:, :, :, num_unused:].clone()
                stack[:, :, :, : self.num_fed - num_unused] = live
            self.start, self.num_fed = self.start - num_unused, self.num_fed - num_unused
            self._arrange()
        self._visible_keys.clear()
        return (self.position_of_column_0 + self.num_fed)[:, None]

    # --- one token ---

    def update(  # type: ignore[override]
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token's keys and values [n, H, 1, D]; return those of the completions so far.

        Columns before a row's start are included.
        """
        self.write(layer, keys.squeeze(2), values.squeeze(2))
        columns = slice(self.num_fed + 1)
        return self.keys[layer][:, :, columns], self.values[layer][:, :, columns]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store one token's keys and values [n, H, D]."""
        self.keys[layer].select(2, self.num_fed).copy_(keys)
        self.values[layer].select(2, self.num_fed).copy_(values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.prompt_mask.shape[1] + self.num_fed

    def attend(
        self, layer: int, query: Tensor, *, softcap: float | None, window: int | None
    ) -> Tensor:
        """Compute attention [n * H, r, D] of one query per row to its prompt and completion.

        The query heads that share a key/value head, and the rows that share a prompt, become rows
        of one matrix product, so no key or value is ever copied. Queries [n * H, r, D] are scaled,
        and divided by the soft-cap if there is one. `window` includes the token itself.
        """
        prompt_keys, prompt_values, keys, values = self._products[layer]
        visible = self._find_visible_keys(window)
        columns = self.num_fed + 1 - visible.first_column
        slots = prompt_values.shape[1] - visible.first_slot
        scores = query.bmm(keys.narrow(2, visible.first_column, columns))  # [n * H, r, columns]
        if slots:
            prompt_keys = prompt_keys.narrow(2, visible.first_slot, slots)
            prompt_scores = self._to_cells(query).bmm(prompt_keys)  # [b * H, g * r, slots]
            scores = torch.cat([self._to_rows(prompt_scores, query.shape), scores], -1)
        scores = apply_softcap(scores, softcap)  # softcap * tanh(query @ key)
        if visible.masked is not None:
            scores_by_row = scores.view(len(self.prompt_of), -1, scores.shape[2])
            masked_keys = scores_by_row[..., : visible.masked.shape[2]]
            masked_keys.masked_fill_(visible.masked, -torch.inf)
        weights = widen(scores).softmax(-1).to(values.dtype)
        values = values.narrow(1, visible.first_column, columns)
        if not slots:
            return weights.bmm(values)
        prompt_weights = self._to_cells(weights).narrow(2, 0, slots)
        output = prompt_weights.bmm(prompt_values.narrow(1, visible.first_slot, slots))
        output = self._to_rows(output, query.shape)
        return torch.baddbmm(output, weights.narrow(2, slots, columns), values)

    def _find_visible_keys(self, window: int | None) -> VisibleKeys:
        if window in self._visible_keys:
            return self._visible_keys[window]
        slots, columns = self.prompt_mask.shape[1], self.num_fed + 1
        # A row's first prompt slot within the window: slots + columns - start - window.
        window_size = slots + columns if window is None else window
        first_slot = min(max(0, slots + columns - self.max_start - window_size), slots)
        first_column, masked = max(self.min_start, columns - window_size), None
        if self.min_start < self.max_start:
            start = self.start[:, None, None]
            slot = torch.arange(first_slot, slots, device=start.device)
            masked = slot < slots + columns - start - window_size
            if self.padding is not None:
                masked = masked | self.padding[:, :, first_slot:]
            column = torch.arange(first_column, columns, device=start.device)
            masked = torch.cat([masked, column < start], 2)
        elif self.padding is not None and first_slot < slots:
            masked = self.padding[:, :, first_slot:]
        self._visible_keys[window] = VisibleKeys(first_slot, first_column, masked)
        return self._visible_keys[window]

    # --- the grid ---

    def _to_cells(self, rows: Tensor) -> Tensor:
        """[n * H, r, X] -> [b * H, g * r, X]."""
        count, repeats, size = rows.shape
        cells = rows.index_select(0, self._map_heads(count // len(self.prompt_of))[0])
        return cells.view(-1, self.grid_width * repeats, size)

    def _to_rows(self, cells: Tensor, shape: torch.Size) -> Tensor:
        """[b * H, g * r, X] -> [n * H, r, X]; `shape` begins with n * H, r."""
        cells = cells.view(-1, shape[1], cells.shape[2])
        return cells.index_select(0, self._map_heads(shape[0] // len(self.prompt_of))[1])

    def _map_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """Return the row of each cell [b * H * g], and the cell of each row [n * H]."""
        if heads not in self._head_maps:
            head = torch.arange(heads, device=self._cell_of_row.device)
            rows = self._row_of_cell.view(-1, 1, self.grid_width) * heads + head[:, None]
            cell, width = self._cell_of_row[:, None], self.grid_width
            cells = (cell // width * heads + head) * width + cell % width
            self._head_maps[heads] = rows.flatten(), cells.flatten()
        return self._head_maps[heads]


def _allocate(prompts: Tensor, rows: int, columns: int) -> Tensor:
    """Allocate completions [k, rows, H, columns, D] for prompts [k, b, H, P, D]."""
    num_tensors, _, heads, _, size = prompts.shape
    return prompts.new_empty(num_tensors, rows, heads, columns, size)


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
    """Compute attention [n, 1, heads, D] for transformers' modules, without attention weights.

    Keys and values are read from the cache, which also knows the padding.
    """
    n, heads, _, size = query.shape
    kv_heads = keys.shape[1]
    query = query.reshape(n * kv_heads, heads // kv_heads, size)
    query = query * query_scale(scaling, softcap)
    output = shared_prefix.attend(module.layer_idx, query, softcap=softcap, window=sliding_window)
    return output.reshape(n, 1, heads, -1), None


# --- rows that leave the batch between turns ---
#
# Completions end in the present column, so a row that comes back takes the last columns again,
# however far the others have advanced: no gap arises and no position is lost.


@dataclass(frozen=True)
class OffloadedRow:
    """Keys and values of one row outside the batch; its prompt stays in the cache."""

    kv: list[Tensor]  # for each stack [k, H, t, D]
    num_tokens: int  # t, that the row has been fed


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
        """Compute new tokens of m offloaded rows in one forward pass, at least one of each.

        Returns:
            [m, V] logits after the last token of each, and the keys and values of its new tokens.
        """

    def offload(self, row: int) -> None:
        """Copy a live row's keys and values; the next `select` of the cache must drop it."""
        cache = self.cache
        columns = slice(int(cache.start[row]), cache.num_fed)
        kv = [stack[:, row, :, columns].clone() for stack in cache._completions]
        prompt_of = cache.prompt_of[row : row + 1]
        cache.offloaded_prompt_of = torch.cat([cache.offloaded_prompt_of, prompt_of])
        self.rows.append(OffloadedRow(kv, cache.num_fed - columns.start))

    def discard(self, numbers: Sequence[int]) -> None:
        """Drop rows that ended; the remaining ones are renumbered."""
        dropped = set(numbers)
        remaining = [number for number in range(len(self.rows)) if number not in dropped]
        self.cache.offloaded_prompt_of = self.cache.offloaded_prompt_of[remaining]
        self.rows = [self.rows[number] for number in remaining]

    def restore(self, numbers: Sequence[int], ids: Sequence[list[int]]) -> Tensor:
        """Append rows to the batch after computing new tokens of each in one pass.

        Args:
            numbers: of m rows; the remaining ones are renumbered.
            ids: new tokens of each row (its observation), at least one.

        Returns:
            [m, V] logits of their next tokens.
        """
        rows = [self.rows[number] for number in numbers]
        prompt_of = self.cache.offloaded_prompt_of[list(numbers)]
        logits, extensions = self.extend(rows, prompt_of, ids)
        _insert_rows(self.cache, rows, extensions, prompt_of)
        self.discard(numbers)
        self.cache._arrange()
        return logits


def _insert_rows(
    cache: SharedPrefixCache,
    rows: Sequence[OffloadedRow],
    extensions: Sequence[OffloadedRow],
    prompt_of: Tensor,
) -> None:
    """Append rows to the cache, each with the keys and values of its new tokens."""
    num_live = len(cache.prompt_of)
    pairs = list(zip(rows, extensions, strict=True))
    lengths = [row.num_tokens + extension.num_tokens for row, extension in pairs]
    cache._grow(num_live + len(rows))
    _shift_columns(cache, max(0, max(lengths) - cache.num_fed))
    min_start = min([cache.min_start, *(cache.num_fed - length for length in lengths)])
    for number, stack in enumerate(cache._completions):
        # 0 * NaN is NaN: masked entries must be finite.
        stack[:, :num_live, :, min_start : cache.min_start] = 0
        stack[:, num_live:].zero_()
        for index, (row, extension) in enumerate(pairs, num_live):
            kv = torch.cat([row.kv[number], extension.kv[number]], 2)
            stack[:, index, :, cache.num_fed - kv.shape[2] : cache.num_fed] = kv
    device = cache.start.device
    cache.start = torch.cat([cache.start, cache.num_fed - torch.tensor(lengths, device=device)])
    cache.prompt_of = torch.cat([cache.prompt_of, prompt_of])


def _shift_columns(cache: SharedPrefixCache, columns: int) -> None:
    """Move the completions of all rows to the right, so that longer rows fit."""
    num_fed = cache.num_fed
    for stack in cache._completions:
        stack[:, :, :, columns : num_fed + columns] = stack[:, :, :, :num_fed].clone()
    cache.start, cache.num_fed = cache.start + columns, num_fed + columns
    cache.min_start += columns


class CausalRowOffloader(RowOffloader):
    """Rows of a decoder-only model, which is given without its head."""

    def __init__(
        self,
        model: Any,
        head: Callable[[Tensor], Tensor],
        cache: SharedPrefixCache,
        key_order: Tensor | None,
    ) -> None:
        super().__init__(cache)
        self.model, self.head = model, head
        # [D] transformers' index of each entry of the cache's keys (the fused decoder permutes).
        self.key_order = key_order

    @torch.no_grad()
    def extend(
        self, rows: Sequence[OffloadedRow], prompt_of: Tensor, ids: Sequence[list[int]]
    ) -> tuple[Tensor, list[OffloadedRow]]:
        new_tokens = NewTokens(rows, ids, self.cache.prompt_mask.device)
        # Prompts and completions without gaps, padded on the left, as prompts are.
        past_mask = torch.cat([self.cache.prompt_mask[prompt_of], new_tokens.past_mask], 1)
        real_last = torch.argsort(past_mask.long(), dim=1, stable=True)
        width = past_mask.shape[1]
        mask = torch.cat([past_mask.gather(1, real_last), new_tokens.mask], 1)
        past = DynamicCache()
        num_columns = new_tokens.past_mask.shape[1]
        tensors = _gather_past(self.cache, rows, prompt_of, num_columns, real_last)
        inverse = None if self.key_order is None else self.key_order.argsort()
        dtype = next(self.model.parameters()).dtype
        for layer in range(len(tensors) // 2):
            keys, values = tensors[2 * layer].to(dtype), tensors[2 * layer + 1].to(dtype)
            past.update(keys if inverse is None else keys[..., inverse], values, layer)
        output = self.model(
            input_ids=new_tokens.ids,
            attention_mask=mask.long(),
            position_ids=positions(mask)[:, width:],
            past_key_values=past,
            use_cache=True,
        )
        logits = self.head(new_tokens.last(output.last_hidden_state))
        return logits, split_rows(self.cache, past, width, new_tokens.lengths, self.key_order)


class NewTokens:
    """New tokens of m rows, at least one of each, padded on the right."""

    def __init__(
        self, rows: Sequence[OffloadedRow], ids: Sequence[list[int]], device: torch.device
    ) -> None:
        self.lengths = [len(row_ids) for row_ids in ids]
        self.ids = torch.zeros(  # [m, t]
            len(rows), max(self.lengths), dtype=torch.long, device=device
        )
        self.mask = torch.zeros_like(self.ids, dtype=torch.bool)
        for row, row_ids in enumerate(ids):
            self.ids[row, : len(row_ids)] = torch.tensor(row_ids, device=device)
            self.mask[row, : len(row_ids)] = True
        width = max(row.num_tokens for row in rows)
        padding = torch.tensor([[width - row.num_tokens] for row in rows], device=device)
        # [m, width] True marks a completion token fed before, padded on the left.
        self.past_mask = torch.arange(width, device=device) >= padding

    def last(self, hidden: Tensor) -> Tensor:
        """Return the hidden states [m, E] of the last new tokens, of all of them [m, t, E]."""
        rows = torch.arange(len(hidden), device=hidden.device)
        return hidden[rows, self.mask.sum(1) - 1]


def gather_completions(
    cache: SharedPrefixCache, rows: Sequence[OffloadedRow], columns: int
) -> list[Tensor]:
    """Return the completions of offloaded rows, for each stack [k, m, H, columns, D]."""
    stacks = []
    for number, stack in enumerate(cache._completions):
        num_tensors, _, heads, _, size = stack.shape
        completions = stack.new_zeros(num_tensors, len(rows), heads, columns, size)
        for index, row in enumerate(rows):
            completions[:, index, :, columns - row.num_tokens :] = row.kv[number]
        stacks.append(completions)
    return stacks


def _gather_past(
    cache: SharedPrefixCache,
    rows: Sequence[OffloadedRow],
    prompt_of: Tensor,
    columns: int,
    order: Tensor,
) -> list[Tensor]:
    """Return keys and values of every layer [m, H, P + columns, D], ordered by `order` [m, *]."""
    tensors: dict[int, Tensor] = {}
    stacks = zip(
        cache._numbers, cache._prompts, gather_completions(cache, rows, columns), strict=True
    )
    for numbers, prompts, completions in stacks:
        kv = torch.cat([prompts[:, prompt_of], completions], 3)
        index = order[None, :, None, :, None].expand_as(kv)
        tensors |= dict(zip(numbers, kv.gather(3, index), strict=True))
    return [tensors[number] for number in range(len(tensors))]


def split_rows(
    cache: SharedPrefixCache,
    past: DynamicCache,
    width: int,
    lengths: Sequence[int],
    key_order: Tensor | None,
) -> list[OffloadedRow]:
    """Return the tokens of each row after the first `width`, in the layout of the cache."""
    layers: list[Any] = past.layers
    tensors = []
    for layer in layers:
        keys = layer.keys if key_order is None else layer.keys[..., key_order]
        tensors += [keys[:, :, width:], layer.values[:, :, width:]]
    stacks = [
        torch.stack([tensors[number] for number in numbers]).to(completions.dtype)
        for numbers, completions in zip(cache._numbers, cache._completions, strict=True)
    ]
    return [
        OffloadedRow([stack[:, row, :, :length] for stack in stacks], length)
        for row, length in enumerate(lengths)
    ]
