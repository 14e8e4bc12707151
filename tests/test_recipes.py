"""Every recipe is read by the real program and runs an iteration, made small enough for a test."""

import csv
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from litgrpo.cli.parser import TRAINER_DEFAULTS
from litgrpo.data.rendering import TextTemplate
from litgrpo.data.sources import SourceRow
from litgrpo.evaluation.evaluator import Evaluation
from litgrpo.models.loading.load import load_policy
from tests.support.recipes import CONFIGS, FEW, parse, read, samples_of, small

RECIPES = sorted(path.name for path in CONFIGS.glob("*.yaml"))
HARDWARE = sorted(path.name for path in CONFIGS.glob("hardware/*.yaml"))
REWARD_MODEL = "reward_model_qwen2.5_1.5b.yaml"


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory) -> dict[str, str]:
    """Persona dialogues as LAPDOG's files have them, one with a retrieved story."""
    path = tmp_path_factory.mktemp("dialogues") / "train.jsonl"
    rows = [
        {
            "question": f"persona: i am {n}. i have {n} dogs. context:  Q: how old are you ?",
            "answers": [f"i am {n} , my dogs are not ."],
        }
        for n in range(100)
    ]
    rows[0]["passages"] = [{"title": "Ben", "text": "Ben was one."}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"train": str(path)}


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> dict[str, str]:
    """Word problems, every second shown with a calculator."""
    folder, files = tmp_path_factory.mktemp("problems"), {}
    for name, first in (("train", 0), ("val", 20)):
        rows = []
        for n in range(first, first + 20):
            texts = [f"{n} + 1 = {n + 1}\n#### {n + 1}"]
            if n % 2 == 0:
                texts = [f"<call>{n} + 1</call>", f"<res>{n + 1}</res>", f"#### {n + 1}"]
            completion = [
                {"role": ("assistant", "user")[turn % 2], "content": text}
                for turn, text in enumerate(texts)
            ]
            row = {"question": f"{n} and 1?", "answer": str(n + 1), "completion": completion}
            rows.append(json.dumps(row) + "\n")
        files[name] = str(folder / f"{name}.jsonl")
        Path(files[name]).write_text("".join(rows))
    return files


# reasoning-gym is an optional package; tests/data/test_reasoning_gym.py tests its rows.
WITH_BUILTIN_ROWS = [name for name in RECIPES if not name.startswith("reasoning_gym")]


# A model that was fine-tuned with a tool does not need the tool in its prompt.
@pytest.mark.filterwarnings("ignore:.*does not list the tools")
@pytest.mark.parametrize("name", WITH_BUILTIN_ROWS)
def test_a_recipe_runs_an_iteration(
    name, tmp_path, program, gsm8k, questions, dialogues, problems, models
):
    recipe, override, folder = read(name), tmp_path / "small.yaml", tmp_path / "run"
    if "litgrpo.rewards.cheerful" in (CONFIGS / name).read_text():
        pytest.importorskip("vaderSentiment", reason="not installed; .ci/nightly real runs it")
    rows = gsm8k if "columns" in recipe["data"]["init_args"] else questions
    rows = dialogues if name.startswith("convai2") else rows
    rows = problems if name.startswith("smollm2_wordproblems") else rows
    override.write_text(yaml.safe_dump(small(recipe, models, rows)))
    words = ["-c", CONFIGS / name, "-c", override, "--trainer.accelerator", "cpu"]

    assert program("fit", *words, "--run_dir", folder) == 0

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["before"].keys() == summary["after"].keys()
    load_policy(str(folder / "final_model"))
    samples = samples_of(folder)
    assert bool(samples) == ("rewards" in recipe["model"]["init_args"])
    for sample in samples:
        if rows is gsm8k:
            assert sample["columns"]["answer"].isdigit()
        if rows is dialogues:
            assert sample["columns"]["answers"][0].endswith("dogs are not .")
        assert sample["prompt"].strip()
    if "test" in recipe["data"]["init_args"]:
        of_run = ["-c", folder / "config.yaml", "--ckpt_path", "last"]
        assert program("test", *of_run) == 0
        tested = json.loads((folder / "test.json").read_text()).keys()
        assert tested - {"checkpoint", "iteration"} == summary["after"].keys()


