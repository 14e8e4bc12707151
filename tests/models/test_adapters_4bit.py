"""Four-bit weights under adapters: sampling, learning and export agree."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from litgrpo.models import adapters as quantized
from litgrpo.models.kernels import linear as linears
from litgrpo.models.loading.export import export, export_adapter
from litgrpo.models.loading.load import LoRA, Precision, load_policy, load_reference
from litgrpo.models.policy import Policy
from tests.support.adapters import perturb
from tests.support.invariants import KL, fit, module
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model
from tests.support.raises import raises_for

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
SIZES = dict(hidden_size=64, intermediate_size=64)
FOUR_BIT = Precision(quantization="nf4")


@pytest.fixture(params=["llama", "t5"])
def architecture(request):
    return request.param


@pytest.fixture
def base(architecture, tmp_path):
    sizes = SIZES if architecture == "llama" else dict(d_model=64, d_ff=64)
    tiny_model(architecture, **sizes).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def logits(model):
    ids = prompt_batch("what is 3+4?").prompt_ids
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=ids, **more).logits


def plain(folder, config):
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(("architecture", "kind"), [("llama", "nf4"), ("t5", "fp4")])
def test_a_four_bit_run_passes_the_checks_and_trains_only_the_adapter(base, kind):
    optimizer = partial(bitsandbytes.optim.AdamW8bit, lr=1e-2)
    settings = dict(precision=Precision(quantization=kind), lora=LoRA(rank=2), optimizer=optimizer)
    grpo = module(objective=KL, **settings)
    grpo.pretrained, grpo.policy, grpo.reference = base, None, None
    grpo.configure_model()
    before = {n: p.detach().clone() for n, p in grpo.policy.named_parameters()}
    fit(grpo)
    changed = {
        n for n, p in grpo.policy.named_parameters() if not torch.equal(p.detach(), before[n])
    }
    assert changed
    assert all("lora_" in name for name in changed)


def test_the_export_is_the_dequantized_base_plus_the_adapter(base, tmp_path):
    policy = perturb(load_policy(base, precision=FOUR_BIT, lora=LoRA(rank=4)), 0.03)
    running = logits(policy.model)  # in eval mode, which must not repack the weights
    export(policy, tmp_path / "merged")
    config = policy.bare_model.config
    exported = plain(tmp_path / "merged", config)
    assert exported.dtype == torch.float32
    assert "quantization_config" not in exported.config.to_dict()
    rounding = 2e-3 if config.is_encoder_decoder else 2e-4  # T5's scores are not scaled
    torch.testing.assert_close(logits(exported), running, atol=rounding, rtol=1e-3)
    export_adapter(policy, tmp_path / "adapter")
    unquantized = peft.PeftModel.from_pretrained(plain(base, config), tmp_path / "adapter")
    assert (logits(unquantized) - running).abs().max() > 1e-2  # what must not be exported
    assert torch.equal(logits(policy.model), running)


def test_sampling_and_learning_compute_the_same_numbers(base):
    policy = load_policy(base, precision=FOUR_BIT, lora=LoRA(rank=4))
    first = logits(policy.model.eval())
    policy.model.train()
    asked = {"input_ids": prompt_batch("what is 3+4?").prompt_ids}
    if policy.bare_model.config.is_encoder_decoder:
        asked["decoder_input_ids"] = asked["input_ids"]
    torch.testing.assert_close(policy.model(**asked).logits, first)


def test_quantized_weights_count_for_the_size_of_micro_batches(base):
    full = load_policy(base, lora=LoRA(rank=4))
    four_bit = load_policy(base, precision=FOUR_BIT, lora=LoRA(rank=4))
    assert linears.count_linear_outputs(four_bit.model) == linears.count_linear_outputs(full.model)


@pytest.mark.parametrize("architecture", ["llama"])
def test_four_bit_weights_without_adapters_raise_unless_frozen(base):
    with raises_for("precision.quantization", "lora.rank"):
        load_policy(base, precision=FOUR_BIT)
    policy = load_policy(base, precision=FOUR_BIT, lora=LoRA(rank=2))
    reference = load_reference(policy, base, base, FOUR_BIT)
    assert isinstance(reference.policy, Policy)


def test_without_bitsandbytes_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with raises_for("precision.quantization", "bitsandbytes", "pip install bitsandbytes"):
        quantized.quantization_arguments("nf4", torch.float32)
