import pytest
import torch

from litgrpo.models.decode.fused import FusedDecoder, is_supported
from litgrpo.models.kernels.linear import list_linear_layers
from litgrpo.models.loading.load import LoRA, Precision, build_policy
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from tests.support.fused_decode import VARIANTS, model_of
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy

TEXTS = ("a", "what is 3+4?", "hello")


def with_odd_norms(model):
    """Norms and biases that differ from 1 and 0, so that leaving one out is noticed."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.5 * torch.rand(parameter.shape, generator=generator)
    return model


def generate(policy, sampling=None, *, fused, length=12):
    prompts = prompt_batch(*TEXTS)
    uniforms = draw_uniforms(3, "train", 0, prompts.index, 2, length)
    engine = LocalEngine(fused_decode=fused)
    sampling = sampling or Sampling()
    return engine.generate(RolloutRequest(policy.eval(), prompts, 2, uniforms, sampling))


def assert_same(one, other, atol=1e-5):
    assert torch.equal(one.completion_ids, other.completion_ids)
    torch.testing.assert_close(one.sampler_logprobs, other.sampler_logprobs, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_decoding_equals_transformers(variant):
    policy = build_policy(with_odd_norms(model_of(variant)), byte_tokenizer())
    assert policy.can_fuse
    assert_same(generate(policy, fused=True), generate(policy, fused=False))


@pytest.mark.parametrize("kernels", ["plain", "onednn"])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_every_kernel_gives_the_same(architecture, kernels):
    policy = build_policy(
        with_odd_norms(tiny_model(architecture)),
        byte_tokenizer(),
        precision=Precision(linear_kernels=kernels),
    )
    assert_same(generate(policy, fused=True), generate(tiny_like(policy), fused=False))


def tiny_like(policy):
    plain = build_policy(
        policy.model, byte_tokenizer(), precision=Precision(linear_kernels="plain")
    )
    assert plain.linear_kernels.decode == "plain"
    return plain


def test_the_fused_decoder_runs_only_if_enabled(monkeypatch):
    policy, steps = tiny_policy("llama"), []
    assert policy.can_fuse
    own = FusedDecoder.decode_step
    monkeypatch.setattr(FusedDecoder, "decode_step", lambda *a: steps.append(1) or own(*a))
    generate(policy, fused=False)
    assert not steps
    generate(policy, fused=True)
    assert len(steps) == 11


def test_a_weight_that_is_no_plain_parameter_is_decoded_by_transformers():
    class Quantized(torch.nn.Parameter):
        pass

    model = tiny_model("llama")
    assert is_supported(model)
    projection = model.model.layers[0].mlp.down_proj
    projection.weight = Quantized(projection.weight.data)
    assert type(projection.weight) is Quantized
    assert not is_supported(model)


def test_a_fused_step_that_is_off_is_not_used(monkeypatch, caplog):
    step = FusedDecoder.decode_step

    def off(self, tokens, cache):
        return step(self, tokens, cache) + 0.01 * torch.arange(259)

    monkeypatch.setattr(FusedDecoder, "decode_step", off)
    policy = build_policy(tiny_model("llama"), byte_tokenizer())
    assert not policy.can_fuse
    assert "differs from transformers" in caplog.text


@torch.no_grad()
def test_the_fused_step_of_lower_precision_is_that_without_autocast():
    policy, prompts = tiny_policy("llama"), prompt_batch(*TEXTS)
    tokens = torch.tensor([5, 6, 7])
    found = []
    for dtype in (torch.bfloat16, None):
        with policy.decoding(3, dtype=dtype):
            first, second = (
                policy.prefill(prompts.prompt_ids, prompts.prompt_mask, 1, 4)[1] for _ in range(2)
            )
            found.append(policy.decode_step(tokens, first))
            with torch.autocast("cpu", enabled=False):
                own = policy._decoder.decode_step(tokens, second)
            torch.testing.assert_close(own, found[-1], rtol=0, atol=0)
    assert 1e-4 < (found[0] - found[1]).abs().max() < 0.5
    assert torch.equal(found[0], found[0].bfloat16().float())  # products are rounded
    assert not torch.equal(found[1], found[1].bfloat16().float())


def test_weights_are_packed_only_if_the_fused_step_has_no_copy_of_them():
    precision = Precision(linear_kernels="onednn")
    policy = build_policy(tiny_model("llama"), byte_tokenizer(), precision=precision)
    for fused in (True, False):
        with policy.decoding(2, fused=fused):
            packed = [layer.packed is not None for layer in list_linear_layers(policy.model)]
        assert set(packed) == {not fused}


def test_every_rollout_uses_the_current_weights():
    policy = tiny_policy("qwen2")
    before = generate(policy, fused=True)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.3)
    after = generate(policy, fused=True)
    assert not torch.equal(before.completion_ids, after.completion_ids)
    assert_same(after, generate(policy, fused=False))


@pytest.mark.filterwarnings("ignore:.*target_modules.*")
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "down_proj"]])
def test_adapters_are_added_to_the_weights(targets):
    lora = LoRA(rank=4, target_modules=targets)
    torch.manual_seed(0)  # of the adapters' first half
    policy = build_policy(tiny_model("llama"), byte_tokenizer(), lora=lora)
    plain = generate(policy, fused=True)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    assert policy.can_fuse
    adapted = generate(policy, fused=True)
    assert not torch.equal(plain.completion_ids, adapted.completion_ids)
    # Adapters as large as the weights, and these are rounded once more when both are added.
    assert_same(adapted, generate(policy, fused=False), atol=1e-4)


def test_low_precision_weights_give_transformers_logprobs_to_their_precision():
    model = tiny_model("llama").to(torch.bfloat16)
    policy = build_policy(model, byte_tokenizer())
    assert policy.can_fuse
    sure = Sampling(temperature=0.05)
    fused, plain = (generate(policy, sure, fused=each, length=2) for each in (True, False))
    assert torch.equal(fused.completion_ids[:, 0], plain.completion_ids[:, 0])


def test_float64_is_exact():
    policy = build_policy(tiny_model("qwen2").double(), byte_tokenizer())
    assert policy.can_fuse
    assert_same(generate(policy, fused=True), generate(policy, fused=False), atol=1e-6)


def test_unsupported_layouts_are_decoded_by_transformers():
    assert not is_supported(tiny_model("gpt2"))
    dynamic = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    assert not is_supported(tiny_model("llama", rope_parameters=dynamic))
    hooked = tiny_model("llama")
    assert is_supported(hooked)
    hooked.model.layers[1].register_forward_hook(lambda *_: None)
    assert not is_supported(hooked)
    replaced = tiny_model("llama")
    replaced.model.layers[0].mlp.up_proj = torch.nn.Sequential(torch.nn.Linear(32, 48))
    assert not is_supported(replaced)
    grown = tiny_model("qwen2")
    grown.model.layers[0].extra = torch.nn.Identity()
    assert not is_supported(grown)
    other_norm = tiny_model("qwen2")
    other_norm.model.norm = torch.nn.LayerNorm(32)
    assert not is_supported(other_norm)


def test_a_model_with_other_logits_is_decoded_by_transformers(monkeypatch, caplog):
    """A change inside a supported class: the comparison of logits detects it."""
    policy = tiny_policy("llama")
    kind = type(policy.model.model.layers[1].self_attn)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *a, **k: (own(*a, **k)[0] * 1.1, None))
    assert is_supported(policy.model)
    assert not policy.can_fuse
    assert "decoding without it" in caplog.text
    assert_same(generate(policy, fused=True), generate(policy, fused=False))


class Doubled(torch.nn.Module):
    """A parametrization: the weight that is used is twice the one that is stored."""

    def forward(self, weight):
        return 2 * weight


WRAPPED = {
    "embedding": lambda model: model.model.embed_tokens,
    "head": lambda model: model.lm_head,
    "last norm": lambda model: model.model.norm,
    "norm of a layer": lambda model: model.model.layers[1].input_layernorm,
    "query": lambda model: model.model.layers[0].self_attn.q_proj,
    "down": lambda model: model.model.layers[1].mlp.down_proj,
}


@pytest.mark.parametrize("when", ["at the start", "after a rollout"])
@pytest.mark.parametrize("name", WRAPPED)
def test_a_weight_that_is_computed_is_seen_whenever_it_is_wrapped(name, when):
    policy = tiny_policy("llama", tie_word_embeddings=False)
    if when == "after a rollout":
        assert policy.can_fuse
        generate(policy, fused=True)
    part = WRAPPED[name](policy.bare_model)
    torch.nn.utils.parametrize.register_parametrization(part, "weight", Doubled(), unsafe=True)
    assert not is_supported(policy.bare_model)
    assert_same(generate(policy, fused=True), generate(policy, fused=False), atol=0)


@pytest.mark.parametrize("name", WRAPPED)
def test_a_forward_method_that_is_replaced_is_seen(name):
    policy = tiny_policy("llama", tie_word_embeddings=False)
    assert policy.can_fuse
    part = WRAPPED[name](policy.bare_model)
    own = part.forward
    part.forward = lambda x: 2 * own(x)
    assert_same(generate(policy, fused=True), generate(policy, fused=False), atol=0)


ADAPTED = [
    {"target_modules": ["embed_tokens"]},
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
    {"target_modules": "all-linear", "use_rslora": True},
]


# Gemma scales embeddings and norms, Qwen adds biases.
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [*(("gemma2", settings) for settings in ADAPTED), ("llama", ADAPTED[6]), ("qwen2", ADAPTED[7])],
)
def test_trained_adapters_on_any_module_are_sampled_with(architecture, settings):
    model = tiny_model(architecture, tie_word_embeddings=False)
    policy = build_policy(model, byte_tokenizer(), lora=LoRA(rank=4, **settings))
    generate(policy, fused=True)  # the comparison with new adapters, which add 0
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    found = generate(policy, fused=True)
    assert_same(found, generate(policy, fused=False), atol=1e-3)
    true = policy.logprobs(found.tokens).logprobs
    torch.testing.assert_close(found.sampler_logprobs, true.detach(), atol=1e-3, rtol=1e-3)


def test_a_decoder_that_leaves_an_adapter_out_is_found_at_the_start(monkeypatch, caplog):
    from litgrpo.models.decode import fused as fused_decode

    lora = LoRA(rank=4, target_modules=["q_proj"])
    policy = build_policy(tiny_model("llama"), byte_tokenizer(), lora=lora)
    monkeypatch.setattr(
        fused_decode, "_merge_weight", lambda part: getattr(part, "base_layer", part).weight
    )
    before = [parameter.clone() for parameter in policy.parameters()]
    assert not policy.can_fuse
    assert "decoding without it" in caplog.text
    assert all(map(torch.equal, before, policy.parameters()))
