"""Attention masks of fixed shapes, made here because the library looks at values to make them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def causal_masks(model: Any, mask: Tensor) -> Tensor | dict[str, Tensor]:
    """What a decoder-only model takes instead of a padding mask.

    Args:
        model: a Hugging Face model; its config tells of sliding windows and kinds of layers.
        mask: [M, T] True marks a real token.

    Returns:
        [M, 1, T, T] for all layers, or {kind of layer: [M, 1, T, T]}. Padding attends to itself,
        so that no row of a softmax is empty.
    """
    config = model.config.to_dict()
    places = torch.arange(mask.shape[1], device=mask.device)
    distance = places[:, None] - places
    causal = (distance >= 0) & mask[:, None, None]
    itself = distance == 0
    whole = accepted(model, causal | itself)
    window = config.get("sliding_window")
    kinds = set(config.get("layer_types") or [])
    if "sliding_attention" not in kinds and (kinds or not window):
        return whole
    # Rows have no gaps, so that slots are as far apart as positions.
    near = accepted(model, (causal & (distance < window)) | itself)
    return {"full_attention": whole, "sliding_attention": near} if kinds else near


def accepted(model: Any, allowed: Tensor) -> Tensor:
    """[M, 1, T, T] bool as the model's kind of attention takes it: as it is, or to be added."""
    if model.config._attn_implementation != "eager":
        return allowed
    least = torch.finfo(model.dtype).min
    return torch.where(allowed, 0.0, least).to(model.dtype)
