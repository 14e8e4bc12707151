"""Folders whose weights, config and tokenizer do not fit together raise."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from litgrpo.models.loading.load import load_policy, load_reference
from litgrpo.models.policy import Policy
from litgrpo.models.weights import (
    check_vocabulary,
    choose_attention,
    find_model_class,
    select_text_config,
)
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy
from tests.support.raises import raises_for

SMALL = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
SPECIAL = dict(vocab_size=259, pad_token_id=0, bos_token_id=1, eos_token_id=2)


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def change_weights(folder, change):
    """Change the {name: tensor} of a folder; return its name."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return str(folder)


def test_missing_unexpected_and_reshaped_weights_are_all_named(folder):
    def change(weights):
        del weights["model.embed_tokens.weight"]
        weights["model.layers.0.router.weight"] = torch.ones(2)
        weights["model.norm.weight"] = torch.ones(5)

    name = change_weights(folder, change)
    with raises_for(
        *("missing", "model.embed_tokens.weight"),
        *("unexpected", "model.layers.0.router.weight"),
        *("another shape", "model.norm.weight"),
    ):
        load_policy(name)


def test_a_reference_with_missing_weights_raises(folder):
    name = change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    with raises_for("missing", "lm_head.weight"):
        load_reference(tiny_policy("llama"), name, "", precision=None)


def test_a_tied_head_is_not_missing(tmp_path):
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert isinstance(load_policy(str(tmp_path)), Policy)


@pytest.mark.parametrize("kept", [0.5, 0.001, 0.0])
def test_a_truncated_file_raises(folder, kept):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * kept)])
    with raises_for("damaged"):
        load_policy(str(folder))


def test_something_else_in_place_of_weights_raises(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no weights")
    with raises_for("damaged"):
        load_policy(str(folder))


def test_a_folder_of_gguf_files_raises_with_the_path_to_give(folder):
    (folder / "model.safetensors").unlink()
    (folder / "small.gguf").write_bytes(b"GGUF")
    with raises_for("small.gguf", "pretrained", "small.gguf"):
        load_policy(str(folder))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with raises_for("tokenizer", "small.gguf"):
        load_policy(str(folder))


def test_a_tokenizer_with_more_tokens_than_the_embedding_raises(folder):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(folder)
    with raises_for("2 tokens", "259", "<think>"):
        load_policy(str(folder))


def test_a_special_token_beyond_the_embedding_is_allowed():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    check_vocabulary(tiny_model("llama"), tokenizer, "here")


def test_a_model_of_eight_tokens_decodes_by_the_fused_decoder():
    policy = tiny_policy("llama")
    policy.bare_model.resize_token_embeddings(8)
    assert policy.can_fuse


def test_the_text_part_of_a_model_for_images_is_loaded_exactly(tmp_path):
    text = SMALL | SPECIAL | dict(intermediate_size=24, head_dim=8, sliding_window=4)
    vision = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    vision |= dict(image_size=28, patch_size=14)
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    whole = find_model_class(config)(config).eval()
    whole.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path)).eval()
    assert policy.model.config.model_type == "gemma3_text"
    ids = prompt_batch("what is 3+4?").prompt_ids
    torch.testing.assert_close(policy.model(ids).logits, whole(input_ids=ids).logits)


def test_the_text_config_of_a_text_model_is_its_config():
    config = tiny_model("t5").config
    assert select_text_config(config) is config


def test_a_model_without_a_text_generation_class_raises():
    for model_type in ("vit", "clip", "whisper", "musicgen"):
        with raises_for(model_type):
            find_model_class(select_text_config(AutoConfig.for_model(model_type)))


def test_attention_is_eager_where_there_is_no_other():
    kinds = {
        name: choose_attention(AutoConfig.for_model(name)) for name in ("llama", "gemma2", "bloom")
    }
    assert kinds == {"llama": "sdpa", "gemma2": "eager", "bloom": "eager"}
