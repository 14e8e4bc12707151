"""Attention of a packed sequence by torch's CPU flash kernel, without copying a prompt.

A suffix token attends to two sets of keys: its prompt's and its own row's. Each set is one call of
the kernel, which also returns the log-sum-exp of the set's scores:

    softmax over both = sigmoid(lse_own - lse_prompt) * own + (1 - sigmoid(...)) * prompt

All suffixes of a prompt are the queries of one call. In the backward pass the kernel computes each
set's part of the gradient from the output and the log-sum-exp of the union, because probabilities
are exp(score - lse) for every subset of the keys.

The kernel has no public name (`torch_compat`). It is tried once, forward and backward.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from litgrpo.models.kernels.torch_compat import (
    UNAVAILABLE,
    flash_attention,
    flash_attention_backward,
)
from litgrpo.tensors import widened

if TYPE_CHECKING:
    from litgrpo.models.packing import Packing


def works_for(query: Tensor) -> bool:
    """Check that the kernel can compute tensors like these."""
    return query.device.type == "cpu" and _kernel_works()


def packed_attention(
    query: Tensor, keys: Tensor, values: Tensor, packing: Packing, scaling: float
) -> Tensor:
    """Compute attention of every token to its prompt and its row's earlier tokens.

    Args:
        query: [T, heads, D].
        keys: [T, H, D].
        values: [T, H, D].
        packing: layout of rows and prompts.
        scaling: multiplies the scores.

    Returns:
        [T, heads, D].
    """
    output: Tensor = _PackedAttention.apply(query, keys, values, packing, scaling)
    return output


class _PackedAttention(torch.autograd.Function):
    """Forward and backward pass of `packed_attention`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, packing: Packing, scaling: float
    ) -> Tensor:
        # The kernel's backward pass is several times slower in bfloat16.
        q, k, v = (widened(x) for x in (query, keys, values))
        output, log_sum = q.new_empty(q.shape), q.new_empty(q.shape[:2])
        output[packing.num_tokens :] = 0
        for start, middle, end in packing.groups:
            prefix, suffixes = slice(start, middle), slice(middle, end)
            prefix_keys = k[None, prefix], v[None, prefix]
            output[prefix], log_sum[prefix] = _attend(
                q[None, prefix], *prefix_keys, causal=True, scaling=scaling
            )
            if end > middle:
                output[suffixes], log_sum[suffixes] = _attend(
                    q[None, suffixes], *prefix_keys, causal=False, scaling=scaling
                )
        for bucket in packing.suffixes:
            own, own_sum = _attend(
                bucket.to_grid(q),
                bucket.to_grid(k),
                bucket.to_grid(v),
                causal=True,
                scaling=scaling,
            )
            own, own_sum = bucket.from_grid(own), bucket.from_grid(own_sum)
            prompt, prompt_sum = output[bucket.tokens], log_sum[bucket.tokens]
            # e^a / (e^a + e^b) = sigmoid(a - b)
            own_weight = torch.sigmoid(own_sum - prompt_sum).unsqueeze(-1)
            output[bucket.tokens] = torch.lerp(prompt, own, own_weight)
            log_sum[bucket.tokens] = torch.logaddexp(own_sum, prompt_sum)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, keys, values, output, log_sum)
        ctx.packing, ctx.scaling = packing, scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, output, log_sum = ctx.saved_tensors
        packing, scaling = ctx.packing, ctx.scaling
        g, q, k, v, out = (widened(x) for x in (grad, query, keys, values, output))
        grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
        for each in (grad_q, grad_k, grad_v):
            each[packing.num_tokens :] = 0

        for start, middle, end in packing.groups:
            prefix, suffixes = slice(start, middle), slice(middle, end)
            prefix_keys = k[None, prefix], v[None, prefix]
            of_prefix = [x[None, prefix] for x in (g, q, out, log_sum)]
            grad_q[prefix], grad_k[prefix], grad_v[prefix] = _attend_backward(
                of_prefix, *prefix_keys, causal=True, scaling=scaling
            )
            if end > middle:
                of_suffixes = [x[None, suffixes] for x in (g, q, out, log_sum)]
                grad_q[suffixes], more_k, more_v = _attend_backward(
                    of_suffixes, *prefix_keys, causal=False, scaling=scaling
                )
                grad_k[prefix] += more_k[0]
                grad_v[prefix] += more_v[0]
        for bucket in packing.suffixes:
            # On padding everything is 0, the log-sum too, and so is the gradient.
            of_bucket = [bucket.to_grid(x) for x in (g, q, out, log_sum)]
            parts = _attend_backward(
                of_bucket, bucket.to_grid(k), bucket.to_grid(v), causal=True, scaling=scaling
            )
            own_q, own_k, own_v = map(bucket.from_grid, parts)
            grad_q.index_add_(0, bucket.tokens, own_q)
            grad_k.index_copy_(0, bucket.tokens, own_k)
            grad_v.index_copy_(0, bucket.tokens, own_v)
        return grad_q.to(query.dtype), grad_k.to(keys.dtype), grad_v.to(values.dtype), None, None


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, *, causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return output [n, t, heads, D] and log-sum [n, t, heads] over keys [n, s, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (query, keys, values))
    output, log_sum = flash_attention(q, k, v, causal=causal, scaling=scaling)
    return output.transpose(1, 2), log_sum.transpose(1, 2)


def _attend_backward(
    queries: list[Tensor], keys: Tensor, values: Tensor, *, causal: bool, scaling: float
) -> list[Tensor]:
    """Return one set's part of the gradients of query, keys and values, in their shapes.

    Args:
        queries: gradient of the output, query, output [n, t, heads, D] and log-sum [n, t, heads].
        keys: [n, s, H, D].
        values: [n, s, H, D].
        causal: a query sees the keys up to its own position only.
        scaling: multiplies the scores.
    """
    grad, query, output, log_sum = queries
    tensors = (x.transpose(1, 2) for x in (grad, query, keys, values, output, log_sum))
    grads = flash_attention_backward(*tensors, causal=causal, scaling=scaling)
    return [x.transpose(1, 2) for x in grads]


@cache
def _kernel_works() -> bool:
    """Check that torch has the kernel, and that it supports grouped-query attention."""
    # The first call may come from anywhere: under autocast, without gradients, or in a checkpointed
    # layer, which would count the tensors saved here and miss them in its recomputation.
    own = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), own:
        return _kernel_agrees()


def _kernel_agrees() -> bool:
    """Compare the kernel with plain attention on 3 tokens, forward and backward."""
    q = torch.arange(48.0).div(48).view(1, 3, 4, 4)  # 3 tokens, 4 heads
    k = q[:, :, :2]  # 2 key heads
    with torch.enable_grad():
        query, keys = q.clone().requires_grad_(), k.clone().requires_grad_()
        heads = torch.repeat_interleave(keys, 2, 2)
        scores = torch.einsum("nthd,nshd->nhts", query, heads)
        scores = scores.masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -torch.inf)
        expected = torch.einsum("nhts,nshd->nthd", scores.softmax(-1), heads)
        expected_grads = torch.autograd.grad(expected.square().sum(), [query, keys])
    try:
        output, log_sum = _attend(q, k, k, causal=True, scaling=1.0)
        grad_q, grad_k, grad_v = _attend_backward(
            [2 * output, q, output, log_sum], k, k, causal=True, scaling=1.0
        )
    except UNAVAILABLE:
        return False
    computed, correct = (output, grad_q, grad_k + grad_v), (expected, *expected_grads)
    return all(map(torch.allclose, computed, correct))
