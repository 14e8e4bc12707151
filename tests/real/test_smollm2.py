"""SmolLM2-135M-Instruct out of its package: the same model, and it trains."""

import csv
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from litgrpo.cli.main import main
from litgrpo.models.loading.gguf import find_package_file
from litgrpo.models.loading.load import resolve_pretrained
from tests.support.smollm2 import MODEL, NEEDED

RECIPE = Path(__file__).parents[2] / "configs" / "smollm2_cheerful.yaml"
LACKING = [name for name in NEEDED if find_spec(name) is None]

pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"not installed: {LACKING}; see .ci/nightly real"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


def test_the_folder_has_the_logits_of_transformers_own_loader_and_its_chat_template():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = resolve_pretrained(MODEL), find_package_file(MODEL)
    theirs = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    template = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    ids = tokenizer.apply_chat_template(asked, **template)
    reference = AutoTokenizer.from_pretrained(**theirs)
    assert torch.equal(ids.input_ids, reference.apply_chat_template(asked, **template).input_ids)
    ours = AutoModelForCausalLM.from_pretrained(folder)
    original = AutoModelForCausalLM.from_pretrained(**theirs, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(ours(**ids).logits, original(**ids).logits)
        said = ours.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(said[0, ids.input_ids.shape[1] :])


def test_two_iterations_of_the_recipe_with_all_invariants(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    words = ["fit", "-c", RECIPE, "--run_dir", tmp_path / "run"]
    words += [
        "--model.max_iterations",
        "2",
        "--data.val",
        "python:litgrpo.data.examples.topics.validation",
    ]
    words += ["--data.eval_batch_size", "20", "--trainer.val_check_interval", "2"]
    monkeypatch.setattr(sys, "argv", ["cli.py", *map(str, words)])
    assert main() == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["before"].keys() == summary["after"].keys()
    with (tmp_path / "run/metrics.csv").open() as file:
        steps = [row for row in csv.DictReader(file) if row.get("reward/mean")]
    assert len(steps) == 2
    resolve_pretrained(str(tmp_path / "run/final_model"))
