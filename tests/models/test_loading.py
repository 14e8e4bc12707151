import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from litgrpo.models.loading import (
    LoRA,
    Precision,
    as_policy,
    check_weights,
    export,
    load_policy,
    load_reference,
    load_tokenizer,
)
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy


@pytest.fixture
def folder(tmp_path, architecture):
    export(tiny_policy(architecture), tmp_path / "model")
    return tmp_path / "model"


def test_an_exported_folder_gives_plain_transformers_the_same_logits(folder, architecture):
    batch = prompt_batch("what is 3+4?")
    model = tiny_model(architecture)
    plain = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    asked = {"input_ids": batch.prompt_ids}
    if model.config.is_encoder_decoder:
        asked["decoder_input_ids"] = batch.prompt_ids
    torch.testing.assert_close(plain(**asked).logits, model(**asked).logits, atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(folder)("ab").input_ids == byte_tokenizer()("ab").input_ids


def test_an_exported_tokenizer_has_a_name_that_older_transformers_know(tmp_path):
    export(tiny_policy("llama"), tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_an_exported_folder_loads_as_the_same_policy(folder, architecture):
    policy = load_policy(str(folder))
    for one, other in zip(policy.parameters(), tiny_policy(architecture).parameters(), strict=True):
        assert torch.equal(one, other)


def test_adapters_are_merged_at_export_and_the_policy_is_left_as_it_is(tmp_path):
    policy = as_policy(tiny_model("qwen2"), byte_tokenizer(), lora=LoRA(rank=4))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    batch = prompt_batch("what is 3+4?")
    before = policy.model(batch.prompt_ids).logits
    export(policy, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(plain(batch.prompt_ids).logits, before, atol=1e-4, rtol=1e-4)
    assert torch.equal(policy.model(batch.prompt_ids).logits, before)


def test_dropout_is_off_in_training_but_survives_export(tmp_path):
    tiny = tiny_model("gpt2", resid_pdrop=0.1, attn_pdrop=0.2)
    tiny.save_pretrained(tmp_path / "start")
    byte_tokenizer().save_pretrained(tmp_path / "start")
    policy = load_policy(str(tmp_path / "start")).train()
    ids = prompt_batch("hello").prompt_ids
    assert torch.equal(policy.model(ids).logits, policy.model(ids).logits)
    export(policy, tmp_path / "end")
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "end").config
    assert (config.resid_pdrop, config.attn_pdrop) == (0.1, 0.2)
    kept = load_policy(str(tmp_path / "start"), precision=Precision(dropout=True)).train()
    assert not torch.equal(kept.model(ids).logits, kept.model(ids).logits)


def test_every_end_token_of_the_generation_config_ends_a_completion():
    model = tiny_model("qwen2")
    model.generation_config.eos_token_id = [7, 9]
    assert as_policy(model, byte_tokenizer()).eos_ids == (2, 7, 9)


def test_a_wrong_path_is_named_with_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"is no model folder \(no config.json in it\). Give a"):
        load_policy(str(tmp_path / "nothing"))


def test_an_unknown_embedded_model_is_named_with_those_that_exist():
    with pytest.raises(ValueError, match="There is no embedded model 'builtin:nothing'; there is"):
        load_tokenizer("builtin:nothing")


@pytest.mark.parametrize(("token", "word"), [("eos_token", "end"), ("pad_token", "pad")])
def test_a_tokenizer_without_end_or_pad_token_is_refused(tmp_path, token, word):
    tokenizer = byte_tokenizer()
    setattr(tokenizer, token, None)
    tokenizer.save_pretrained(tmp_path)
    tiny_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"has no {word} token"):
        load_tokenizer(str(tmp_path))


def test_a_reference_of_another_vocabulary_is_refused(tmp_path):
    export(as_policy(tiny_model("llama", vocab_size=300), byte_tokenizer()), tmp_path)
    with pytest.raises(ValueError, match="has a vocabulary of 300 tokens, the policy one of 259"):
        load_reference(tiny_policy("llama"), str(tmp_path), "", Precision())


@pytest.mark.parametrize(
    ("found", "problem"), [({}, "lacks a"), ({"a": 2, "b": 1}, "adds b"), ({"a": 3}, "reshapes a")]
)
def test_a_checkpoint_of_another_model_is_refused(found, problem):
    tensors = {name: torch.zeros(size) for name, size in found.items()}
    with pytest.raises(ValueError, match=f"The checkpoint is of another model: it {problem}"):
        check_weights(tensors, {"a": torch.zeros(2)})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_a_lower_precision_for_products_of_other_than_float32_weights_is_refused(dtype):
    with pytest.raises(ValueError, match=rf"float32 weights, but precision\.dtype is {dtype}"):
        Precision(dtype=dtype, compute="bfloat16")
