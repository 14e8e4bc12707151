"""CPU kernels of the flash attention of segments, which torch's CPU build does not contain.

The device runs them under CUDA's names: one launch for a forward pass, one for a backward pass.
Definition: `torch.ops.aten._flash_attention_forward` with bounds of segments (FlashAttention-2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("aten", "IMPL", "CPU")


def install() -> None:
    """Register both kernels."""
    LIBRARY.impl("_flash_attention_forward", forward)
    LIBRARY.impl("_flash_attention_backward", backward)


def check(query: Tensor, keys: Tensor) -> None:
    """Raise where the kernel of a GPU raises."""
    heads, size = query.shape[1:]
    if query.dtype not in (torch.float16, torch.bfloat16) or query.dtype != keys.dtype:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if size % 8 or size > 256 or heads % keys.shape[1]:
        raise RuntimeError(f"FlashAttention does not support {heads} heads of size {size}")


def segments(
    query: Tensor, keys: Tensor, bounds_q: Tensor, bounds_k: Tensor, causal: bool, scale: float
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the queries and keys of each segment, and their scores [heads, t, s] in float32."""
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    q, k = bounds_q.tolist(), bounds_k.tolist()
    for i in range(len(q) - 1):
        own, seen = slice(q[i], q[i + 1]), slice(k[i], k[i + 1])
        repeated = keys[seen].float().repeat_interleave(query.shape[1] // keys.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", query[own].float(), repeated) * scale
        if causal:
            t, s = scores.shape[1:]
            hidden = torch.ones(t, s, dtype=torch.bool).triu(s - t + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        yield own, seen, scores


def forward(  # noqa: PLR0913  # the operator's arguments
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    **others: Any,
) -> tuple[Tensor, ...]:
    """Return the output [T, heads, D], the log-sums [heads, T] and three unused tensors."""
    check(query, keys)
    assert int(bounds_q.diff().max()) <= max_q
    assert int(bounds_k.diff().max()) <= max_k
    output = torch.full_like(query, torch.nan)
    log_sum = torch.full((query.shape[1], len(query)), torch.nan)
    for own, seen, scores in segments(query, keys, bounds_q, bounds_k, causal, scale):
        v = values[seen].float().repeat_interleave(query.shape[1] // keys.shape[1], 1)
        output[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(query.dtype)
        log_sum[:, own] = scores.logsumexp(-1)
    unused = torch.zeros(2, dtype=torch.uint64)
    return output, log_sum, unused, unused.new_zeros(()), query.new_empty(0)


def backward(  # noqa: PLR0913, PLR0917  # the operator's arguments
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    log_sum: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    random_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, keys and values."""
    check(query, keys)
    group = query.shape[1] // keys.shape[1]
    grad_q, grad_k, grad_v = (torch.zeros(x.shape) for x in (query, keys, values))
    for own, seen, scores in segments(query, keys, bounds_q, bounds_k, causal, scale):
        # P = exp(S - L);  dV = P' dO;  dS = P (dO V' - rowsum(dO O));  dQ = dS K;  dK = dS' Q
        weights = (scores - log_sum[:, own, None]).exp()
        g, v = grad[own].float(), values[seen].float().repeat_interleave(group, 1)
        of_v = torch.einsum("hqk,qhd->khd", weights, g)
        delta = (g * output[own].float()).sum(-1).t()[..., None]
        of_scores = weights * (torch.einsum("qhd,khd->hqk", g, v) - delta) * scale
        k = keys[seen].float().repeat_interleave(group, 1)
        grad_q[own] = torch.einsum("hqk,khd->qhd", of_scores, k)
        of_k = torch.einsum("hqk,qhd->khd", of_scores, query[own].float())
        grad_k[seen] = of_k.unflatten(1, (-1, group)).sum(2)
        grad_v[seen] = of_v.unflatten(1, (-1, group)).sum(2)
    return grad_q.to(query.dtype), grad_k.to(keys.dtype), grad_v.to(values.dtype)
