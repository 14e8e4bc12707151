"""A tokenizer and a model made from sizes and texts."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from litgrpo.distributed.random_state import seeded_on_cpu
from litgrpo.models.loading.scratch import Scratch, deserialize_tokenizer, serialize_tokenizer
from litgrpo.tensor_files import DamagedCheckpoint
from tests.support.raises import raises_for

TEXTS = ["Tom has 47 apples.<reasoning>47+3=50</reasoning><answer>50</answer>"] * 3
ARCHITECTURES = {
    "gemma2": {"hidden_size": 8, "intermediate_size": 8, "head_dim": 4, "sliding_window": 4}
    | {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen2": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    | {"num_attention_heads": 2, "num_key_value_heads": 1},
    "gpt2": {"n_embd": 8, "n_layer": 2, "n_head": 2},
}


def scratch(model_type="gemma2", vocab_size=300, add_bos=True, **sizes):
    architecture = {"model_type": model_type, **ARCHITECTURES.get(model_type, {}), **sizes}
    return Scratch(architecture, vocab_size=vocab_size, add_bos=add_bos)


@pytest.fixture(scope="module")
def tokenizer():
    return scratch().build_tokenizer(TEXTS)


def tokens_of(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


def test_words_and_tags_are_one_token_and_each_digit_is_one(tokenizer):
    tokens = tokens_of(tokenizer, "Tom has 47 apples.<reasoning>47+3")

    # The byte-level alphabet writes a space as U+0120.
    words = ["Tom", "\u0120has", "\u0120", "4", "7", "\u0120apples", "."]
    assert tokens == ["<bos>", *words, "<reasoning>", "4", "7", "+", "3"]


@pytest.mark.parametrize(
    "text", ["", " a  b\n\n c\t", "<answer> 12 </answer>x", "gr\u00fc\u00df \u65e5 \U0001f600"]
)
def test_decoding_returns_any_text_without_special_tokens(tokenizer, text):
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id, tokenizer.pad_token_id]

    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_without_add_bos_nothing_is_put_before_the_text():
    tokenizer = scratch(add_bos=False).build_tokenizer(TEXTS)

    assert tokens_of(tokenizer, "4") == ["4"]


def test_pad_bos_and_eos_are_three_different_tokens(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_vocabulary_stays_within_its_size():
    many_words = [f"word{chr(97 + i)}{chr(97 + j)}" for i in range(26) for j in range(26)]

    assert len(scratch(vocab_size=300).build_tokenizer(many_words)) == 300


def test_equal_texts_and_seeds_give_equal_tokenizers_and_weights(tokenizer):
    again = scratch().build_tokenizer(TEXTS)
    first, second = (scratch().build_model(t, seed=3).state_dict() for t in (tokenizer, again))

    assert again.get_vocab() == tokenizer.get_vocab()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_model_is_drawn_on_the_cpu_from_numbers_of_the_cpu_alone(tokenizer, monkeypatch):
    def seed_devices(seed):
        raise AssertionError("torch.manual_seed also seeds the numbers of GPUs")

    monkeypatch.setattr(torch, "manual_seed", seed_devices)
    expected = scratch().build_model(tokenizer, seed=3)
    with torch.device("meta"):  # Lightning builds models within `torch.device("cuda")`
        moved = scratch().build_model(tokenizer, seed=3)
        with seeded_on_cpu(3):
            drawn = torch.rand(2)
    assert {each.device.type for each in moved.parameters()} == {"meta"}
    assert {each.device.type for each in expected.parameters()} == {"cpu"}
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(3)))


def test_building_a_model_leaves_the_global_random_state_alone(tokenizer):
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    scratch().build_model(tokenizer, seed=1)

    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_saved_model_and_tokenizer_load_in_plain_transformers(model_type, tmp_path, tokenizer):
    model = scratch(model_type).build_model(tokenizer).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    loaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = loaded_tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    assert ids.tolist() == [tokenizer(TEXTS[0])["input_ids"]]
    assert loaded_tokenizer.decode(ids[0], skip_special_tokens=True) == TEXTS[0]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert loaded.generation_config.pad_token_id == tokenizer.pad_token_id


def test_a_misspelled_size_raises_with_the_nearest_one(tokenizer):
    with raises_for("scratch.architecture.hidden_sise", "hidden_size"):
        scratch(hidden_sise=8).build_model(tokenizer)


def test_an_unknown_model_type_raises_with_the_nearest_one(tokenizer):
    with raises_for("scratch.architecture.model_type", "gema2", "gemma2"):
        scratch("gema2").build_model(tokenizer)


@pytest.mark.parametrize(
    "sizes",
    [{"n_head": 0}, {"n_embd": -8}, {"n_embd": "x"}, {"n_layer": 10**7}, {"n_embd": 2 * 10**6}],
)
def test_sizes_that_no_model_has_raise_in_one_line_before_weights_are_allocated(tokenizer, sizes):
    architecture = {"model_type": "gpt2", "n_layer": 1, "n_head": 1}
    with raises_for("model.scratch.architecture") as raised:
        Scratch(architecture | sizes).build_model(tokenizer)
    assert len(str(raised.value).splitlines()) == 1
    assert "allocate" not in str(raised.value)


def test_an_architecture_without_model_type_raises():
    with raises_for("scratch.architecture", "model_type"):
        Scratch({"hidden_size": 8})


def test_sizes_that_come_from_the_tokenizer_raise():
    with raises_for("scratch.architecture.vocab_size"):
        Scratch({"model_type": "gemma2", "vocab_size": 10})


def test_a_vocabulary_smaller_than_the_bytes_raises():
    with raises_for("scratch.vocab_size", "100", "263"):
        scratch(vocab_size=100)


def test_a_tokenizer_comes_back_from_the_texts_of_its_files(tokenizer):
    files = serialize_tokenizer(tokenizer)
    again = deserialize_tokenizer(files)

    assert {type(text) for text in files.values()} == {str}
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert (again.padding_side, again.pad_token, again.eos_token) == ("left", "<pad>", "<eos>")
    assert tokens_of(again, TEXTS[0]) == tokens_of(tokenizer, TEXTS[0])


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/b", "..", ".hidden", ""])
def test_a_file_name_that_leads_elsewhere_is_rejected(tokenizer, name):
    with raises_for("tokenizer", repr(name)):
        deserialize_tokenizer(serialize_tokenizer(tokenizer) | {name: "text"})


@pytest.mark.parametrize("text", [None, 3, b"{}"])
def test_a_file_without_a_text_is_rejected(tokenizer, text):
    with raises_for("tokenizer of a checkpoint", "'tokenizer.json'"):
        deserialize_tokenizer(serialize_tokenizer(tokenizer) | {"tokenizer.json": text})


def test_files_that_are_no_tokenizer_are_rejected_in_one_line():
    code = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}, "tokenizer_class": "Tokenizer"}
    for files in ({}, {"tokenizer.json": "{"}, {"tokenizer_config.json": json.dumps(code)}):
        with raises_for("tokenizer of a checkpoint"):
            deserialize_tokenizer(files | {"code.py": "raise SystemExit"})


@pytest.mark.parametrize(
    ("name", "text"), [("tokenizer_config.json", "[]"), ("a.txt", "\ud800"), ("a" * 300, "")]
)
def test_files_of_a_tokenizer_that_are_damaged_are_rejected_in_one_line(tokenizer, name, text):
    with raises_for("tokenizer of a checkpoint", error=DamagedCheckpoint) as raised:
        deserialize_tokenizer(serialize_tokenizer(tokenizer) | {name: text})
    assert len(str(raised.value).splitlines()) == 1
