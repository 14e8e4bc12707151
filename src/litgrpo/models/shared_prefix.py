"""Decoding attention in which the completions of a group share their prompt's keys and values.

The library's own model code runs unchanged: a `Cache` keeps the keys and values, and an attention
function registered under the name `SHARED_PREFIX` reads them. The fused decoder reads the same
cache. The idea is published as Hydragen (arXiv:2402.05099).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

from litgrpo.models.policy import DecodeState
from litgrpo.tensors import query_scale, softcapped, widened

SHARED_PREFIX = "litgrpo_shared_prefix"


class PromptGrid:
    """A cell [B, width] for each row: rows of one prompt become rows of one matrix product.

    Args:
        prompt_of: [n] prompt of each row, in any order.
        num_prompts: B.
    """

    def __init__(self, prompt_of: Tensor, num_prompts: int) -> None:
        members = torch.bincount(prompt_of, minlength=num_prompts)
        self.width = int(members.max())
        numbers = torch.arange(len(prompt_of), device=prompt_of.device)
        order = prompt_of.argsort(stable=True)
        # Place among the rows of the same prompt: the number in order less that of the first.
        place = torch.empty_like(order)
        place[order] = numbers - (members.cumsum(0) - members)[prompt_of[order]]
        self.cell_of_row = prompt_of * self.width + place
        self.row_of_cell = order.new_zeros(num_prompts * self.width)  # empty: any row
        self.row_of_cell[self.cell_of_row] = numbers


class Window(NamedTuple):
    """What the tokens of this step attend to, the same in all layers of one window length.

    Args:
        slot: first prompt slot that any row attends to; P if none attends to any.
        column: first column of own tokens that any row attends to.
        masked: [n, 1, w] True where a row does not attend to one of the first w of these; None if
            all rows attend to all.
    """

    slot: int
    column: int
    masked: Tensor | None


class SharedPrefixCache(Cache, DecodeState):
    """Keys and values of each prompt once, and of each live row's own tokens.

    Own tokens stand in columns: a step writes the same column of all rows. A row that joins later
    starts in a later column.

    Args:
        prefill: the cache of one forward pass over the [B, P] prompts.
        prompt_mask: [B, P] True marks a real token.
        group_size: G rows will continue each prompt.
        capacity: most tokens that a row will be fed, C.
    """

    def __init__(
        self, prefill: DynamicCache, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> None:
        """Keep the prompts and make room for the rows."""
        # The base class wants layers only to read their flags.
        super().__init__(layers=[DynamicLayer() for _ in prefill.layers])
        layers: list[Any] = prefill.layers
        tensors = [each for layer in layers for each in (layer.keys, layer.values)]
        rows = len(prompt_mask) * group_size
        self.capacity = capacity
        self.fed = 0
        self.prompt_mask = prompt_mask
        self.prompt_of = torch.arange(rows, device=prompt_mask.device) // group_size
        self.start = torch.zeros_like(self.prompt_of)  # the column in which a row begins
        self.away = self.prompt_of[:0]  # prompts of rows that are away; see `rows_away`
        # Tensors of one shape are stacked, so that one operation moves the rows of all layers.
        alike: dict[torch.Size, list[int]] = defaultdict(list)
        for number, tensor in enumerate(tensors):
            alike[tensor.shape].append(number)
        self._numbers = list(alike.values())
        self._prompts = [torch.stack([tensors[i] for i in each]) for each in self._numbers]
        self._own = [_room(each, rows, capacity) for each in self._prompts]
        self._arrange()

    # --- rows come and go ---

    def _arrange(self) -> None:
        """Place the live rows of each prompt side by side in a grid [b, g], and make the views."""
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
        """Views of every layer, made now and not for every token."""
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
        used_by = torch.cat([self.prompt_of[rows], self.away])
        prompts, used_by = torch.unique(used_by, return_inverse=True)
        self.prompt_of, self.away = used_by.split([len(rows), len(self.away)])
        if len(prompts) < len(self.prompt_mask):
            self._prompts = [each[:, prompts] for each in self._prompts]
            self.prompt_mask = self.prompt_mask[prompts]
        self._arrange()

    def join(self, newcomers: DecodeState) -> None:
        """Take in the rows of a cache that has not been fed yet, after the own ones."""
        assert isinstance(newcomers, SharedPrefixCache)
        assert newcomers.fed == 0
        rows = len(self.prompt_of)
        self._make_room(rows + len(newcomers.prompt_of))
        for own in self._own:  # what is masked must be finite
            own[:, rows:].zero_()
        self.start = torch.cat([self.start, newcomers.start + self.fed])
        self.prompt_of = torch.cat([self.prompt_of, newcomers.prompt_of + len(self.prompt_mask)])
        self.prompt_mask = torch.cat([self.prompt_mask, newcomers.prompt_mask])
        both = zip(self._prompts, newcomers._prompts, strict=True)
        self._prompts = [torch.cat(each, 1) for each in both]
        self._arrange()

    def _make_room(self, rows: int) -> None:
        """Where rows join there are half as many columns again as one row needs."""
        columns = self.capacity + (self.capacity + 1) // 2
        for number, own in enumerate(self._own):
            if rows > own.shape[1] or columns > own.shape[3]:
                larger = _room(self._prompts[number], max(rows, own.shape[1]), columns)
                larger[:, : own.shape[1], :, : self.fed] = own[:, :, :, : self.fed]
                self._own[number] = larger

    def begin_step(self) -> Tensor:
        """There is a column for the next token; [n, 1] the token's position."""
        if self._own and self.fed == self._own[0].shape[3]:  # columns of rows that left go
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
        """One query per row over its prompt (shared by its group) and its own tokens.

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
        scores = softcapped(scores, softcap)
        if reach.masked is not None:
            each_row = scores.view(len(self.prompt_of), -1, scores.shape[2])
            each_row[..., : reach.masked.shape[2]].masked_fill_(reach.masked, -torch.inf)
        weights = widened(scores).softmax(-1).to(values.dtype)
        values = values.narrow(1, reach.column, columns)
        if not slots:
            return weights.bmm(values)
        from_prompt = self._to_cells(weights).narrow(2, 0, slots)
        from_prompt = from_prompt.bmm(prompt_values.narrow(1, reach.slot, slots))
        from_prompt = self._to_rows(from_prompt, query.shape)
        return torch.baddbmm(from_prompt, weights.narrow(2, slots, columns), values)

    def _window(self, window: int | None) -> Window:
        """What this step's tokens attend to: most own tokens in the oldest row."""
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
        """The row of each cell [b * H * g], and the cell of each row [n * H]."""
        if heads not in self._maps:
            head = torch.arange(heads, device=self._cell.device)
            rows = self._row_of_cell.view(-1, 1, self.grid_width) * heads + head[:, None]
            cell, width = self._cell[:, None], self.grid_width
            cells = (cell // width * heads + head) * width + cell % width
            self._maps[heads] = rows.flatten(), cells.flatten()
        return self._maps[heads]


def _room(prompts: Tensor, rows: int, columns: int) -> Tensor:
    """[k, n, H, columns, D] for k tensors [b, H, P, D]."""
    layers, _, heads, _, size = prompts.shape
    return prompts.new_empty(layers, rows, heads, columns, size)


def shared_prefix_attention(
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
    """What the library's attention modules call; see `SharedPrefixCache.attend`.

    Args:
        module: the attention module; its `layer_idx` names the layer.
        query: [n, heads, 1, D].
        keys: [n, H, t, D] of the row's own tokens.
        values: of the row's own tokens; the cache has them, too.
        attention_mask: unused; the cache knows the padding.
        shared_prefix: the cache.
        scaling: multiplies the scores.
        sliding_window: positions that a token attends to, itself included; None: all.
        softcap: scores become softcap * tanh(score / softcap).
        kwargs: what the library passes to other kinds of attention.

    Returns:
        [n, 1, heads, D] and no attention weights.
    """
    n, heads, _, size = query.shape
    groups = keys.shape[1]
    query = query.reshape(n * groups, heads // groups, size)
    query = query * query_scale(scaling, softcap)
    output = shared_prefix.attend(module.layer_idx, query, softcap=softcap, window=sliding_window)
    return output.reshape(n, 1, heads, -1), None


AttentionInterface.register(SHARED_PREFIX, shared_prefix_attention)
AttentionMaskInterface.register(SHARED_PREFIX, lambda *args, **kwargs: None)


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run the model with another attention function."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def same_attention_again(
    model: PreTrainedModel,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For activation checkpointing: what to recompute within is what was computed within."""
    return nullcontext(), attention(model, model.config._attn_implementation)
