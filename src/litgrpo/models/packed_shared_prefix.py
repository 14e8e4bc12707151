"""Attention of a packed sequence in which completions share their prompt.

The library's own model code runs unchanged: an attention function registered under the name
`PACKED` is handed the packing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from litgrpo.models.kernels import packed_flash as flash
from litgrpo.models.packing import Packing
from litgrpo.tensors import softcapped, within

PACKED = "litgrpo_packed_shared_prefix"


def packed_attention(
    module: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Every token attends to its own row's earlier tokens and its prompt.

    Args:
        module: the attention module.
        query: [1, heads, T, D].
        keys: [1, H, T, D].
        values: [1, H, T, D].
        attention_mask: unused; `packing` knows which token attends to which.
        packing: where rows and prompts stand.
        scaling: multiplies the scores.
        dropout: must be 0.
        sliding_window: positions that a token attends to, itself included; None: all.
        softcap: scores become softcap * tanh(score / softcap).
        kwargs: what the library passes to other kinds of attention.

    Returns:
        [1, T, heads, D] and no attention weights.
    """
    assert not dropout, "rows with dropout in attention do not share a prompt"
    q, k, v = (x[0].transpose(0, 1) for x in (query, keys, values))  # [T, heads or H, D]
    if sliding_window is not None and packing.longest <= sliding_window:
        sliding_window = None
    if softcap is None and sliding_window is None and flash.works_for(query):
        return flash.packed_attention(q, k, v, packing, scaling)[None], None
    return _grid_attention(q, k, v, packing, scaling, sliding_window, softcap)[None], None


def _grid_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    packing: Packing,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[T, heads, D] by plain operations: each row of a bucket with a copy of its prompt."""
    output = torch.zeros_like(query)
    prompts, prompt_keys, prompt_values = (
        packing.prefixes.grid(x).transpose(1, 2) for x in (query, keys, values)
    )
    number, length = packing.prefixes.shape
    prompt_len = torch.bincount(packing.prefixes.places // length, minlength=number)
    column = torch.arange(length, device=query.device)
    visible = within(column[:, None] - column, window)[None, None]
    attended = _attend(prompts, prompt_keys, prompt_values, visible, scaling, softcap)
    output = output.index_copy(
        0, packing.prefixes.tokens, packing.prefixes.ungrid(attended.transpose(1, 2))
    )
    for bucket in packing.suffixes:
        own, own_keys, own_values = (bucket.grid(x).transpose(1, 2) for x in (query, keys, values))
        prompt = prompt_len[bucket.prompts, None, None]
        step = torch.arange(bucket.shape[1], device=query.device)[:, None]
        # Which of its prompt's tokens each token attends to: prompts end in padding here.
        of_prompt = (column < prompt) & within(prompt + step - column, window)
        of_row = within(step - step.T, window).expand(len(prompt), -1, -1)
        attended = _attend(
            own,
            torch.cat([prompt_keys.index_select(0, bucket.prompts), own_keys], 2),
            torch.cat([prompt_values.index_select(0, bucket.prompts), own_values], 2),
            torch.cat([of_prompt, of_row], 2)[:, None],
            scaling,
            softcap,
        )
        output = output.index_copy(0, bucket.tokens, bucket.ungrid(attended.transpose(1, 2)))
    return output


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """[n, heads, t, D] of queries like it over keys [n, H, s, D] where visible [n, 1, t, s]."""
    n, heads, length, size = query.shape
    groups = keys.shape[1]
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=visible, scale=scaling, enable_gqa=heads != groups
        )
    # The query heads that share a key head become rows of one product.
    stacked = query.reshape(n, groups, -1, size) * scaling
    scores = softcapped(stacked @ keys.transpose(2, 3) / softcap, softcap)
    scores = scores.unflatten(2, (heads // groups, length))
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    output = weights.to(values.dtype).flatten(2, 3) @ values
    return output.view(n, heads, length, size)


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, lambda *args, **kwargs: None)
