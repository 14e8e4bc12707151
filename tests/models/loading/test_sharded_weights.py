import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from litgrpo.models.adapters import LoRA, merge_adapter
from litgrpo.models.loading.load import Precision, load_policy
from litgrpo.models.loading.sharded_weights import (
    INDEX,
    PolicySharding,
    adapters_in_memory,
    build_empty_model,
    collect_weights,
    find_weight_files,
    gather_weights,
    map_file_names,
    read_tensor_names,
)
from tests.support.models import byte_tokenizer, tiny_model
from tests.support.raises import raises_for


@pytest.fixture(params=["gemma2", "qwen2"])
def folder(request, tmp_path):
    """A tied and an untied model."""
    tiny_model(request.param).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_an_empty_model_has_no_weights_in_memory_and_all_buffers(folder):
    config = AutoConfig.from_pretrained(folder)
    model = build_empty_model(folder, config, torch.float32)
    assert all(p.is_meta for p in model.parameters())
    whole = load_policy(str(folder)).model
    assert set(map_file_names(model).values()) == read_tensor_names(folder)
    for name, buffer in whole.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (whole.get_output_embeddings().weight is whole.get_input_embeddings().weight)


def test_adapters_of_an_empty_model_are_in_memory_and_start_as_usual(folder):
    pytest.importorskip("peft")
    from litgrpo.models.adapters import add_adapters

    config = AutoConfig.from_pretrained(folder)
    found = []
    for model in (build_empty_model(folder, config, torch.float32), load_policy(str(folder)).model):
        torch.manual_seed(3)
        with adapters_in_memory():
            adapted = add_adapters(model, LoRA(rank=4))
        found.append({n: p for n, p in adapted.named_parameters() if p.requires_grad})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_model_with_weights_missing_from_its_files_is_not_built_empty(folder):
    save_file({"other": torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert build_empty_model(folder, AutoConfig.from_pretrained(folder), torch.float32) is None


def test_folders_without_safetensors_are_loaded_completely_on_each_rank(folder):
    assert find_weight_files(str(folder)) == folder
    (folder / "model.safetensors").unlink()
    assert find_weight_files(str(folder)) is None
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "x", "b": "y"}}))
    assert find_weight_files(str(folder)) == folder
    assert read_tensor_names(folder) == {"a", "b"}


def test_collected_weights_are_those_of_the_merged_model(folder):
    pytest.importorskip("peft")
    policy = load_policy(str(folder), lora=LoRA(rank=4))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    state = merge_adapter(policy.model).state_dict()
    found = collect_weights(policy.model, None)
    assert found.keys() == read_tensor_names(folder)
    for name, weight in found.items():
        torch.testing.assert_close(weight, state[name])
    assert (
        collect_weights(policy.model, torch.bfloat16)["model.norm.weight"].dtype == torch.bfloat16
    )
    assert dict(gather_weights(policy.model)).keys() == found.keys()


@pytest.mark.parametrize(
    ("precision", "lora", "key"),
    [
        (Precision(quantization="nf4"), LoRA(), "precision.quantization"),
        (Precision(), LoRA(use_dora=True), "lora.use_dora"),
        (Precision(), LoRA(modules_to_save=["lm_head"]), "lora.modules_to_save"),
    ],
)
def test_settings_that_need_whole_weights_raise_before_any_weight_is_read(precision, lora, key):
    with raises_for(key, "trainer.strategy"):
        load_policy(
            "builtin:tiny-gemma2", precision=precision, lora=lora, sharding=PolicySharding(None)
        )
