from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from litgrpo.callbacks.export import Export, HFCheckpoints
from litgrpo.callbacks.run_folder import resolve_checkpoint
from litgrpo.models.loading import LoRA, build_policy
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


def test_folders_along_the_way_hold_model_tokenizer_and_training_state(tmp_path):
    module = fit(tmp_path, HFCheckpoints(every_n_iterations=2), module=StandIn(4))
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    folder = tmp_path / "checkpoint-4"
    assert {"config.json", "model.safetensors", "tokenizer.json"} < {*names(folder)}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(module.policy.model))
    text = AutoTokenizer.from_pretrained(folder)("a")
    assert text.input_ids == module.policy.tokenizer("a").input_ids

    resumed = fit(tmp_path / "more", module=StandIn(6), resume=resolve_checkpoint(str(folder)))
    assert resumed.iteration == 6


def test_the_newest_folders_are_kept(tmp_path):
    fit(tmp_path, HFCheckpoints(every_n_iterations=1, keep_last=2), module=StandIn(4))
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]


def test_a_folder_of_a_killed_run_is_removed_and_an_older_one_replaced(tmp_path):
    for name in (".checkpoint-2.tmp", "checkpoint-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("")
    fit(tmp_path, HFCheckpoints(every_n_iterations=2), module=StandIn(2))
    assert names(tmp_path) == ["checkpoint-2"]
    assert "half" not in names(tmp_path / "checkpoint-2")


def test_fast_dev_run_writes_no_folder(tmp_path):
    fit(tmp_path, HFCheckpoints(every_n_iterations=1), fast_dev_run=True)
    assert names(tmp_path) == []


def test_invalid_intervals_and_folders_raise(tmp_path):
    with raises_for("every_n_iterations", "-1"):
        HFCheckpoints(every_n_iterations=-1)
    with raises_for("keep_last", "0"):
        HFCheckpoints(keep_last=0)
    with raises_for("training_state.ckpt", error=FileNotFoundError):
        resolve_checkpoint(str(tmp_path))
