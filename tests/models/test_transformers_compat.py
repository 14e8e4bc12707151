"""Every private name of transformers exists, and does what litgrpo expects of it."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PretrainedConfig, T5ForConditionalGeneration
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoForCausalLM

from litgrpo.models import transformers_compat as compat
from tests.support.models import prompt_batch, tiny_model


def test_a_missing_private_name_raises_with_the_tested_versions():
    with pytest.raises(RuntimeError, match=r"PreTrainedConfig\._no_such.*>=5\.23"):
        compat.require_private(PretrainedConfig, "_no_such")


def test_the_tested_versions_are_those_of_the_installation():
    requirements = Path(__file__).parents[2].joinpath("setup.cfg").read_text()
    assert f"transformers{compat.TESTED_VERSIONS}" in requirements.replace(" ", "")


def test_activation_checkpointing_is_seen_when_it_is_turned_on_and_off():
    model = tiny_model("llama")
    assert not compat.checkpoints_activations(model)
    compat.checkpoint_activations(model)
    assert compat.checkpoints_activations(model)
    model.activation_checkpointing_disable()
    assert not compat.checkpoints_activations(model)


def test_use_attention_selects_a_registered_function_and_restores_the_former():
    calls = []

    def attend(module, query, keys, values, mask, **kwargs):
        calls.append(mask)
        return query.transpose(1, 2), None

    compat.register_attention("litgrpo_test", attend, None)
    model = tiny_model("llama")
    ids = prompt_batch("hello").prompt_ids
    before = model(ids).logits
    with compat.use_attention(model, "litgrpo_test"):
        assert not torch.equal(model(ids).logits, before)
    assert calls == [None, None]  # one per layer, without a mask
    assert torch.equal(model(ids).logits, before)


def test_a_recomputation_selects_the_attention_of_its_forward_pass():
    model = tiny_model("llama")
    compat.register_attention("litgrpo_test", lambda *args, **kwargs: None, None)
    with compat.use_attention(model, "litgrpo_test"):
        _, recomputation = compat.keep_attention_in_recompute(model)
    with recomputation:
        assert model.config._attn_implementation == "litgrpo_test"
    assert model.config._attn_implementation != "litgrpo_test"


def test_supports_sdpa_is_the_attention_that_transformers_selects():
    assert compat.supports_sdpa(LlamaForCausalLM)
    assert compat.supports_sdpa(T5ForConditionalGeneration)
    assert not compat.supports_sdpa(GPTNeoForCausalLM)


def test_unsplit_modules_are_the_decoder_layers():
    assert compat.find_unsplit_modules(tiny_model("llama")) == ["LlamaDecoderLayer"]
    assert compat.find_unsplit_modules(tiny_model("gpt2")) == ["GPT2Block"]


def test_stepping_a_model_gives_the_logits_of_one_forward_pass():
    model = tiny_model("llama").eval()
    ids = prompt_batch("what is 3+4?").prompt_ids
    inputs = {"attention_mask": torch.ones_like(ids[:, :-2]), "use_cache": True}
    compat.prepare_generation(model, inputs, num_rows=1, max_length=ids.shape[1])
    assert inputs["past_key_values"] is not None
    logits = []
    with torch.no_grad():
        for end in range(ids.shape[1] - 2, ids.shape[1] + 1):
            which = {"next_sequence_length": 1} if logits else {"is_first_iteration": True}
            step = model.prepare_inputs_for_generation(ids[:, :end], **which, **inputs)
            output = model(**step, return_dict=True)
            inputs = compat.update_generation_inputs(model, output, inputs)
            logits.append(output.logits[:, -1])
        expected = model(ids).logits[:, -3:]
    torch.testing.assert_close(torch.stack(logits, 1), expected, atol=1e-5, rtol=1e-5)
