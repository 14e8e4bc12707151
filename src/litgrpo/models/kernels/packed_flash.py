"""Attention of a packed sequence in the processor's fused kernel, without copying a prompt.

A suffix's token attends to two sets of keys: its prompt's and its own row's. Each set is one call
of the kernel, which also gives the logarithm of the sum of the set's exponentials; from these two
numbers the softmax over the union follows exactly. All suffixes of a prompt are the queries of one
call. Backward, the kernel computes a set's share of the gradient from the output and the log-sum
of the union: probabilities are exp(score - log-sum), whatever set the log-sum is over.

The kernel is not part of torch's public interface. It is tried once, in both directions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from litgrpo.models.packing import Packing
from litgrpo.tensors import widened


def works_for(query: Tensor) -> bool:
    """Whether the kernel is there for tensors like these."""
    return query.device.type == "cpu" and _kernel_works()


def packed_attention(
    query: Tensor, keys: Tensor, values: Tensor, packing: Packing, scaling: float
) -> Tensor:
    """Attention of every token to its row's earlier tokens and its prompt.

    Args:
        query: [T, heads, D].
        keys: [T, H, D].
        values: [T, H, D].
        packing: where rows and prompts stand.
        scaling: multiplies the scores.

    Returns:
        [T, heads, D].
    """
    output: Tensor = _PackedAttention.apply(query, keys, values, packing, scaling)
    return output


class _PackedAttention(torch.autograd.Function):
    """Both directions of `packed_attention`."""

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
                bucket.grid(q), bucket.grid(k), bucket.grid(v), causal=True, scaling=scaling
            )
            own, own_sum = bucket.ungrid(own), bucket.ungrid(own_sum)
            there, there_sum = output[bucket.tokens], log_sum[bucket.tokens]
            # e^a / (e^a + e^b) = sigmoid(a - b)
            share = torch.sigmoid(own_sum - there_sum).unsqueeze(-1)
            output[bucket.tokens] = torch.lerp(there, own, share)
            log_sum[bucket.tokens] = torch.logaddexp(own_sum, there_sum)
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
        of_q, of_k, of_v = (x.new_empty(x.shape) for x in (q, k, v))
        for each in (of_q, of_k, of_v):
            each[packing.num_tokens :] = 0

        for start, middle, end in packing.groups:
            prefix, suffixes = slice(start, middle), slice(middle, end)
            prefix_keys = k[None, prefix], v[None, prefix]
            of_prefix = [x[None, prefix] for x in (g, q, out, log_sum)]
            of_q[prefix], of_k[prefix], of_v[prefix] = _attend_backward(
                of_prefix, *prefix_keys, causal=True, scaling=scaling
            )
            if end > middle:
                of_suffixes = [x[None, suffixes] for x in (g, q, out, log_sum)]
                of_q[suffixes], more_k, more_v = _attend_backward(
                    of_suffixes, *prefix_keys, causal=False, scaling=scaling
                )
                of_k[prefix] += more_k[0]
                of_v[prefix] += more_v[0]
        for bucket in packing.suffixes:
            # On padding everything is 0, the log-sum too, and so is the gradient.
            of_bucket = [bucket.grid(x) for x in (g, q, out, log_sum)]
            shares = _attend_backward(
                of_bucket, bucket.grid(k), bucket.grid(v), causal=True, scaling=scaling
            )
            own_q, own_k, own_v = map(bucket.ungrid, shares)
            of_q.index_add_(0, bucket.tokens, own_q)
            of_k.index_copy_(0, bucket.tokens, own_k)
            of_v.index_copy_(0, bucket.tokens, own_v)
        return of_q.to(query.dtype), of_k.to(keys.dtype), of_v.to(values.dtype), None, None


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, *, causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Output [n, t, heads, D] and log-sum [n, t, heads] of one set of keys [n, s, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (query, keys, values))
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scaling
    )
    return output.transpose(1, 2), log_sum.transpose(1, 2)


def _attend_backward(
    queries: list[Tensor], keys: Tensor, values: Tensor, *, causal: bool, scaling: float
) -> list[Tensor]:
    """One set's share of the gradients of query, keys and values, shaped as they are.

    Args:
        queries: gradient of the output, query, output [n, t, heads, D] and log-sum [n, t, heads].
        keys: [n, s, H, D].
        values: [n, s, H, D].
        causal: whether a query sees only the keys up to its own place.
        scaling: multiplies the scores.
    """
    grad, query, output, log_sum = queries
    tensors = (grad, query, keys, values, output, log_sum)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(x.transpose(1, 2) for x in tensors), 0.0, causal, scale=scaling
    )
    return [x.transpose(1, 2) for x in grads]


@cache
def _kernel_works() -> bool:
    """Whether the kernel is in this torch, and knows query heads that share a key head."""
    # Asked for the first time anywhere: under autocast, without gradients, in a checkpointed layer,
    # which would count the tensors saved here and miss them when it is recomputed.
    own = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), own:
        return _kernel_agrees()


def _kernel_agrees() -> bool:
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
        of_q, of_k, of_v = _attend_backward(
            [2 * output, q, output, log_sum], k, k, causal=True, scaling=1.0
        )
    except (AttributeError, RuntimeError, TypeError):  # another torch
        return False
    got, right = (output, of_q, of_k + of_v), (expected, *expected_grads)
    return all(map(torch.allclose, got, right))
