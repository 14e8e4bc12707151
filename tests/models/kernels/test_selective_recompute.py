from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

from litgrpo.models.kernels.selective_recompute import (
    _Gated,
    _KeptTensor,
    _multiply_gate,
    _Norm,
    _SavedTensors,
    find_recomputed_modules,
    recompute_in_backward,
)
from litgrpo.models.loading.load import LoRA, Precision, build_policy
from litgrpo.types import TokenRows
from tests.support.fused_decode import model_of
from tests.support.models import byte_tokenizer, tiny_model

KINDS = ["tied", "biases", "window", "head norms", "gemma"]
IDS = torch.arange(1, 41).view(2, 20)


def gradient(model, ids=IDS, bf16=False, own=False):
    """Hidden states of a forward pass, and the gradient of all weights."""
    model.zero_grad()
    within = recompute_in_backward(find_recomputed_modules(model)) if own else nullcontext()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16), within:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    hidden.float().pow(3).sum().backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return hidden.detach(), torch.cat(grads)


def off(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("variant", KINDS)
def test_forward_values_are_bitwise_equal_to_the_librarys_and_gradients_agree(variant):
    model = model_of(variant)
    expected, grads = gradient(model)
    found, ours = gradient(model, own=True)
    assert torch.equal(found, expected)
    assert off(ours, grads) < 2e-6


@pytest.mark.parametrize("variant", KINDS)
def test_under_autocast_gradients_are_as_near_to_those_of_float32_as_the_librarys(variant):
    model = model_of(variant)
    (hidden, exact), (librarys, theirs) = gradient(model), gradient(model, bf16=True)
    found, ours = gradient(model, bf16=True, own=True)
    assert torch.equal(found, librarys)
    assert not torch.equal(found, hidden)
    assert off(ours, exact) < 1.25 * off(theirs, exact)


@pytest.mark.parametrize("variant", ["tied", "gemma"])
def test_weights_in_bfloat16_round_where_the_library_rounds(variant):
    model = model_of(variant).bfloat16()
    expected, theirs = gradient(model)
    found, ours = gradient(model, own=True)
    assert torch.equal(found, expected)
    assert ours.dtype == torch.bfloat16
    assert off(ours.float(), theirs.float()) < 0.03


def test_adapter_gradients_are_equal():
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    policy = build_policy(tiny_model("llama"), tokenizer, lora=LoRA(rank=2, dropout=0.0))
    for name, weight in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    _, grads = gradient(policy.bare_model)
    _, ours = gradient(policy.bare_model, own=True)
    assert off(ours, grads) < 2e-6


def saved_bytes(policy, rows):
    """Bytes that autograd saves in a forward pass, without weights, which their shapes show."""
    saved = {}  # tensors are held, or a storage's address would be given to another
    pack = _SavedTensors.pack  # of the hooks within, which torch asks in place of those below

    def save(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def pack_and_save(self, tensor):
        packed = pack(self, tensor)
        if isinstance(packed, _KeptTensor):
            save(tensor)
        return packed

    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    with patch.object(_SavedTensors, "pack", pack_and_save), hooks:
        policy.hidden(rows)
    weights = {shape for p in policy.parameters() for shape in (p.shape, p.shape[::-1])}
    activations = [tensor for tensor in saved.values() if tensor.shape not in weights]
    return sum(tensor.untyped_storage().nbytes() for tensor in activations)


@pytest.mark.parametrize("bf16", [False, True])
def test_saved_activations_are_two_fifths_smaller(bf16):
    sizes = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=4, vocab_size=259)
    policy = build_policy(tiny_model("llama", **sizes), byte_tokenizer())
    # 640 tokens: no width of the model, so that weights can be told by their shapes.
    prompts, completions = torch.randint(5, 250, (2, 64)), torch.randint(5, 250, (8, 64))
    masks = prompts.bool(), completions.bool()
    prompt_of = torch.arange(2).repeat_interleave(4)
    rows = TokenRows(prompts, masks[0], prompt_of, completions, masks[1])
    amount = {}
    for policy.selective_recompute in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            amount[policy.selective_recompute] = saved_bytes(policy, rows)
    assert amount[True] < 0.6 * amount[False]


def test_a_pass_leaves_the_model_as_it_was_even_if_it_fails():
    model = tiny_model("llama")
    before = gradient(model)
    with (
        pytest.raises(RuntimeError, match="stop"),
        recompute_in_backward(find_recomputed_modules(model)),
    ):
        raise RuntimeError("stop")
    assert all("forward" not in vars(module) for module in model.modules())
    after = gradient(model)
    assert all(map(torch.equal, before, after))


def test_a_tensor_that_was_changed_after_it_was_announced_is_kept():
    saved, output = _SavedTensors(), torch.ones(3)
    saved.register(output, lambda: torch.ones(3))
    assert torch.equal(saved.unpack(saved.pack(output)), torch.ones(3))
    output.mul_(2)
    assert saved.unpack(saved.pack(output)).tolist() == [2, 2, 2]


def test_two_forward_passes_before_the_backward_passes():
    model = tiny_model("llama")
    other = IDS + 7
    _, first = gradient(model, own=True)
    _, second = gradient(model, other, own=True)
    model.zero_grad()
    losses = []
    for ids in (IDS, other):
        with recompute_in_backward(find_recomputed_modules(model)):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        losses.append(hidden.pow(3).sum())
    sum(losses).backward()
    both = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert off(both, first + second) < 1e-6


def test_weights_changed_before_the_backward_pass_raise():
    model = tiny_model("llama")
    with recompute_in_backward(find_recomputed_modules(model)):
        hidden = model.base_model(input_ids=IDS, use_cache=False).last_hidden_state
    with torch.no_grad():
        model.base_model.layers[0].input_layernorm.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.sum().backward()


@pytest.mark.parametrize("gemma", [False, True])
def test_the_norms_derivative_is_that_of_differences(gemma):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, dtype=torch.double), torch.randn(5, dtype=torch.double)
    tensors = x.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: _Norm.apply(x, w, 1e-3, gemma, None)[0], tensors)


