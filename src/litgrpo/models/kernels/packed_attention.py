"""Attention of a packed sequence, in which each prompt exists once.

Transformers' model code runs unchanged: an attention function registered as `PACKED` receives the
`Packing`. On a CPU it uses torch's flash kernel and copies no prompt. A suffix token attends to two
sets of keys: those of its prefix and its suffix. Each set is one call of the kernel, which also
returns the log-sum-exp (lse) of the set's scores:

    output = w * suffix + (1 - w) * prefix,   w = sigmoid(lse_suffix - lse_prefix)

All suffixes of a prompt are the queries of one call. In the backward pass the kernel computes each
set's part of the gradient from the output and the log-sum-exp of the union, because probabilities
are exp(score - lse) for every subset of the keys. The kernel has no public name (`torch_compat`),
so it is tried once. On a GPU torch's flash kernel of segments takes each set of all prompts in one
call, in half precision: every row's own keys, and the prompts of all suffixes. Soft-caps, short
windows and other devices and dtypes use public operators on padded grids.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from litgrpo.models.kernels.torch_compat import (
    UNAVAILABLE,
    flash_attention,
    flash_attention_backward,
    segment_attention,
    segment_attention_backward,
)
from litgrpo.models.packing import KeySets, Packing, Segments
from litgrpo.tensors import apply_softcap, widen, within
from litgrpo.types import TokenRows

PACKED = "litgrpo_packed_shared_prefix"
# What torch's flash kernel of segments can compute.
HALF, HEAD_SIZE_STEP, MAX_HEAD_SIZE = (torch.bfloat16, torch.float16), 8, 256


# --- entry point and public operators ---


def attend_packed(
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
    """Compute attention [1, T, heads, D] of every token to its prompt and its row's earlier tokens.

    `packing` knows which token attends to which; `attention_mask` is unused.
    """
    assert not dropout, "rows with dropout in attention do not share a prompt"
    q, k, v = (x[0].transpose(0, 1) for x in (query, keys, values))  # [T, heads or H, D]
    if sliding_window is not None and packing.longest <= sliding_window:
        sliding_window = None
    if softcap is None and sliding_window is None:
        if has_flash_kernel_for(query):
            return attend_packed_flash(q, k, v, packing, scaling)[None], None
        dtype = matmul_dtype(query)
        if packing.key_sets is not None and has_segment_kernel_for(query, dtype):
            q, k, v = (x.to(dtype) for x in (q, k, v))
            return attend_segments(q, k, v, packing.key_sets, scaling)[None], None
    return _attend_grid(q, k, v, packing, scaling, sliding_window, softcap)[None], None


def _attend_grid(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    packing: Packing,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Compute [T, heads, D] by public operators: each row of a bucket with a copy of its prompt."""
    prompts, prompt_keys, prompt_values = (
        packing.prefixes.to_grid(x).transpose(1, 2) for x in (query, keys, values)
    )
    if window not in packing.visible:
        packing.visible[window] = _make_masks(packing, window)
    visible, *bucket_masks = packing.visible[window]
    attended = _attend_masked(prompts, prompt_keys, prompt_values, visible, scaling, softcap)
    # Under autocast `attended` has a lower dtype than the query, and CUDA's index_copy needs one.
    output = attended.new_zeros(query.shape).index_copy(
        0, packing.prefixes.tokens, packing.prefixes.from_grid(attended.transpose(1, 2))
    )
    for bucket, visible in zip(packing.suffixes, bucket_masks, strict=True):
        suffixes, suffix_keys, suffix_values = (  # [n, heads or H, t, D]
            bucket.to_grid(x).transpose(1, 2) for x in (query, keys, values)
        )
        attended = _attend_masked(
            suffixes,
            torch.cat([prompt_keys.index_select(0, bucket.prompts), suffix_keys], 2),
            torch.cat([prompt_values.index_select(0, bucket.prompts), suffix_values], 2),
            visible,
            scaling,
            softcap,
        )
        output = output.index_copy(0, bucket.tokens, bucket.from_grid(attended.transpose(1, 2)))
    return output


