"""Every recipe is read by the real program and runs an iteration, made small enough for a test."""

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry

from litgrpo.algorithms.losses import ImportanceCorrection
from litgrpo.cli.parser import TRAINER_DEFAULTS
from litgrpo.data.rendering import TextTemplate
from litgrpo.data.sources import SourceRow
from litgrpo.evaluation.evaluator import Evaluation
from litgrpo.models.loading import load_policy
from tests.support.recipes import CONFIGS, read, samples_of, small

RECIPES = sorted(path.name for path in CONFIGS.glob("*.yaml"))
HARDWARE = sorted(path.name for path in CONFIGS.glob("hardware/*.yaml"))


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
        pytest.importorskip("vaderSentiment", reason="not installed; .ci/real runs it")
    if "agent_examples" in (CONFIGS / name).read_text():
        pytest.importorskip("openai", reason="openai is not installed")
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
        assert program("test", *words, "--run_dir", folder, "--ckpt_path", "last") == 0
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


@pytest.mark.parametrize("name", HARDWARE)
def test_a_hardware_config_changes_only_the_keys_that_it_sets(name, program, capsys):
    shown = []
    for overrides in ([], ["-c", CONFIGS / "hardware" / name]):
        with pytest.raises(SystemExit) as stop:
            program("fit", "-c", CONFIGS / "quickstart.yaml", *overrides, "--print_config")
        assert stop.value.code == 0
        shown.append(dict(leaves(yaml.safe_load(capsys.readouterr().out))))
    without, with_override = shown
    changes = dict(leaves(read(f"hardware/{name}")))
    # A class that it names brings its own arguments, at their defaults.
    named = tuple(key.removesuffix("class_path") for key in changes if key.endswith(".class_path"))
    assert changes.items() <= with_override.items()
    changed = {key for key, _ in with_override.items() ^ without.items()}
    assert {
        key for key in changed if not f"{key}.".startswith(named or "nothing")
    } <= changes.keys()


@pytest.mark.parametrize("name", ["xla_cpu.yaml", "tpu.yaml"])
def test_configs_with_static_shapes_reject_episodes(name, program, capsys, tmp_path):
    words = ["-c", CONFIGS / "quickstart.yaml", "-c", CONFIGS / "hardware" / name]
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


@pytest.mark.parametrize("name", HARDWARE)
def test_a_hardware_config_runs_if_the_hardware_is_available(name, tmp_path, program, gsm8k):
    accelerator = read(f"hardware/{name}").get("trainer", {}).get("accelerator")
    if accelerator is None:
        pytest.skip("tests/vllm and tests/rollout/engines train with what samples elsewhere")
    if accelerator == "auto":
        pytest.skip("tests/parallel trains with it, in separate processes")
    if isinstance(accelerator, dict):
        pytest.skip("tests/xla trains with it, in separate processes")
    if not AcceleratorRegistry[accelerator]["accelerator"].is_available():
        pytest.skip(f"no {accelerator} here")
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
    assert "error: No vLLM server responds: http://127.0.0.1:9 unavailable" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("corrections/*.yaml")), ids=lambda p: p.stem)
def test_a_correction_states_every_field(path):
    (given,) = yaml.safe_load(path.read_text())["model"]["init_args"]["objective"].values()
    assert vars(ImportanceCorrection(**given)) == given


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
