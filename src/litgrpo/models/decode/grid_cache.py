"""KV cache in fixed shapes at fixed addresses, for decoding steps that a device records.

The rows of each prompt stand side by side in a grid [B, G], so that the rows of one prompt are one
matrix without an index. Between two steps `select` can drop rows and `show` more columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from litgrpo.tensors import within


class GridCache:
    """Prompts stored once, and the own tokens of the rows of each prompt; all rows begin together.

    Args:
        prefill: the cache of one forward pass over the [B, P] prompts.
        prompt_mask: [B, P] True marks a real token; padded on the left.
        group_size: G rows continue each prompt.
        capacity: maximum number of tokens that a row is fed, C.
        dtype: of keys and values.

    Example:
        4 prompts, 8 rows each: the grid is [4, 8]. If at most 3 rows of each of 2 prompts remain,
        `select` makes it [2, 3].
    """

    def __init__(
        self,
        prefill: DynamicCache,
        prompt_mask: Tensor,
        group_size: int,
        capacity: int,
        dtype: torch.dtype,
    ) -> None:
        self.prompt_mask, self.width, self.capacity = prompt_mask, group_size, capacity
        self.fed = torch.zeros(1, dtype=torch.long, device=prompt_mask.device)
        self.columns = 0  # own columns that attention reads
        self.prompts: list[tuple[Tensor, Tensor]] = []  # keys and values [B, H, P, D] of each layer
        self.own: list[Tensor] = []  # [2, B, H, G, C, D] keys and values of each layer
        layers: list[Any] = prefill.layers
        for layer in layers:
            self.prompts.append((layer.keys.to(dtype), layer.values.to(dtype)))
            layer.keys = layer.values = None  # free the wider copy
            batch, heads, _, size = self.prompts[-1][0].shape
            # Zeros, because masked entries must be finite: 0 * NaN is NaN.
            shape = (2, batch, heads, group_size, capacity, size)
            self.own.append(self.prompts[-1][0].new_zeros(shape))
        self.masks: dict[int | None, Tensor] = {}

    @property
    def rows(self) -> int:
        """Number of cells of the grid, n = B * G."""
        return len(self.prompt_mask) * self.width

    def show(self, columns: int) -> None:
        """Let attention read this many own columns."""
        self.columns = min(columns, self.capacity)

    def select(self, prompts: Tensor, places: Tensor) -> None:
        """Rearrange the rows into a smaller grid [b, g].

        Args:
            prompts: [b] prompts to keep.
            places: [b, g] the place of each kept row among the rows of its prompt.
        """
        self.prompt_mask, self.width = self.prompt_mask[prompts], places.shape[1]
        for layer, (keys, values) in enumerate(self.prompts):
            self.prompts[layer] = keys[prompts], values[prompts]
            # Indices on both sides of a slice come first: [b, g, 2, H, columns, D].
            used = self.own[layer][..., : self.columns, :]
            kept = used[:, prompts[:, None], :, places].permute(2, 0, 3, 1, 4, 5)
            fewer = kept.new_zeros((*kept.shape[:4], self.capacity, kept.shape[5]))
            fewer[..., : self.columns, :] = kept
            self.own[layer] = fewer

    def begin_step(self) -> Tensor:
        """Return the positions [n] of the tokens of this step."""
        self.masks.clear()
        return (self.prompt_mask.sum(1)[:, None] + self.fed).expand(-1, self.width).flatten()

    def attend(
        self, layer: int, heads: Tensor, *, softcap: float | None, window: int | None
    ) -> Tensor:
        """Store keys and values of one token per row; compute attention to prompt and own tokens.

        Keys and values are read once, not once for each query head that shares them.

        Args:
            layer: number of the layer.
            heads: [n, Q + 2 * H, D] queries (scaled; divided by the soft-cap if there is one), keys
                and values.
            softcap: scores become softcap * tanh(query @ key).
            window: positions that a token attends to, itself included; None: all.

        Returns:
            [n, Q * D].
        """
        prompt_keys, prompt_values = self.prompts[layer]
        batch, groups, slots, size = prompt_keys.shape
        width, dtype = self.width, prompt_keys.dtype
        queries = heads.shape[1] - 2 * groups
        repeats = queries // groups
        new = heads[:, queries:].view(batch, width, 2, groups, 1, size).to(dtype)
        self.own[layer].index_copy_(4, self.fed, new.permute(2, 0, 3, 1, 4, 5))
        keys, values = self.own[layer][..., : self.columns, :].flatten(1, 3)
        query = prompt_keys.new_empty(batch, groups, width, repeats, size)
        query.copy_(heads[:, :queries].view(batch, width, groups, repeats, size).transpose(1, 2))
        # Both products write into one tensor, which saves a copy of the scores.
        scores = query.new_empty(batch * groups, width * repeats, slots + self.columns)
        of_rows = scores.view(-1, repeats, slots + self.columns)
        by_prompt, by_row = query.view(batch * groups, -1, size), query.view(-1, repeats, size)
        torch.bmm(by_prompt, prompt_keys.flatten(0, 1).mT, out=scores[..., :slots])
        torch.bmm(by_row, keys.mT, out=of_rows[..., slots:])
        if softcap is not None:
            scores.tanh_().mul_(softcap)
        scores.view(batch, -1, slots + self.columns).add_(self._mask(window, dtype))
        weights = scores.softmax(-1)  # computed in float32
        output = torch.bmm(weights[..., :slots], prompt_values.flatten(0, 1))
        of_rows = weights.view(-1, repeats, slots + self.columns)
        output.view(-1, repeats, size).baddbmm_(of_rows[..., slots:], values)
        output = output.view(batch, groups, width, -1).transpose(1, 2)
        return output.reshape(self.rows, queries * size)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return [B, 1, P + columns], added to the scores; one per window and step."""
        if window not in self.masks:
            slots = self.prompt_mask.shape[1]
            back = slots + self.fed - torch.arange(slots + self.columns, device=self.fed.device)
            padding = torch.nn.functional.pad(~self.prompt_mask, (0, self.columns))
            hidden = padding | ~within(back, window)
            mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
            self.masks[window] = mask[:, None]
        return self.masks[window]
