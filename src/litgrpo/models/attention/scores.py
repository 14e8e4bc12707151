"""Small parts that several attention functions share: soft-caps, and rows gathered by prompt."""

from __future__ import annotations

import torch
from torch import Tensor


def query_scale(scaling: float, softcap: float | None) -> float:
    """What to multiply queries by, so that their products with keys are ready for `softcapped`."""
    return scaling if softcap is None else scaling / softcap


def softcapped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores that have been divided by the soft-cap already -> softcap * tanh(scores)."""
    return scores if softcap is None else scores.tanh() * softcap


def within(back: Tensor, window: int | None) -> Tensor:
    """Whether a token attends to another that is `back` positions before it: not to later ones.

    Args:
        back: [...] position of the one less that of the other.
        window: positions that a token attends to, itself included; None: all.
    """
    return back >= 0 if window is None else (back >= 0) & (back < window)


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
