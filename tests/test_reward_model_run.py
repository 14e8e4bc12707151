"""Policy, reference and reward model together, by the recipe: train, log, stop, resume, use."""

import importlib.util
import json
import struct
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.recipes import CONFIGS, FEW, read, samples_of, small

NAME = "reward_model_qwen2.5_1.5b.yaml"
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.fixture
def words(models, questions, tmp_path) -> list:
    """The recipe, small, for three iterations with a folder each; with a shorter schedule."""
    recipe, overlay = read(NAME), tmp_path / "small.yaml"
    settings = small(recipe, models, questions)
    schedule = dict(recipe["model"]["init_args"]["lr_scheduler"])
    schedule["init_args"] = schedule["init_args"] | {"total_iters": 4}
    learning = recipe["model"]["init_args"]["update"] | {"micro_batch_size": 1}
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2}}
    settings["model"]["init_args"] |= {
        "max_iterations": 3,
        "lr_scheduler": schedule,
        "update": learning,
        "optimizer": optimizer,
    }
    settings["hf_checkpoints"] = {"every_n_iterations": 1}
    overlay.write_text(yaml.safe_dump(settings))
    return ["-c", CONFIGS / NAME, "-c", overlay, "--trainer.accelerator", "cpu"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_every_folder_is_a_model_for_transformers_and_a_place_to_go_on_from(
    words,
    program,
    tmp_path,
):
    run, again = tmp_path / "run", tmp_path / "again"
    assert program("fit", *words, "--run_dir", run) == 0
    folders = [*(run / f"checkpoint-{n}" for n in (1, 2, 3)), run / "final_model"]
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        asked = [{"role": "user", "content": "Hello."}]
        ids = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        said = model.generate(**ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert said.shape[1] > ids["input_ids"].shape[1]
    first, second, third, final = map(weights, folders)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(third[name], final[name]) for name in final)

    from_first = ["--ckpt_path", folders[0], "--run_dir", again]
    assert program("fit", *words, *from_first) == 0
    resumed = weights(again / "final_model")
    assert all(torch.equal(resumed[name], final[name]) for name in final)
    assert program("export", folders[1], tmp_path / "exported") == 0
    exported = weights(tmp_path / "exported")
    assert all(torch.equal(exported[name], second[name]) for name in second)


def test_a_run_shows_reward_clip_kl_and_warm_up(words, program, tmp_path):
    run = tmp_path / "run"
    assert program("fit", *words, "--run_dir", run) == 0
    lines = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    trained = [row for row in rows if row["optim/lr"]]
    assert len(trained) == 3
    rates = [float(row["optim/lr"]) for row in trained]
    assert rates == sorted(rates)
    assert rates[0] < 0.5 * rates[-1] <= 0.5e-2 * 2  # warms up
    assert float(trained[-1]["policy/kl"]) > 0
    for name in ("reward/judge", "policy/clip_low_frac", "policy/clip_high_frac"):
        assert all(row[name] for row in trained)
    judged = {sample["rewards"]["judge"] for sample in samples_of(run)}
    assert len(judged) > 1
    again = ["-c", run / "config.yaml", "--ckpt_path", "last", "--run_dir", run]
    assert program("validate", *again) == 0


def test_the_policy_as_its_own_judge_is_one_line_on_the_terminal(
    words, program, models, tmp_path, capsys
):
    same = ["--model.rewards.judge.function.pretrained", models["qwen2"]]
    run = tmp_path / "run"
    assert program("fit", *words, *same, "--run_dir", run) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: reward model: ")
    assert "is the policy itself" in error
    assert not (run / "metrics.csv").exists()
    asked = ["--model.rewards.judge.function.allow_policy_as_reward", "true"]
    short = ["--model.max_iterations", "1"]
    assert program("fit", *words, *same, *asked, *short, "--run_dir", run) == 0


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_weights_and_biases_gets_every_number_at_its_iteration(
    words,
    program,
    tmp_path,
    monkeypatch,
):
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    given = {"project": "asked", "name": "first", "save_dir": str(tmp_path)}
    settings = [f"--trainer.logger.init_args.{key}={value}" for key, value in given.items()]
    overlay = ["-c", CONFIGS / "loggers" / "wandb.yaml"]
    assert program("fit", *words, *overlay, *settings, "--run_dir", tmp_path / "run") == 0

    import wandb

    wandb.finish()
    file, until = next(tmp_path.glob("wandb/offline-run-*/*.wandb")), time.monotonic() + 30
    steps, tables = [], []
    while (steps, tables) != ([1, 2, 3], [1, 3]) and time.monotonic() < until:  # another writes it
        time.sleep(0.2)
        logged = history(file)
        steps = [row["trainer/global_step"] for row in logged if "reward/judge" in row]
        tables = [row["trainer/global_step"] for row in logged if "completions._type" in row]
    assert steps == [1, 2, 3]
    assert tables == [1, 3]  # the first and the last
    shown = [json.loads(path.read_text()) for path in tmp_path.rglob("completions*.table.json")]
    assert shown[0]["columns"] == ["prompt", "completion", "judge", "reward", "advantage"]
    assert len(shown[0]["data"]) == 2 * FEW


def history(path: Path) -> list[dict]:
    """The numbers of an offline run, one dictionary for each call of `log`."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, logged, parts = path.read_bytes(), [], b""
    place = 7  # the file's header
    while place + 7 <= len(data):
        # LevelDB's log format: blocks of 32 KiB; each part has a checksum, its length and kind.
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, parts = Record.FromString(parts), b""
            items = {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            logged += [items] if items else []
    return logged