@pytest.mark.parametrize("variant", ["tied", "gemma"])
def test_the_products_derivative_is_that_of_differences(variant):
    act = model_of(variant).base_model.layers[0].mlp.act_fn
    torch.manual_seed(0)
    gate, up = torch.randn(2, 3, 4, dtype=torch.double)
    tensors = gate.requires_grad_(), up.requires_grad_()
    assert torch.equal(_Gated.apply(*tensors, act), _multiply_gate(*map(torch.clone, tensors), act))
    assert torch.autograd.gradcheck(lambda g, u: _Gated.apply(g, u, act), tensors)


def test_a_replaced_forward_method_is_kept():
    model = tiny_model("llama")
    norm = model.base_model.layers[0].input_layernorm
    own = norm.forward = lambda x: 2 * x
    assert find_recomputed_modules(model) is None
    policy = build_policy(model, byte_tokenizer())
    mask = torch.ones_like(IDS, dtype=torch.bool)
    policy.target_hidden_states(IDS, mask, mask).sum().backward()
    assert norm.forward is own


def test_unknown_modules_keep_the_librarys_forward():
    assert find_recomputed_modules(tiny_model("gpt2")) is None
    assert find_recomputed_modules(tiny_model("llama").double()) is None
    relu = tiny_model("llama", hidden_act="relu")
    assert find_recomputed_modules(relu) is None
    other = tiny_model("llama")
    norm = other.base_model.layers[0].input_layernorm
    type(norm).forward, kept = (lambda self, x: 2 * x), type(norm).forward
    try:
        assert find_recomputed_modules(other) is None
    finally:
        type(norm).forward = kept


@pytest.mark.parametrize("checkpointing", [False, True])
def test_policies_use_it_unless_activations_are_checkpointed(checkpointing):
    precision = Precision(gradient_checkpointing=checkpointing)
    policy = build_policy(tiny_model("llama"), byte_tokenizer(), precision=precision)
    mlp = policy.bare_model.base_model.layers[0].mlp
    seen = []
    mlp.down_proj.register_forward_hook(lambda *_: seen.append("forward" in vars(mlp)))
    mask = torch.ones_like(IDS, dtype=torch.bool)
    policy.target_hidden_states(IDS, mask, mask)  # tries the model once
    seen.clear()
    for targets in (mask, mask & (IDS > 30)):  # plain rows, packed ones
        policy.target_hidden_states(IDS, mask, targets).sum().backward()
    assert set(seen) == {not checkpointing}
    seen.clear()
    with torch.no_grad():
        policy.target_hidden_states(IDS, mask, mask)
    assert seen == [False]
