"""Every private operator of torch exists in this version, and computes what litgrpo expects."""

import pytest
import torch
from torch import nn

from litgrpo.models.kernels import torch_compat as compat

onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@onednn
def test_onednn_linear_is_a_linear_layer_with_packed_and_plain_weights():
    x, weight, bias = torch.randn(5, 3), torch.randn(4, 3), torch.randn(4)
    expected = nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(compat.onednn_linear(x, weight, bias), expected)
    packed = compat.pack_onednn_weight(weight)
    torch.testing.assert_close(compat.onednn_linear(x, packed, bias), expected)


def test_flash_attention_returns_output_and_log_sum_exp():
    query, keys, values = torch.randn(3, 1, 2, 4, 8)  # [n, heads, t, D]
    query.requires_grad_()
    scores = (query @ keys.mT * 0.5).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    output, log_sum = compat.flash_attention(query.detach(), keys, values, causal=True, scaling=0.5)
    torch.testing.assert_close(output, (scores.softmax(-1) @ values).detach())
    torch.testing.assert_close(log_sum, scores.logsumexp(-1).detach())
    grad = torch.randn_like(output)
    (expected,) = torch.autograd.grad(scores.softmax(-1) @ values, query, grad)
    tensors = (grad, query.detach(), keys, values, output, log_sum)
    found, *_ = compat.flash_attention_backward(*tensors, causal=True, scaling=0.5)
    torch.testing.assert_close(found, expected)


def test_forward_hooks_are_found():
    module = nn.Linear(2, 2)
    assert not compat.has_forward_hooks(module)
    handle = module.register_forward_pre_hook(lambda *_: None)
    assert compat.has_forward_hooks(module)
    handle.remove()
    module.register_forward_hook(lambda *_: None)
    assert compat.has_forward_hooks(module)


def test_a_module_without_the_private_lists_counts_as_having_hooks():
    assert compat.has_forward_hooks(object())
