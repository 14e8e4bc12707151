"""Adapters train, start from folders, and load in plain peft with equal logits."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from litgrpo.models.loading.export import export, export_adapter
from litgrpo.models.loading.load import LoRA, Precision, build_policy, load_policy, load_reference
from litgrpo.models.reference import AdapterReference
from litgrpo.models.weights import find_model_class
from tests.models.table import small_config
from tests.support.adapters import perturb
from tests.support.causal import tokens
from tests.support.invariants import KL, fit, module
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model
from tests.support.raises import raises_for

peft = pytest.importorskip("peft")
KINDS = {
    "plain": LoRA(rank=4),
    "some layers": LoRA(rank=2, alpha=8, target_modules=["q_proj", "down_proj"]),
    "rslora": LoRA(rank=4, use_rslora=True),
    "dora": LoRA(rank=4, use_dora=True),
    "head": LoRA(rank=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "embedding": LoRA(rank=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
}


@pytest.fixture
def base(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def logits(model):
    with torch.no_grad():
        return model.eval()(prompt_batch("what is 3+4?").prompt_ids).logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_and_the_merged_model_give_equal_logits_elsewhere(base, tmp_path, kind):
    policy = perturb(load_policy(base, lora=KINDS[kind]))
    export_adapter(policy, tmp_path / "adapter")
    export(policy, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = logits(peft.PeftModel.from_pretrained(model, tmp_path / "adapter"))
    assert torch.equal(plain, logits(policy.model))
    assert not torch.allclose(plain, logits(load_policy(base).model), atol=1e-3)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "dora", "head", "embedding"])
def test_every_kind_trains_and_the_invariants_hold(base, kind):
    policy = perturb(load_policy(base, lora=KINDS[kind]), 0.05)
    grpo = module(policy=policy, objective=KL, lora=KINDS[kind])
    grpo.pretrained = base
    grpo.reference = load_reference(policy, None, base, Precision(), KINDS[kind])
    grpo.reference_path = "the base"  # which is not where this policy begins
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    fit(grpo)
    changed = {n for n, p in policy.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n, p in policy.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_folder_is_the_initial_policy_and_the_reference(base, tmp_path, kind):
    first = perturb(load_policy(base, lora=KINDS[kind]))
    export_adapter(first, tmp_path / "adapter")
    lora = LoRA(adapter_path=str(tmp_path / "adapter"))
    policy = load_policy(base, lora=lora)
    assert torch.equal(logits(policy.model), logits(first.model))
    reference = load_reference(policy, None, base, Precision(), lora)
    assert isinstance(reference, AdapterReference)
    rows = tokens(policy)
    start = policy.logprobs(rows).logprobs.detach()
    perturb(policy)
    assert not torch.allclose(policy.logprobs(rows).logprobs, start, atol=1e-2)
    torch.testing.assert_close(reference.logprobs(rows).logprobs, start)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in first.named_parameters() if p.requires_grad}
    export_adapter(policy, tmp_path / "second")
    export(policy, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(model, tmp_path / "second")
    assert torch.equal(logits(again), logits(policy.model))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), logits(again), atol=1e-4, rtol=1e-4)


def test_the_invariants_hold_if_training_starts_from_an_adapter(base, tmp_path):
    export_adapter(perturb(load_policy(base, lora=LoRA(rank=4)), 0.05), tmp_path / "adapter")
    lora = LoRA(adapter_path=str(tmp_path / "adapter"))
    grpo = module(objective=KL, lora=lora)
    grpo.pretrained, grpo.policy, grpo.reference = base, None, None
    fit(grpo)  # the invariants ask that the KL to the start is 0
    assert isinstance(grpo.reference, AdapterReference)


def test_adapters_of_an_encoder_decoder_model_load_in_plain_peft(tmp_path):
    tiny_model("t5").save_pretrained(tmp_path / "base")
    policy = perturb(build_policy(tiny_model("t5"), byte_tokenizer(), lora=LoRA(rank=2)))
    export_adapter(policy, tmp_path / "adapter")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    plain = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    ids = prompt_batch("what is 3+4?").prompt_ids
    asked = {"input_ids": ids, "decoder_input_ids": ids}
    torch.testing.assert_close(plain(**asked).logits, policy.model(**asked).logits)


@pytest.fixture
def adapter(base, tmp_path):
    export_adapter(load_policy(base, lora=LoRA(rank=4)), tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_with_missing_or_unexpected_weights_raises(base, adapter):
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    name = next(iter(weights))
    left = {key: value for key, value in weights.items() if key != name}
    for changed, problem in (
        (left, "missing"),
        (weights | {f"{name}.more": torch.ones(1)}, "unexpected"),
    ):
        save_file(changed, file)
        with raises_for(problem, "pretrained"):
            load_policy(base, lora=LoRA(adapter_path=str(adapter)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_adapter_with_weights_that_are_not_finite_raises(base, adapter, value):
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    name = min(weights)
    weights[name][0, 0] = value
    save_file(weights, file)
    tensor = name.removeprefix("base_model.model.").removesuffix(".weight")
    with raises_for(str(adapter), tensor):
        load_policy(base, lora=LoRA(adapter_path=str(adapter)))
    with raises_for(str(adapter), tensor):  # as the reference of new adapters
        load_reference(load_policy(base, lora=LoRA(rank=2)), str(adapter), base, Precision())


@pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path` was renamed")
def test_an_adapter_of_another_model_raises(adapter, tmp_path):
    tiny_model("llama", hidden_size=48).save_pretrained(tmp_path / "other")
    byte_tokenizer().save_pretrained(tmp_path / "other")
    with raises_for("adapter", "pretrained"):
        load_policy(str(tmp_path / "other"), lora=LoRA(adapter_path=str(adapter)))


def test_settings_that_contradict_the_folder_raise(base, adapter):
    with raises_for("model.lora.rank is 8", "lora.adapter_path has 4"):
        load_policy(base, lora=LoRA(rank=8, adapter_path=str(adapter)))
    assert load_policy(base, lora=LoRA(rank=4, adapter_path=str(adapter))).has_adapter


def test_an_adapter_continues_with_another_dropout(base, adapter):
    policy = load_policy(base, lora=LoRA(rank=4, dropout=0.25, adapter_path=str(adapter)))
    rates = {part.p for part in policy.modules() if isinstance(part, torch.nn.Dropout)}
    assert rates == {0.25}


def test_an_adapter_is_scaled_by_two_by_default(base):
    from peft.tuners.tuners_utils import BaseTunerLayer

    policy = load_policy(base, lora=LoRA())
    layers = [part for part in policy.modules() if isinstance(part, BaseTunerLayer)]
    assert {scale for layer in layers for scale in layer.scaling.values()} == {2.0}


def test_the_adapter_of_training_stays_active_next_to_the_initial_one(base, adapter):
    policy = load_policy(base, lora=LoRA(rank=4, adapter_path=str(adapter)))
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    rows = tokens(policy)
    AdapterReference(policy, str(adapter))
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == trained
    policy.logprobs(rows).logprobs.sum().backward()
    assert all(p.grad is not None for name, p in policy.named_parameters() if name in trained)


def test_a_folder_without_an_adapter_or_with_another_kind_raises(base, adapter):
    with raises_for("lora.adapter_path", "adapter_config.json"):
        load_policy(base, lora=LoRA(adapter_path=base))
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_type": "IA3"}))
    with raises_for("lora.adapter_path", "IA3", "LORA"):
        load_policy(base, lora=LoRA(adapter_path=str(adapter)))


def test_an_adapter_given_as_pretrained_raises_with_the_options_to_set(adapter):
    with raises_for("pretrained", "--model.lora.adapter_path"):
        load_policy(str(adapter))


def test_modules_that_do_not_exist_raise(base):
    with raises_for("nothing", "lora.target_modules", "down_proj"):
        load_policy(base, lora=LoRA(target_modules=["nothing"]))


def test_exporting_the_adapter_of_a_policy_without_one_raises(base, tmp_path):
    with raises_for("model.lora"):
        export_adapter(load_policy(base), tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "t5"])
@pytest.mark.parametrize("which", ["embedding", "head"])
def test_an_adapter_on_a_tied_weight_is_rejected_at_the_start(architecture, which):
    model = tiny_model(architecture, tie_word_embeddings=True)
    given = model.get_input_embeddings() if which == "embedding" else model.get_output_embeddings()
    name = next(name for name, part in model.named_modules() if part is given).rpartition(".")[2]
    with raises_for(f"lora adapts {name}", "tied", "lora.target_modules", "modules_to_save"):
        build_policy(model, byte_tokenizer(), lora=LoRA(target_modules=[name]))


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
    ],
)
def test_the_exported_model_is_the_trained_one(tmp_path, settings, tied):
    if tied and {"embed_tokens", "lm_head"}.intersection(settings["target_modules"]):
        return  # rejected, see above
    model = tiny_model("llama", tie_word_embeddings=tied)
    policy = perturb(build_policy(model, byte_tokenizer(), lora=LoRA(rank=4, **settings)))
    export(policy, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        gap = merged.eval()(ids).logits - policy.model.eval()(ids).logits
    assert gap.abs().max() < 1e-4


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "mamba2"])
def test_by_default_mamba_adapts_the_layers_that_peft_allows(model_type):
    config = small_config(model_type)
    policy = build_policy(find_model_class(config)(config), byte_tokenizer(), lora=LoRA(rank=2))
    named = {name for name, _ in policy.model.named_modules() if name.endswith("lora_A")}
    layers = {name.rpartition(".")[0].rpartition(".")[2] for name in named}
    assert "in_proj" in layers
    assert not layers & {"out_proj", "conv1d", "lm_head"}
    with raises_for("out_proj", "model.lora.target_modules"):
        lora = LoRA(target_modules=["out_proj"])
        build_policy(find_model_class(config)(config), byte_tokenizer(), lora=lora)


def test_an_adapter_that_replicates_layers_equals_peft_trained_and_merged(base, tmp_path):
    """Layers that share weights are copied: merging the adapter of one would change the other."""
    settings = {"layer_replication": [[0, 2], [1, 2]], "target_modules": ["q_proj", "up_proj"]}
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    theirs = peft.get_peft_model(tiny_model("llama"), config)
    theirs.save_pretrained(tmp_path / "adapter")
    policy = load_policy(base, lora=LoRA(adapter_path=str(tmp_path / "adapter")))
    assert len(policy.bare_model.model.layers) == 3
    torch.testing.assert_close(logits(policy.model), logits(theirs))
    export(policy, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), logits(theirs), rtol=1e-4, atol=1e-5)
