"""Decoding attention in which the completions of a group share their prompt's keys and values.

The library's own model code runs unchanged: a `Cache` keeps the keys and values, and an attention
function registered under the name `SHARED_PREFIX` reads them. The idea is published as Hydragen
(arXiv:2402.05099).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

from litgrpo.policies.policy import DecodeState

SHARED_PREFIX = "litgrpo_shared_prefix"


class SharedPrefixCache(Cache, DecodeState):
    """Keys and values of each prompt once, and of each live row's own tokens.

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
        rows = len(prompt_mask) * group_size
        layers: list[Any] = prefill.layers
        self.prompt_keys: list[Tensor] = [layer.keys for layer in layers]  # each [B, H, P, D]
        self.prompt_values: list[Tensor] = [layer.values for layer in layers]
        self.keys = [_room(keys, rows, capacity) for keys in self.prompt_keys]  # each [n, H, C, D]
        self.values = [_room(values, rows, capacity) for values in self.prompt_values]
        self.fed = 0
        self.prompt_mask = prompt_mask
        self.prompt_lengths = prompt_mask.sum(1)
        self.prompt_of = torch.arange(rows, device=prompt_mask.device) // group_size
        self._arrange()

    def _arrange(self) -> None:
        """Place the live rows of each prompt side by side in a grid [b, g]."""
        members = torch.bincount(self.prompt_of, minlength=len(self.prompt_mask))
        self.grid_width = int(members.max())
        place = torch.arange(len(self.prompt_of), device=members.device)
        first = members.cumsum(0) - members
        self.cell = self.prompt_of * self.grid_width + place - first[self.prompt_of]
        self.row_of_cell = self.cell.new_zeros(len(members) * self.grid_width)
        self.row_of_cell[self.cell] = place
        self.grid_is_full = len(self.cell) == len(self.row_of_cell)
        prompt_mask = self.prompt_mask[self.prompt_of]
        self.padding = None if bool(prompt_mask.all()) else ~prompt_mask[:, None, None]

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, and the prompts that they continue."""
        prompts, self.prompt_of = torch.unique(self.prompt_of[rows], return_inverse=True)
        if len(prompts) < len(self.prompt_mask):
            self.prompt_keys = [keys[prompts] for keys in self.prompt_keys]
            self.prompt_values = [values[prompts] for values in self.prompt_values]
            self.prompt_mask = self.prompt_mask[prompts]
            self.prompt_lengths = self.prompt_lengths[prompts]
        self.keys = [_moved(keys, rows, self.fed) for keys in self.keys]
        self.values = [_moved(values, rows, self.fed) for values in self.values]
        self._arrange()

    def update(  # type: ignore[override]
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token's keys and values [n, H, 1, D]; return all of the row's own so far."""
        end = self.fed + 1
        self.keys[layer][:, :, self.fed : end] = keys
        self.values[layer][:, :, self.fed : end] = values
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots filled before this token."""
        return self.prompt_mask.shape[1] + self.fed

    def position_ids(self) -> Tensor:
        """[n, 1] position of the token that is about to be fed."""
        return (self.prompt_lengths[self.prompt_of] + self.fed)[:, None]

    def to_grid(self, rows: Tensor) -> Tensor:
        """Rows [n, H, r, D] stacked by prompt: [b, H, g * r, D]; empty cells hold any row."""
        heads, repeats, size = rows.shape[1:]
        cells = rows if self.grid_is_full else rows[self.row_of_cell]
        grid = cells.view(-1, self.grid_width, heads, repeats, size).transpose(1, 2)
        return grid.reshape(-1, heads, self.grid_width * repeats, size)

    def from_grid(self, grid: Tensor) -> Tensor:
        """The inverse of `to_grid`, for any last size."""
        prompts, heads, stacked, size = grid.shape
        repeats = stacked // self.grid_width
        cells = grid.view(prompts, heads, self.grid_width, repeats, size).transpose(1, 2)
        cells = cells.reshape(-1, heads, repeats, size)
        return cells if self.grid_is_full else cells[self.cell]


def _room(prompt: Tensor, rows: int, capacity: int) -> Tensor:
    _, heads, _, size = prompt.shape
    return prompt.new_empty(rows, heads, capacity, size)


def _moved(buffer: Tensor, rows: Tensor, used: int) -> Tensor:
    moved = buffer.new_empty(len(rows), *buffer.shape[1:])
    moved[:, :, :used] = buffer[rows, :, :used]
    return moved


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
    """One query per row over its prompt (shared by its group) and its own tokens.

    The query heads that share a key/value head, and the rows that share a prompt, become rows of
    one matrix product, so no key or value is ever copied.

    Args:
        module: the attention module; its `layer_idx` names the layer.
        query: [n, heads, 1, D].
        keys: [n, H, t, D] of the row's own tokens.
        values: [n, H, t, D] of the row's own tokens.
        attention_mask: unused; the cache knows the padding.
        shared_prefix: the cache.
        scaling: multiplies the scores.
        sliding_window: positions that a token sees, itself included; None sees all.
        softcap: scores become softcap * tanh(score / softcap).
        kwargs: what the library passes to other kinds of attention.

    Returns:
        [n, 1, heads, D] and no attention weights.
    """
    cache, layer = shared_prefix, module.layer_idx
    n, heads, _, size = query.shape
    groups = keys.shape[1]
    query = query.reshape(n, groups, heads // groups, size) * scaling
    prompt_keys = cache.prompt_keys[layer]
    prompt_values = cache.prompt_values[layer]
    prompt_len = prompt_keys.shape[2]

    on_prompt = cache.from_grid(cache.to_grid(query) @ prompt_keys.transpose(2, 3))
    scores = torch.cat([on_prompt, query @ keys.transpose(2, 3)], -1)  # [n, H, r, P + t]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if cache.padding is not None:
        scores[..., :prompt_len].masked_fill_(cache.padding, -torch.inf)
    if sliding_window is not None and scores.shape[-1] > sliding_window:
        scores[..., :-sliding_window] = -torch.inf
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = weights.to(values.dtype)
    from_prompt = cache.from_grid(cache.to_grid(weights[..., :prompt_len]) @ prompt_values)
    output = from_prompt + weights[..., prompt_len:] @ values
    return output.reshape(n, 1, heads, size), None


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
