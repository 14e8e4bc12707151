"""Cross-attention of a decoder's rows to the prompts that its encoder has read."""

from __future__ import annotations

import torch
from torch import Tensor

from litgrpo.models.shared_prefix import PromptGrid


class CrossAttention:
    """Every row attends to a prompt of its own: no shape depends on which row has which prompt.

    Args:
        prompt_mask: [M, P] True marks a real token.
    """

    def __init__(self, prompt_mask: Tensor) -> None:
        self.mask: Tensor | None = prompt_mask[:, None, None]

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, dropout: float, scaling: float
    ) -> Tensor:
        """Attention of rows [M, H, q, D] to the keys and values [M, H, P, D] of their prompts."""
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, self.mask, dropout_p=dropout, scale=scaling
        )


class GroupedCrossAttention(CrossAttention):
    """Several rows attend to the same prompt: they become rows of one matrix product.

    Args:
        prompt_mask: [B, P] True marks a real token.
        prompt_of: [n] prompt of each row, in any order.
    """

    def __init__(self, prompt_mask: Tensor, prompt_of: Tensor) -> None:
        grid = PromptGrid(prompt_of, len(prompt_mask))
        self.width, self.cell, self.row_of_cell = grid.width, grid.cell_of_row, grid.row_of_cell
        self.in_place = torch.equal(self.cell, torch.arange(len(self.row_of_cell)).to(self.cell))
        self.mask = None if bool(prompt_mask.all()) else prompt_mask[:, None, None]

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, dropout: float, scaling: float
    ) -> Tensor:
        """Attention of rows [n, H, q, D] to the keys and values [B, H, P, D] of their prompts."""
        heads, length, size = query.shape[1:]
        cells = query if self.in_place else query.index_select(0, self.row_of_cell)
        grid = cells.view(-1, self.width, heads, length, size).transpose(1, 2)
        output = torch.nn.functional.scaled_dot_product_attention(
            grid.reshape(-1, heads, self.width * length, size),
            *(keys, values, self.mask),
            dropout_p=dropout,
            scale=scaling,
        )
        cells = output.view(-1, heads, self.width, length, size).transpose(1, 2)
        cells = cells.reshape(-1, heads, length, size)
        return cells if self.in_place else cells.index_select(0, self.cell)