def _make_masks(packing: Packing, window: int | None) -> list[Tensor]:
    """Return the masks of the grids: [1, 1, P, P] of the prefixes, [n, 1, t, P + t] of a bucket."""
    device = packing.ids.device
    column = torch.arange(packing.prefixes.shape[1], device=device)
    masks = [within(column[:, None] - column, window)[None, None]]
    for bucket in packing.suffixes:
        lengths = packing.prefixes.lengths.index_select(0, bucket.prompts)[:, None, None]
        step = torch.arange(bucket.shape[1], device=device)[:, None]
        # Prompts are padded on the right in this grid, so columns beyond the prompt are hidden.
        prompt_mask = (column < lengths) & within(lengths + step - column, window)  # [n, t, P]
        suffix_mask = within(step - step.T, window).expand(len(lengths), -1, -1)  # [n, t, t]
        masks.append(torch.cat([prompt_mask, suffix_mask], 2)[:, None])
    return masks


def _attend_masked(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Compute [n, heads, t, D] of queries over keys [n, H, s, D] if visible [n, 1, t, s]."""
    n, heads, length, size = query.shape
    kv_heads = keys.shape[1]
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=visible, scale=scaling, enable_gqa=heads != kv_heads
        )
    # Query heads that share a kv head become rows of one product (grouped-query attention).
    query_rows = query.reshape(n, kv_heads, -1, size) * scaling  # [n, H, r * t, D]
    scores = apply_softcap(query_rows @ keys.transpose(2, 3) / softcap, softcap)
    scores = scores.unflatten(2, (heads // kv_heads, length))
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    output = weights.to(values.dtype).flatten(2, 3) @ values
    return output.view(n, heads, length, size)


# --- flash kernel ---


def has_flash_kernel_for(query: Tensor) -> bool:
    """Check that the kernel can compute tensors like these."""
    return query.device.type == "cpu" and _kernel_works()


def attend_packed_flash(
    query: Tensor, keys: Tensor, values: Tensor, packing: Packing, scaling: float
) -> Tensor:
    """Compute `attend_packed` [T, heads, D] by the flash kernel of CPUs."""
    output: Tensor = _PackedAttention.apply(query, keys, values, packing, scaling)
    return output


class _PackedAttention(torch.autograd.Function):
    """Forward and backward pass of `attend_packed_flash`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, packing: Packing, scaling: float
    ) -> Tensor:
        # The kernel's backward pass is several times slower in bfloat16.
        q, k, v = (widen(x) for x in (query, keys, values))
        output, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2])
        output[packing.num_tokens :] = 0
        for prefix_start, suffix_start, suffix_end in packing.groups:
            prefix = slice(prefix_start, suffix_start)
            suffixes = slice(suffix_start, suffix_end)
            prefix_keys = k[None, prefix], v[None, prefix]
            output[prefix], lse[prefix] = _attend(
                q[None, prefix], *prefix_keys, causal=True, scaling=scaling
            )
            if suffix_end > suffix_start:
                output[suffixes], lse[suffixes] = _attend(
                    q[None, suffixes], *prefix_keys, causal=False, scaling=scaling
                )
        for bucket in packing.suffixes:
            grids = (bucket.to_grid(x) for x in (q, k, v))
            attended = _attend(*grids, causal=True, scaling=scaling)
            suffix_output, suffix_lse = map(bucket.from_grid, attended)
            prefix_output, prefix_lse = output[bucket.tokens], lse[bucket.tokens]
            # e^a / (e^a + e^b) = sigmoid(a - b)
            weight = torch.sigmoid(suffix_lse - prefix_lse).unsqueeze(-1)
            output[bucket.tokens] = torch.lerp(prefix_output, suffix_output, weight)
            lse[bucket.tokens] = torch.logaddexp(suffix_lse, prefix_lse)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, keys, values, output, lse)
        ctx.packing, ctx.scaling = packing, scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, output, lse = ctx.saved_tensors
        packing, scaling = ctx.packing, ctx.scaling
        g, q, k, v, out = (widen(x) for x in (grad, query, keys, values, output))
        grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
        for gradient in (grad_q, grad_k, grad_v):
            gradient[packing.num_tokens :] = 0

        for prefix_start, suffix_start, suffix_end in packing.groups:
            prefix = slice(prefix_start, suffix_start)
            suffixes = slice(suffix_start, suffix_end)
            prefix_keys = k[None, prefix], v[None, prefix]
            prefix_queries = [x[None, prefix] for x in (g, q, out, lse)]
            grad_q[prefix], grad_k[prefix], grad_v[prefix] = _attend_backward(
                prefix_queries, *prefix_keys, causal=True, scaling=scaling
            )
            if suffix_end > suffix_start:
                suffix_queries = [x[None, suffixes] for x in (g, q, out, lse)]
                grad_q[suffixes], prefix_k, prefix_v = _attend_backward(
                    suffix_queries, *prefix_keys, causal=False, scaling=scaling
                )
                grad_k[prefix] += prefix_k[0]
                grad_v[prefix] += prefix_v[0]
        for bucket in packing.suffixes:
            # On padding everything is 0, the log-sum-exp too, and so is the gradient.
            queries = [bucket.to_grid(x) for x in (g, q, out, lse)]
            grids = _attend_backward(
                queries, bucket.to_grid(k), bucket.to_grid(v), causal=True, scaling=scaling
            )
            bucket_q, bucket_k, bucket_v = map(bucket.from_grid, grids)
            grad_q.index_add_(0, bucket.tokens, bucket_q)
            grad_k.index_copy_(0, bucket.tokens, bucket_k)
            grad_v.index_copy_(0, bucket.tokens, bucket_v)
        return grad_q.to(query.dtype), grad_k.to(keys.dtype), grad_v.to(values.dtype), None, None


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, *, causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return output [n, t, heads, D] and log-sum-exp [n, t, heads] over keys [n, s, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (query, keys, values))
    output, lse = flash_attention(q, k, v, causal=causal, scaling=scaling)
    return output.transpose(1, 2), lse.transpose(1, 2)


