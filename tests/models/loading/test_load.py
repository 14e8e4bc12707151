import json
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from litgrpo.models.loading.export import export, export_adapter
from litgrpo.models.loading.load import (
    ASSETS,
    LoRA,
    Precision,
    build_policy,
    check_weights,
    load_policy,
    load_reference,
    load_tokenizer,
    save_in_memory_model,
)
from litgrpo.models.loading.scratch import deserialize_tokenizer, serialize_tokenizer
from litgrpo.modules.grpo import GRPO
from litgrpo.modules.sft import SFT
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy
from tests.support.raises import raises_for
from tests.support.training import batches, letters, train


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
    policy = build_policy(tiny_model("qwen2"), byte_tokenizer(), lora=LoRA(rank=4))
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
    kept = load_policy(str(tmp_path / "start"), precision=Precision(disable_dropout=False)).train()
    assert not torch.equal(kept.model(ids).logits, kept.model(ids).logits)


def test_every_end_token_of_the_generation_config_ends_a_completion():
    model = tiny_model("qwen2")
    model.generation_config.eos_token_id = [7, 9]
    assert build_policy(model, byte_tokenizer()).eos_ids == (2, 7, 9)


def test_a_path_without_a_model_raises(tmp_path):
    with raises_for("pretrained", "config.json"):
        load_policy(str(tmp_path / "nothing"))


def test_an_unknown_built_in_model_raises_with_those_that_exist():
    with raises_for("pretrained", "builtin:nothing", "builtin:tiny-gemma2"):
        load_tokenizer("builtin:nothing")


@pytest.mark.parametrize("token", ["eos_token", "pad_token"])
def test_a_tokenizer_without_end_or_pad_token_raises(tmp_path, token):
    tokenizer = byte_tokenizer()
    setattr(tokenizer, token, None)
    tokenizer.save_pretrained(tmp_path)
    tiny_model("llama").config.save_pretrained(tmp_path)
    with raises_for(token):
        load_tokenizer(str(tmp_path))


def test_a_folder_without_a_tokenizer_raises(architecture, tmp_path):
    # For some architectures transformers makes one of special tokens only, and says nothing.
    tiny_model(architecture).save_pretrained(tmp_path)
    with raises_for("tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_reference_of_a_smaller_vocabulary_raises(tmp_path):
    export(build_policy(tiny_model("llama"), byte_tokenizer()), tmp_path)
    with raises_for("reference", "259", "300"):
        load_reference(tiny_policy("llama", vocab_size=300), str(tmp_path), "", Precision())


@pytest.mark.parametrize(
    ("found", "problem"),
    [({}, "missing a"), ({"a": 2, "b": 1}, "unexpected b"), ({"a": 3}, "another shape a")],
)
def test_a_checkpoint_of_another_model_raises(found, problem):
    tensors = {name: torch.zeros(size) for name, size in found.items()}
    with raises_for(problem, "pretrained", "lora"):
        check_weights(tensors, {"a": torch.zeros(2)})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_autocast_of_other_than_float32_weights_raises(dtype):
    with raises_for("precision.autocast_dtype", "precision.dtype"):
        Precision(dtype=dtype, autocast_dtype="bfloat16")


def test_names_and_folders_are_returned_unchanged():
    assert save_in_memory_model("some/model") == "some/model"


def test_a_model_in_memory_is_copied_and_trained_from_its_weights():
    model = tiny_model("llama", seed=3)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    grpo = GRPO((model, byte_tokenizer()), [letters], group_size=2, max_completion_length=4)
    grpo.configure_model()
    held = grpo.policy.bare_model.state_dict()
    assert all(torch.equal(held[name], weight) for name, weight in before.items())
    grpo.max_iterations = 1
    grpo.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=10.0)
    train(grpo, batches("ab", "cd"))
    assert any(not torch.equal(held[name], weight) for name, weight in before.items())
    given = model.state_dict()
    assert all(torch.equal(given[name], weight) for name, weight in before.items())


def test_the_tokenizer_comes_from_where_the_model_was_loaded():
    from transformers import AutoModelForCausalLM

    folder = str(Path(__file__).parents[3] / "src/litgrpo/assets/tiny-gemma2")
    sft = SFT(AutoModelForCausalLM.from_pretrained(folder))
    assert sft.fit_tokenizer([]).vocab_size == GRPO(folder, [letters]).fit_tokenizer().vocab_size


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (torch.nn.Linear(2, 2), "Linear"),
        (tiny_model("llama"), "pretrained=(model, tokenizer)"),
        ((tiny_model("llama"), "gpt2"), "str"),
    ],
)
def test_other_objects_than_a_model_with_a_tokenizer_raise(given, problem):
    with raises_for("pretrained", problem):
        GRPO(given, [letters])


@pytest.mark.parametrize("kind", [GRPO, SFT])
def test_a_compiled_module_raises(kind):
    arguments = {"rewards": [letters]} if kind is GRPO else {}
    module = kind("builtin:tiny-gemma2", **arguments, max_iterations=1)
    with raises_for("torch.compile"):
        train(torch.compile(module, backend="eager"), batches("ab"))


# --- what is saved names no folder that goes with the process ---


def in_memory(name):
    policy = load_policy("builtin:tiny-gemma2")
    policy.model.name_or_path = policy.model.config._name_or_path = name
    return save_in_memory_model((policy.model, policy.tokenizer))


def folders_in(saved, *names):
    """Files below `saved` that contain one of the names."""
    files = [path for path in saved.rglob("*") if path.is_file()]
    return [path.name for path in files for name in names if name.encode() in path.read_bytes()]


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("built in", "builtin:tiny-gemma2"),
        ("in memory", None),
        ("in memory, of the Hub", "org/model"),
        ("in memory, twice", "org/model"),
        ("a folder", "my/model"),
    ],
)
def test_what_is_saved_has_the_users_name_of_the_model(kind, name, lora, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = name
    if kind.startswith("in memory"):
        given = in_memory(name or "")
        if kind.endswith("twice"):
            first = load_policy(given)
            given = save_in_memory_model((first.model, first.tokenizer))
    elif kind == "a folder":
        export(load_policy("builtin:tiny-gemma2"), tmp_path / name)
    policy, saved = load_policy(given, lora=lora), tmp_path / "saved"
    assert policy.tokenizer.name_or_path == (name or "")
    export(policy, saved / "model")
    if lora is not None:
        export_adapter(policy, saved / "adapter")
        settings = json.loads((saved / "adapter/adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == name
    assert folders_in(saved, tempfile.gettempdir(), str(ASSETS), str(tmp_path)) == []


def test_a_tokenizer_of_a_checkpoint_names_no_folder():
    files = serialize_tokenizer(load_policy("builtin:tiny-gemma2").tokenizer)
    assert not any(tempfile.gettempdir() in text for text in files.values())
    assert deserialize_tokenizer(files).name_or_path == ""
