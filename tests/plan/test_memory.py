"""Counted memory, compared with real tensors, a real cache and public parameter counts."""

from weakref import finalize

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig

from litgrpo.models.loading.load import LoRA, add_adapters
from litgrpo.plan.memory import (
    IterationSizes,
    MemoryItem,
    MetaModel,
    SavedActivations,
    cache_bytes,
    count_memory,
    optimizer_bytes,
    peak_bytes,
    step_optimizer,
)
from litgrpo.plan.sharding import XLASharding
from litgrpo.plan.sizes import load_config
from tests.support.models import prompt_batch, tiny_model, tiny_policy

DECODERS = ["gemma2", "qwen2", "llama", "gpt2"]


def test_checkpointing_keeps_the_inputs_of_layers_and_recomputes_one_layer():
    saved = SavedActivations(outside=10, layers=(100, 100), layer_input=5)
    assert (saved.size(checkpointing=False), saved.size(checkpointing=True)) == (310, 220)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("google/gemma-2-2b", 2_614_341_888),
        ("google/gemma-2-2b-it", 2_614_341_888),
        ("google/gemma-2-9b", 9_241_705_984),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
    ],
)
def test_parameter_counts_match_the_published_ones(name, number):
    assert sum(weight.numel() for weight in MetaModel(load_config(name)).weights) == number


def test_weights_and_optimizer_state_match_real_tensors():
    policy = tiny_policy("gemma2")
    optimizer = torch.optim.AdamW(policy.parameters())
    for weight in policy.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    states = [
        s for saved_activations in optimizer.state.values() for s in saved_activations.values()
    ]
    real = sum(s.nbytes for s in states)

    meta_model = MetaModel(policy.model.config)
    counted = step_optimizer(torch.optim.AdamW, meta_model.trained)
    assert optimizer_bytes(counted, meta_model.trained, XLASharding(1)) == real
    assert XLASharding(1).share(meta_model.weights) == sum(p.nbytes for p in policy.parameters())


@pytest.mark.parametrize(
    ("optimizer", "copies"), [(torch.optim.SGD, 0), (torch.optim.RMSprop, 1), (torch.optim.Adam, 2)]
)
def test_the_state_of_each_optimizer_is_counted(optimizer, copies):
    weights = MetaModel(load_config("google/gemma-2-2b")).trained
    share = optimizer_bytes(step_optimizer(optimizer, weights), weights, XLASharding(8))
    assert share == pytest.approx(copies * 4 * 2_614_341_888 / 8, rel=1e-3)


def test_an_optimizer_that_reads_values_counts_as_adam():
    meta_model = MetaModel(tiny_model("llama").config)
    states = step_optimizer(torch.optim.Adafactor, meta_model.trained)
    assert states is None
    weights = sum(4 * weight.numel() for weight in meta_model.trained)
    assert optimizer_bytes(states, meta_model.trained, XLASharding(1)) == 2 * weights


def test_an_unsupported_optimizer_is_an_error():
    with pytest.raises(ValueError, match="optimizer"):
        step_optimizer(torch.optim.Muon, MetaModel(tiny_model("llama").config).trained)


@pytest.mark.parametrize("architecture", DECODERS)
def test_the_kv_cache_matches_that_of_the_local_engine(architecture):
    policy, prompts = tiny_policy(architecture), prompt_batch("What is 3+4?", "and 5?", length=12)
    group, length = 3, 5
    _, state = policy.prefill(prompts.prompt_ids, prompts.prompt_mask, group, length)
    once = sum(t.nbytes for t in (*state.prompt_keys, *state.prompt_values))
    own = sum(t.nbytes for t in (*state.keys, *state.values))

    work = IterationSizes(((2, group),), prompts.prompt_ids.shape[1], length, 1, 1)
    assert cache_bytes(MetaModel(policy.model.config), work, XLASharding(1)) == (once, 2 * own)
    assert cache_bytes(MetaModel(policy.model.config), work, XLASharding(2)) == (once // 2, own)


def test_only_adapters_are_trained_with_lora():
    config = tiny_model("llama").config
    meta_model = MetaModel(config, adapt=lambda model: add_adapters(model, LoRA(rank=2)))
    real = add_adapters(tiny_model("llama"), LoRA(rank=2))
    trained = sum(p.numel() for p in real.parameters() if p.requires_grad)
    assert sum(weight.numel() for weight in meta_model.trained) == trained
    assert len(meta_model.weights) == len(list(real.parameters()))


class Peak(TorchDispatchMode):
    """Most bytes of new tensors that lived at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return result

    def see(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ["gemma2", "llama"])
def test_activations_bound_those_of_a_real_backward_pass(architecture, checkpointing):
    sizes = dict(num_hidden_layers=6, hidden_size=32, vocab_size=259)
    model = tiny_model(architecture, **sizes).train()
    model.set_attn_implementation("eager")
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    weights = sum(weight.nbytes for weight in model.parameters())
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    ids = torch.ones(4, 48, dtype=torch.long)
    with Peak() as real:
        model.base_model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
    counted = MetaModel(model.config).count_activations(4, 48).size(checkpointing)
    assert real.most <= counted + weights  # of which gradients before they are added
    assert real.most >= 0.5 * counted


def test_the_peak_is_that_of_the_larger_phase():
    items = [
        MemoryItem("a", 5, "always", ""),
        MemoryItem("b", 3, "rollout", ""),
        MemoryItem("c", 4, "learning", ""),
    ]
    assert peak_bytes(items) == 9
    assert peak_bytes([*items, MemoryItem("d", 2, "rollout", "")]) == 10


def test_a_small_model_is_counted_by_hand():
    # One layer, E = V = 64, 4 heads of 16, F = 64: every matrix is [64, 64] but the norms [64].
    config = AutoConfig.for_model(
        "llama",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    meta_model = MetaModel(config)
    work = IterationSizes(((4, 2),), prompt_len=8, completion_len=8, micro_rows=4, length=16)
    states = step_optimizer(torch.optim.AdamW, meta_model.trained)
    items = count_memory(
        meta_model,
        work,
        XLASharding(4),
        states=states,
        reference=MetaModel(config),
        checkpointing=False,
    )
    sizes = {(item.name, item.phase): item.size for item in items}
    matrices, norms = 8, 3  # embedding, q, k, v, o, gate, up, down; two of the layer, the last
    share = 4 * (matrices * 64 * 64 // 4 + norms * 64)  # small ones stay whole
    assert sizes["weights", "always"] == sizes["reference", "always"] == share
    assert sizes["gradients", "learning"] == share
    assert sizes["optimizer", "always"] == 2 * share + 4 * (matrices + norms)  # and a step each
    assert sizes["cache, prompts", "rollout"] == 4 * (1 * 8) * (2 * 64)
    assert sizes["cache, completions", "rollout"] == 2 * 4 * (2 * 8) * (2 * 64)
    assert sizes["gathered", "rollout"] == 4 * 64 * 64
    assert sizes["gathered", "learning"] == 2 * 4 * 64 * 64
    assert sizes["head", "learning"] == 4 * (4 * 8) * 64 * 4


def test_a_lower_precision_computes_with_smaller_activations():
    config = tiny_model("gemma2").config
    whole, half = (
        MetaModel(config, t).count_activations(2, 16) for t in (torch.float32, torch.bfloat16)
    )
    assert half.size(False) < whole.size(False)
    assert 2 * half.layer_input == whole.layer_input
