"""Which rows of a decoder answer which prompt of its encoder: cross-attention without copies."""

from __future__ import annotations

import torch
from torch import Tensor


class SideBySide:
    """Which rows answer the same prompt: they become rows of one matrix product.

    Args:
        prompt_mask: [B, P] True marks a real token.
        prompt_of: [n] prompt of each row, in any order.
    """

    def __init__(self, prompt_mask: Tensor, prompt_of: Tensor) -> None:
        """Place the rows of each prompt side by side in a grid [B, width]."""
        members = torch.bincount(prompt_of, minlength=len(prompt_mask))
        self.width = int(members.max())
        numbers = torch.arange(len(prompt_of), device=prompt_of.device)
        order = prompt_of.argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = numbers - (members.cumsum(0) - members)[prompt_of[order]]
        self.cell = prompt_of * self.width + place
        self.row_of_cell = order.new_zeros(len(members) * self.width)  # empty: any row
        self.row_of_cell[self.cell] = numbers
        self.in_place = bool(torch.equal(self.cell, torch.arange(len(self.row_of_cell)).to(order)))
        self.real = None if bool(prompt_mask.all()) else prompt_mask[:, None, None]

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, dropout: float, scaling: float
    ) -> Tensor:
        """Attention of rows [n, H, q, D] to the keys and values [B, H, P, D] of their prompts."""
        heads, length, size = query.shape[1:]
        cells = query if self.in_place else query.index_select(0, self.row_of_cell)
        grid = cells.view(-1, self.width, heads, length, size).transpose(1, 2)
        output = torch.nn.functional.scaled_dot_product_attention(
            grid.reshape(-1, heads, self.width * length, size),
            *(keys, values, self.real),
            dropout_p=dropout,
            scale=scaling,
        )
        cells = output.view(-1, heads, self.width, length, size).transpose(1, 2)
        cells = cells.reshape(-1, heads, length, size)
        return cells if self.in_place else cells.index_select(0, self.cell)


class RowByRow:
    """Every row has its own prompt: nothing is shared, and no shape depends on which row has which.

    Args:
        prompt_mask: [M, P] True marks a real token.
    """

    def __init__(self, prompt_mask: Tensor) -> None:
        """Keep the mask as attention takes it."""
        self.real = prompt_mask[:, None, None]

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, dropout: float, scaling: float
    ) -> Tensor:
        """Attention of rows [M, H, q, D] to the keys and values [M, H, P, D] of their prompts."""
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, self.real, dropout_p=dropout, scale=scaling
        )
