from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from litgrpo.callbacks.export import Export
from litgrpo.models.loading.load import LoRA, build_policy
from litgrpo.run_folder import resolve_checkpoint
from tests.support.fitting import fit
from tests.support.models import byte_tokenizer, tiny_model
from tests.support.raises import raises_for
from tests.support.standin import StandIn

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*eval mode", "ignore:.*LeafSpec"
)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 13).view(1, -1)).logits


def test_plain_transformers_loads_the_final_model_with_equal_logits(tmp_path):
    module = fit(tmp_path, Export(), module=StandIn(3))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final_model", dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(module.policy.model))


def test_adapters_are_saved_beside_the_merged_model(tmp_path):
    peft = pytest.importorskip("peft")
    module = StandIn(1)
    module.policy = build_policy(tiny_model("llama"), byte_tokenizer(), lora=LoRA(rank=2))
    module.policy.train()
    fit(tmp_path, Export(), module=module)
    assert {"final_adapter", "final_model"} <= {*names(tmp_path)}
    plain = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "final_adapter")
    assert torch.equal(logits(plain), logits(module.policy.model))


def test_a_run_without_adapters_saves_none(tmp_path):
    fit(tmp_path, Export(), module=StandIn(1))
    assert names(tmp_path) == ["final_model"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folders_along_the_way_hold_model_and_tokenizer(tmp_path):
    module = fit(tmp_path, Export(final=False, every_n_iterations=2), module=StandIn(4))
    assert names(tmp_path) == ["model-2", "model-4"]
    folder = tmp_path / "model-4"
    assert {"config.json", "model.safetensors", "tokenizer.json"} < {*names(folder)}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(module.policy.model))
    text = AutoTokenizer.from_pretrained(folder)("a")
    assert text.input_ids == module.policy.tokenizer("a").input_ids
    with raises_for("is a model, not a checkpoint", "--model.pretrained"):
        resolve_checkpoint(str(folder))


def test_a_folder_of_an_earlier_process_is_replaced(tmp_path):
    for name in (".model-2.tmp", "model-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("")
    fit(tmp_path, Export(final=False, every_n_iterations=2), module=StandIn(2))
    assert names(tmp_path) == ["model-2"]
    assert "half" not in names(tmp_path / "model-2")


def test_fast_dev_run_writes_no_folder(tmp_path):
    fit(tmp_path, Export(every_n_iterations=1), fast_dev_run=True)
    assert names(tmp_path) == []


def test_invalid_intervals_raise():
    with raises_for("export.every_n_iterations", "-1"):
        Export(every_n_iterations=-1)
