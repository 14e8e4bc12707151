"""Uses of torch's private operators and attributes by `litgrpo.models`.

They are kernels that have no public name. Callers try them once on a small example
(`linear.onednn_works`, `packed_attention.has_flash_kernel_for`) and use public operators if that
fails, so a torch version without them is slower and not broken.
`tests/models/kernels/test_torch_compat.py` checks that the tested versions have all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

TESTED_VERSIONS = "2.9 to 2.13"
# What torch raises if an operator does not exist, or has other parameters in this version.
UNAVAILABLE = (AttributeError, RuntimeError, TypeError)


def pack_onednn_weight(weight: Tensor) -> Tensor:
    """Copy a weight [out, in] into oneDNN's own layout.

    `torch.compile` packs weights by the same operator (inductor's freezing); eager mode has no
    public function for it.
    """
    # The second argument is the expected number of rows, a hint. Any number but 1 selects the
    # layout that serves every number of rows.
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    return packed


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows [..., in] by a weight [out, in], packed or not, in oneDNN.

    `torch.nn.functional.linear` sends float32 to MKL on every CPU.
    """
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def flash_attention(
    query: Tensor, keys: Tensor, values: Tensor, *, causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Compute attention [n, heads, t, D] and the log-sum-exp [n, heads, t] of its scores on a CPU.

    The public `scaled_dot_product_attention` does not return the log-sum-exp, which merging the
    attention to a prompt with the attention to a completion needs.
    """
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, scale=scaling
    )
    return output, lse


def flash_attention_backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, keys and values; see `flash_attention`."""
    grads: tuple[Tensor, Tensor, Tensor] = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, keys, values, output, lse, 0.0, causal, scale=scaling
        )
    )
    return grads


def segment_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Compute attention [T, heads, D] of segments and the log-sum-exp [heads, T] of its scores.

    On a GPU, in half precision. The public `torch.nn.attention.varlen.varlen_attn` exists in fewer
    versions; its gradient is for one set of keys, not for a union of two sets. `bounds` are int32
    [n + 1], of the segments of queries and of keys.
    """
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, keys, values, *bounds, *longest, 0.0, causal, False, scale=scaling
    )
    return output, lse


def segment_attention_backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    lse: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, keys and values; see `segment_attention`."""
    # The state of random numbers is for dropout, which is 0.
    unused = torch.empty(2, dtype=torch.uint64, device=query.device)
    tensors = (grad, query, keys, values, output, lse, *bounds)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *tensors, *longest, 0.0, causal, unused, unused, scale=scaling
    )
    return grads


def has_forward_hooks(module: nn.Module) -> bool:
    """Check if a module's forward pass calls hooks, which computing it elsewhere would skip.

    Torch registers hooks by public functions and lists them in private attributes only. A version
    without these attributes counts as having hooks: the library's own forward pass is used.
    """
    try:
        return bool(module._forward_hooks or module._forward_pre_hooks)
    except AttributeError:
        return True