def _attend_backward(
    queries: list[Tensor], keys: Tensor, values: Tensor, *, causal: bool, scaling: float
) -> list[Tensor]:
    """Return the part of the gradients of query, keys and values that comes from one set of keys.

    `queries` are the gradient of the output, query, output [n, t, heads, D] and log-sum-exp
    [n, t, heads], the latter two of the union of the sets.
    """
    grad, query, output, lse = queries
    tensors = (x.transpose(1, 2) for x in (grad, query, keys, values, output, lse))
    grads = flash_attention_backward(*tensors, causal=causal, scaling=scaling)
    return [x.transpose(1, 2) for x in grads]


# --- flash kernel of segments, on GPUs ---


def matmul_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor's matrix products: autocast's, if it is enabled."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def has_segment_kernel_for(query: Tensor, dtype: torch.dtype) -> bool:
    """Check that the kernel of segments can compute tensors like these in a dtype."""
    head_size = query.shape[-1]
    is_supported = dtype in HALF and head_size % HEAD_SIZE_STEP == 0 and head_size <= MAX_HEAD_SIZE
    return is_supported and _segment_kernel_works(query.device, dtype)


def attend_segments(
    query: Tensor, keys: Tensor, values: Tensor, sets: KeySets, scaling: float
) -> Tensor:
    """Compute [T, heads, D]; see `attend_packed_flash`. The padding attends to itself."""
    output: Tensor = _SegmentAttention.apply(query, keys, values, sets, scaling)
    return output


