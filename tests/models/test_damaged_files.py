"""A damaged model folder or file is one sentence, at once and without large amounts of memory."""

import json
import shutil
from importlib.util import find_spec

import pytest

from litgrpo.models.loading import load_policy
from tests.support.models import byte_tokenizer, tiny_model


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


@pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed")
@pytest.mark.parametrize("size", [4, 8, 20, 24, 100, 1000])
def test_a_gguf_file_that_is_cut_off_is_one_sentence(tmp_path, monkeypatch, size):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    head = b"GGUF" + bytes([3, 0, 0, 0, 5, *[0] * 7, 9, *[0] * 7])  # version, tensors, keys
    path = tmp_path / "cut.gguf"
    path.write_bytes((head + b"\x10" * 2000)[:size])
    one_sentence(path)
