"""A damaged model folder or file is one sentence, at once and without large amounts of memory."""

import json
import math
import shutil
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from litgrpo.models.loading.load import Precision, load_policy, load_reference, save_in_memory_model
from litgrpo.models.weights import check_finite
from tests.support.models import byte_tokenizer, tiny_model
from tests.support.raises import raises_for


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "whole"
    tiny_model("llama").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def one_sentence(folder):
    with pytest.raises(ValueError, match=str(folder)) as found:
        load_policy(str(folder))
    text = str(found.value)
    assert len(text.splitlines()) == 1
    assert len(text) < 1000
    return text


LONG_NUMBER = '{"hidden_size": ' + "9" * 9_000 + "}"
DEEP = ("[" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", [*DEEP, "", "[]", "null", "{", LONG_NUMBER])
def test_a_damaged_json_file_is_one_sentence(whole, tmp_path, name, text):
    folder = shutil.copytree(whole, tmp_path / "m")
    (folder / name).write_text(text)
    one_sentence(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 10**12),
        ("hidden_size", "x"),
        ("hidden_size", None),
        ("hidden_size", 10**30),
        ("num_hidden_layers", 10**12),
        ("num_hidden_layers", 10**6),
        ("vocab_size", 10**9),
        ("vocab_size", -1),
        ("intermediate_size", 10**9),
        ("num_attention_heads", 10**9),
        ("num_attention_heads", -1),
        ("num_key_value_heads", 10**9),
        ("max_position_embeddings", 10**12),
        ("rope_parameters", {"rope_type": "x"}),
        ("model_type", ["x"]),
        ("dtype", "x"),
    ],
)
def test_a_config_of_absurd_sizes_is_one_sentence(whole, tmp_path, name, value):
    folder = shutil.copytree(whole, tmp_path / "m")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    one_sentence(folder)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
def test_a_weight_that_is_not_finite_is_named(whole, tmp_path, name, value):
    folder = shutil.copytree(whole, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[[0, 5]] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert f"{name} has 2 of {weights[name].numel()} values" in one_sentence(folder)
    with raises_for(name, "float32"):  # the reference of a run, and that of any other model
        load_reference(load_policy(str(whole)), str(folder), str(whole), Precision())


def test_a_weight_beyond_the_range_of_its_dtype_is_named(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = 1e5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    load_policy(str(folder))
    with raises_for("model.norm.weight", "float16"):
        load_policy(str(folder), precision=Precision(dtype="float16"))


def test_a_model_in_memory_with_nan_is_rejected(whole):
    model = AutoModelForCausalLM.from_pretrained(whole)
    model.lm_head.weight.data[7, 7] = math.nan
    folder = save_in_memory_model(model)
    with raises_for("lm_head.weight"):
        load_policy(folder)


def test_shards_and_tensors_of_all_dtypes_are_checked():
    sound = {
        "a": torch.ones(2, dtype=torch.bfloat16),
        "b": torch.ones(2, dtype=torch.uint8),
        "c": torch.ones(2).to(torch.float8_e4m3fn),
        "d": torch.ones(2, device="meta"),
        "e": torch.zeros(0),
    }
    check_finite(sound.items(), "weights")
    for dtype in (torch.float8_e4m3fn, torch.float16, torch.float64):
        bad = torch.tensor([1.0, math.nan]).to(dtype)
        with raises_for("weights: f has 1 of 2"):
            check_finite((sound | {"f": bad}).items(), "weights")


@pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed")
@pytest.mark.parametrize("size", [4, 8, 20, 24, 100, 1000])
def test_a_gguf_file_that_is_cut_off_is_one_sentence(tmp_path, monkeypatch, size):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    head = b"GGUF" + bytes([3, 0, 0, 0, 5, *[0] * 7, 9, *[0] * 7])  # version, tensors, keys
    path = tmp_path / "cut.gguf"
    path.write_bytes((head + b"\x10" * 2000)[:size])
    one_sentence(path)