def test_retrieved_stories_follow_the_question():
    template = read("convai2_flan_t5_small.yaml")["data"]["init_args"]["template"]
    row = {"prompt": "persona: i swim. context:  Q: hi ?"}
    stories = [{"title": "Ben", "text": "Ben was one."}, {"title": "Sea", "text": "It is blue."}]
    stories_text = " story title: Ben story: Ben was one. story title: Sea story: It is blue."
    for passages, behind in (({}, ""), ({"passages": stories}, stories_text)):
        text = TextTemplate("prompt", template).render(SourceRow(row | passages, "here", 0))
        assert text == row["prompt"] + behind


def test_the_reward_model_recipe_logs_saves_and_resumes(program, models, questions, tmp_path):
    recipe, override = read(REWARD_MODEL), tmp_path / "small.yaml"
    settings = small(recipe, models, questions)
    settings["export"] = {"every_n_iterations": 1}
    settings["checkpoint"] = {"every_n_iterations": 1, "keep_last": 3}
    override.write_text(yaml.safe_dump(settings))
    words = ["-c", CONFIGS / REWARD_MODEL, "-c", override, "--trainer.accelerator", "cpu"]
    words += ["--model.max_iterations", "3", "--model.lr_scheduler.total_iters", "4"]
    words += ["--model.optimizer.lr", "1e-2", "--model.update.micro_batch_size", "1"]
    words += ["--model.rewards.judge.function.pretrained", models["judge"]]
    run = tmp_path / "run"

    assert program("fit", *words, "--run_dir", run) == 0

    rows = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    trained = [row for row in rows if row["optim/lr"]]
    rates = [float(row["optim/lr"]) for row in trained]
    # Means over two mini-batches; the first four have 0.01, 0.2575, 0.505 and 0.7525 of the rate.
    assert rates == pytest.approx([0.13375e-2, 0.62875e-2, 1e-2])
    assert float(trained[-1]["policy/kl"]) > 0
    for name in ("reward/judge", "policy/clip_low_frac", "policy/clip_high_frac"):
        assert all(row[name] for row in trained)
    assert len({sample["rewards"]["judge"] for sample in samples_of(run)}) > 1

    folder = run / "model-3"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "Hello."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    generated = model.generate(**ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert generated.shape[1] > ids["input_ids"].shape[1]

    from_first = [
        "--ckpt_path",
        run / "checkpoints/iteration=000001.ckpt",
        "--run_dir",
        tmp_path / "resumed",
    ]
    assert program("fit", "-c", run / "config.yaml", *from_first) == 0
    assert program("export", run / "checkpoints/iteration=000003.ckpt", tmp_path / "exported") == 0
    final = load_file(run / "final_model" / "model.safetensors")
    first = load_file(run / "model-1" / "model.safetensors")
    assert any(not torch.equal(first[name], final[name]) for name in final)
    for copy in (folder, tmp_path / "resumed" / "final_model", tmp_path / "exported"):
        weights = load_file(copy / "model.safetensors")
        assert all(torch.equal(weights[name], final[name]) for name in final)


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_weights_and_biases_gets_every_number_at_its_iteration(
    program, gsm8k, tmp_path, monkeypatch
):
    import wandb

    for name, value in {"MODE": "offline", "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    rows, log = [], wandb.sdk.wandb_run.Run.log
    monkeypatch.setattr(
        wandb.sdk.wandb_run.Run,
        "log",
        lambda run, row, *args, **kwargs: (rows.append((run, row)), log(run, row, *args, **kwargs)),
    )
    override = tmp_path / "small.yaml"
    override.write_text(yaml.safe_dump(small(read("quickstart.yaml"), {"judge": ""}, gsm8k)))
    words = ["-c", CONFIGS / "quickstart.yaml", "-c", override, "--trainer.accelerator", "cpu"]
    words += ["--model.max_iterations", "3", "--run_dir", tmp_path / "named"]
    words += ["--trainer.logger", "WandbLogger", "--trainer.logger.project", "litgrpo"]
    assert program("fit", *words, "--trainer.logger.save_dir", tmp_path) == 0
    wandb.finish()

    run = rows[0][0]
    assert (run.project, run.name) == ("litgrpo", "named")
    step = "trainer/global_step"
    assert [row[step] for _, row in rows if "reward/correct" in row] == [1, 2, 3]
    tables = [row for _, row in rows if "completions" in row]
    assert [row[step] for row in tables] == [1, 3]  # the first and the last
    columns = ["prompt", "completion", "correct", "format", "reward", "advantage"]
    assert tables[0]["completions"].columns == columns
    assert len(tables[0]["completions"].data) == 2 * FEW


@pytest.mark.parametrize("name", HARDWARE)
def test_a_hardware_config_changes_only_the_keys_that_it_sets(name):
    recipe, override = CONFIGS / "quickstart.yaml", CONFIGS / "hardware" / name
    without, with_override = (
        dict(leaves(parse(*paths).as_dict())) for paths in ([recipe], [recipe, override])
    )
    changes = dict(leaves(read(f"hardware/{name}")))
    # A class that it names brings its own arguments, at their defaults.
    named = tuple(key.removesuffix("class_path") for key in changes if key.endswith(".class_path"))
    assert changes.items() <= with_override.items()
    changed = {
        key
        for key in without.keys() | with_override.keys()
        if without.get(key) != with_override.get(key) and key != ".config"
    }
    assert {
        key for key in changed if not f"{key}.".startswith(named or "nothing")
    } <= changes.keys()


def test_a_config_with_static_shapes_rejects_episodes(program, capsys, tmp_path):
    words = ["-c", CONFIGS / "quickstart.yaml", "-c", CONFIGS / "hardware" / "tpu.yaml"]
    words += ["--trainer.accelerator", "cpu"]
    words += ["--model.environment", "litgrpo.environments.examples.NumberGame"]
    words += ["--run_dir", tmp_path / "run"]
    assert program("fit", *words, "--model.episode.turn_format", "inline") == 2
    error = capsys.readouterr().err
    assert error.count("StaticEngine does not support episodes") == 1
    assert "engine: {class_path: LocalEngine}" in error


def leaves(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested dicts with its dotted name."""
    if not isinstance(node, dict):
        yield place, tuple(node) if isinstance(node, list) else node
        return
    for name, value in node.items():
        yield from leaves(value, f"{place}.{name}")


def available(accelerator: Any) -> bool:
    """True if a config names an accelerator, not a class, that this machine has."""
    known = isinstance(accelerator, str) and accelerator in AcceleratorRegistry
    return known and AcceleratorRegistry[accelerator]["accelerator"].is_available()


@pytest.mark.parametrize(
    "name",
    [n for n in HARDWARE if available(read(f"hardware/{n}").get("trainer", {}).get("accelerator"))],
)
def test_a_config_of_hardware_that_is_here_runs(name, tmp_path, program, gsm8k):
    recipe, override = "quickstart.yaml", tmp_path / "small.yaml"
    override.write_text(yaml.safe_dump(small(read(recipe), {"judge": ""}, gsm8k)))
    words = ["-c", CONFIGS / recipe, "-c", CONFIGS / "hardware" / name, "-c", override]
    assert program("fit", *words, "--run_dir", tmp_path / "run") == 0


def test_an_unreachable_server_ends_the_run_with_exit_code_75(program, tmp_path, capsys):
    words = ["-c", CONFIGS / "quickstart.yaml", "-c", CONFIGS / "hardware" / "server.yaml"]
    words += ["--model.engine.init_args.urls", '["http://127.0.0.1:9"]']
    words += ["--model.engine.init_args.wait_s", "0", "--run_dir", tmp_path / "run"]
    assert program("fit", *words, "--trainer.accelerator", "cpu") == 75
    error = capsys.readouterr().err
    assert "error: No server responds: http://127.0.0.1:9 unavailable" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("name", RECIPES)
def test_the_evaluation_settings_of_a_recipe_are_valid(name):
    # The small runs above override the number of samples.
    given = read(name)["model"]["init_args"].get("evaluation", {})
    given.pop("corpus_metrics", None)  # the name of a class, which the parser builds
    assert vars(Evaluation(**given)).items() >= given.items()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_states_only_what_differs_from_the_defaults(name):
    recipe = read(name)
    repeated = [*repeats(recipe.get("trainer", {}), Trainer, TRAINER_DEFAULTS)]
    for part in ("model", "data"):
        module, _, attribute = recipe[part]["class_path"].rpartition(".")
        repeated += repeats(recipe[part]["init_args"], getattr(import_module(module), attribute))
    assert not repeated


def repeats(given: dict, target: Callable, ours: dict | None = None) -> Iterator[str]:
    """Yield the names of given values that equal the default of a class's argument."""
    parameters = inspect.signature(target).parameters
    for name, value in given.items():
        default = (ours or {}).get(name, parameters[name].default)
        if value == default:
            yield name
        if is_dataclass(default) and isinstance(value, dict):
            yield from (f"{name}.{field}" for field in repeats(value, type(default)))