class _SegmentAttention(torch.autograd.Function):
    """Forward and backward pass of `attend_segments`; the algebra is that of the module."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, sets: KeySets, scaling: float
    ) -> Tensor:
        rows = _pair(sets.rows, sets.rows)
        output, lse = segment_attention(query, keys, values, *rows, causal=True, scaling=scaling)
        suffix_tokens, prefix_tokens = sets.suffix_tokens, sets.prefix_tokens
        if len(suffix_tokens):
            prefix, prefix_lse = segment_attention(
                query.index_select(0, suffix_tokens),
                keys.index_select(0, prefix_tokens),
                values.index_select(0, prefix_tokens),
                *_pair(sets.suffixes, sets.prefixes),
                causal=False,
                scaling=scaling,
            )
            suffix, suffix_lse = (
                output.index_select(0, suffix_tokens),
                lse.index_select(1, suffix_tokens),
            )
            weight = torch.sigmoid(suffix_lse - prefix_lse).t().unsqueeze(-1)
            union = torch.lerp(prefix.float(), suffix.float(), weight)
            output.index_copy_(0, suffix_tokens, union.to(output.dtype))
            lse.index_copy_(1, suffix_tokens, torch.logaddexp(suffix_lse, prefix_lse))
        ctx.save_for_backward(query, keys, values, output, lse)
        ctx.sets, ctx.scaling = sets, scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, output, lse = ctx.saved_tensors
        sets, scaling = ctx.sets, ctx.scaling
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = segment_attention_backward(
            grad,
            query,
            keys,
            values,
            output,
            lse,
            *_pair(sets.rows, sets.rows),
            causal=True,
            scaling=scaling,
        )
        suffix_tokens, prefix_tokens = sets.suffix_tokens, sets.prefix_tokens
        if len(suffix_tokens):
            suffixes_q, prefixes_k, prefixes_v = segment_attention_backward(
                grad.index_select(0, suffix_tokens),
                query.index_select(0, suffix_tokens),
                keys.index_select(0, prefix_tokens),
                values.index_select(0, prefix_tokens),
                output.index_select(0, suffix_tokens),
                lse.index_select(1, suffix_tokens),
                *_pair(sets.suffixes, sets.prefixes),
                causal=False,
                scaling=scaling,
            )
            grad_q.index_add_(0, suffix_tokens, suffixes_q)
            grad_k.index_add_(0, prefix_tokens, prefixes_k)
            grad_v.index_add_(0, prefix_tokens, prefixes_v)
        return grad_q, grad_k, grad_v, None, None


def _pair(queries: Segments, keys: Segments) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    return (queries.bounds, keys.bounds), (queries.longest, keys.longest)


@cache
def _segment_kernel_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Compare the kernel with public operators on two completions of a prompt."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    no_autocast = torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), no_autocast, hooks:
        ids = torch.ones(2, 3, dtype=torch.long, device=device)
        prompt_of = torch.zeros(2, dtype=torch.long, device=device)
        packing = Packing.of_groups(TokenRows(ids[:1], ids[:1] > 0, prompt_of, ids, ids > 0))
        length, num_tokens = len(packing.ids), packing.num_tokens
        numbers = torch.arange(length * 32.0, device=device).view(length, 4, 8)
        q = numbers.mul(0.7).sin().to(dtype).requires_grad_()  # 4 heads
        k = numbers[:, :2].mul(0.3).cos().to(dtype).requires_grad_()  # 2 key heads
        assert packing.key_sets is not None
        try:
            computed = [attend_segments(q, k, k, packing.key_sets, 1.0)[:num_tokens]]
            computed += torch.autograd.grad(computed[0].float().square().sum(), [q, k])
        except UNAVAILABLE:
            return False
        expected = [_attend_grid(q, k, k, packing, 1.0, None, None)[:num_tokens]]
        expected += torch.autograd.grad(expected[0].float().square().sum(), [q, k])
    return all(
        torch.allclose(*pair, atol=0.05, rtol=0.05) for pair in zip(computed, expected, strict=True)
    )


# --- checks of the flash kernel of CPUs ---


@cache
def _kernel_works() -> bool:
    """Check that torch has the kernel, and that it supports grouped-query attention."""
    # The first call may come from anywhere: under autocast, without gradients, or in a checkpointed
    # layer, which would count the tensors saved here and miss them in its recomputation.
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), hooks:
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
        output, lse = _attend(q, k, k, causal=True, scaling=1.0)
        grad_q, grad_k, grad_v = _attend_backward(
            [2 * output, q, output, lse], k, k, causal=True, scaling=1.0
        )
    except UNAVAILABLE:
        return False
    computed, correct = (output, grad_q, grad_k + grad_v), (expected, *expected_grads)
    return all(map(torch.allclose, computed, correct))
