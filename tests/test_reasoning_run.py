"""The reasoning system by its recipes: supervised, GRPO, answers with reasoning; and its checks."""

import csv
import json
import math
from pathlib import Path

import pytest
import torch
import yaml

from litgrpo.algorithms.advantages import Normalized, check_centered
from litgrpo.callbacks.completions import format_first_groups
from litgrpo.models.loading import load_tokenizer
from litgrpo.rewards.reward import Reward
from litgrpo.rewards.scorer import Scorer
from litgrpo.training.grpo import GRPO
from litgrpo.types import RewardTable, Rollout
from tests.support.models import prompt_batch, tiny_model
from tests.support.recipes import CONFIGS, TINY

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
# The embedded model is asked in its own words, so that it answers with reasoning.
PLAIN = {"columns": {}, "extract": {}, "template": "{{ prompt }}", "chat": False}
PROBLEMS = "python:litgrpo.data.examples.problems."
CONSTANT = {"class_path": "torch.optim.lr_scheduler.ConstantLR", "init_args": {}}


def overlay(path: Path, model: dict, data: dict, **sections) -> Path:
    content = {"model": {"init_args": model}, "data": {"init_args": PLAIN | data}} | sections
    path.write_text(yaml.safe_dump(content))
    return path


def test_supervised_then_grpo_then_an_answer_with_its_reasoning(tmp_path, program, capsys):
    supervised, run = tmp_path / "sft", tmp_path / "grpo"
    cpu = ["--trainer.accelerator", "cpu"]
    pairs = {
        "train": f"{PROBLEMS}demonstrations?size=80",
        "val_fraction": 0.1,
        "completion_template": "{{ completion }}",
    }
    first = overlay(
        tmp_path / "first.yaml",
        {"pretrained": TINY, "max_iterations": 2, "lr_scheduler": CONSTANT},
        pairs,
    )
    recipe = ["-c", CONFIGS / "reasoning_gemma2_2b_sft.yaml", "-c", first]
    assert program("fit", *recipe, *cpu, "--run_dir", supervised) == 0
    shown = csv.DictReader((supervised / "metrics.csv").read_text().splitlines())
    assert {"sft/loss", "sft/token_accuracy", "val/perplexity"} <= {*next(shown)}

    second = overlay(
        tmp_path / "second.yaml",
        {"pretrained": str(supervised / "final_model"), "max_completion_length": 40}
        | {"max_iterations": 2},
        {"train": f"{PROBLEMS}train?size=40", "val_fraction": 0.1, "batch_size": 4},
        trainer={"limit_val_batches": 1},
    )
    recipe = ["-c", CONFIGS / "reasoning_gemma2_2b.yaml", "-c", second]
    capsys.readouterr()
    assert program("fit", *recipe, *cpu, "--run_dir", run) == 0
    printed = capsys.readouterr().out
    for group in range(3):
        assert f"group {group}: rewards" in printed
    assert printed.count("advantages") == 3

    rows = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    trained = [row for row in rows if row["policy/loss"]]
    assert [int(row["step"]) for row in trained] == [1, 2]
    for row in trained:
        assert abs(float(row["policy/advantage_mean"])) < 1e-5
        assert 0 < float(row["policy/advantage_std"]) < 1.01
        for name in ("policy/loss", "reward/mean", "reward/correct", "policy/kl"):
            assert math.isfinite(float(row[name]))
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    config = yaml.safe_load(checkpoint["callbacks"]["RunFolder"]["config"])["model"]["init_args"]
    assert (config["group_size"], config["objective"]["kl_coef"]) == (4, 0.01)
    assert {"temperature": 0.8, "top_k": 50, "top_p": 0.9}.items() <= config["sampling"].items()

    question = "What is 37+21?"
    words = ["--ckpt_path", "last", "--data.prompts", json.dumps([question])]
    assert program("predict", "-c", run / "config.yaml", *words) == 0
    printed = capsys.readouterr().out
    assert f"prompt:    {question}" in printed
    assert "reasoning: 37+21: 7+1=8, 3+2=5" in printed
    assert "answer:    58" in printed


# --- the checks, each by what it finds ---


def reward(completions):
    return [1.0] * len(completions)


def test_a_group_of_one_is_refused_before_training():
    with pytest.raises(ValueError, match="group_size is 1, but this objective compares"):
        GRPO(TINY, {"correct": Reward(reward)}, group_size=1)


def test_a_model_without_tokenizer_is_refused_before_training(architecture, tmp_path):
    # For some architectures transformers makes one of special tokens only, and says nothing.
    tiny_model(architecture).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tokenizer"):
        load_tokenizer(str(tmp_path))


def test_pairs_in_place_of_prompts_are_refused_before_training(tmp_path, program, capsys):
    recipe = tmp_path / "recipe.yaml"
    rewards = {"correct": {"function": "litgrpo.rewards.correctness"}}
    settings = {"pretrained": TINY, "rewards": rewards, "max_completion_length": 64}
    content = {
        "model": {"class_path": "GRPO", "init_args": settings},
        "data": {
            "class_path": "PairData",
            "init_args": {"train": f"{PROBLEMS}demonstrations?size=80", "val_fraction": 0.2},
        },
    }
    recipe.write_text(yaml.safe_dump(content))
    run = tmp_path / "run"
    assert program("fit", "-c", recipe, "--run_dir", run, "--trainer.accelerator", "cpu") == 2
    error = capsys.readouterr().err
    assert "PairBatch" in error
    assert not list(run.glob("checkpoints/*"))


def test_rows_are_prompts_times_completions():
    ids = torch.ones(5, 2, dtype=torch.long)
    flags = torch.zeros(5, dtype=torch.bool)
    with pytest.raises(ValueError, match="completion_ids"):
        Rollout(prompt_batch("a", "b"), 3, ids, ids.bool(), -ids.float(), flags, ["x"] * 5)


def test_rewards_make_whole_groups():
    composite = Scorer({"correct": Reward(reward)})
    with pytest.raises(ValueError, match="5 completions do not make whole groups of 3"):
        composite(["p"] * 5, ["c"] * 5, {}, group_size=3)


def test_advantages_of_a_group_have_mean_zero():
    check_centered(torch.tensor([[1.0, -1.0], [0.0, 0.0]]), Normalized())
    with pytest.raises(RuntimeError):
        check_centered(torch.tensor([[1.0, -0.5], [0.0, 0.0]]), Normalized())


def test_the_first_groups_are_told_with_rewards_and_advantages():
    total = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    table = RewardTable({"a": total}, {"a": 1.0}, total, torch.ones_like(total, dtype=torch.bool))
    said = format_first_groups(table, total - total.mean(1, keepdim=True), 3).splitlines()
    assert said == [
        "group 0: rewards      1.00   0.00",
        "         advantages   0.50  -0.50",
        "group 1: rewards      0.50   0.50",
        "         advantages   0.00   0.00",
        "group 2: rewards      0.00   1.00",
        "         advantages  -0.50   0.50",
    ]
