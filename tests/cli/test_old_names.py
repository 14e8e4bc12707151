"""What the previous version wrote and read is understood: recipes, runs, checkpoints, commands."""

# ruff: noqa: F811 (a fixture)

from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch
import yaml

from litgrpo import GRPO
from litgrpo.checkpointing.manifest import manifest_of
from litgrpo.cli.old_names import KEYS, OldNames, current_recipe, current_words
from litgrpo.rewards.lookup import resolved
from litgrpo.training.old_paths import PATHS
from tests.cli.running import cli  # noqa: F401

OLD = Path(__file__).parent / "old_recipes"
LATER = "; the old name works in this version only"
SMALL = ("--model.max_iterations", "1", "--model.evaluation.samples", "1")
SMALL += ("--model.evaluation.pass_at", "[1]", "--trainer.limit_val_batches", "1")
SMALL += ("--model.check_invariants", "false", "--data.batch_size", "2")

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def found(path: str):
    """What a dotted path names, imported as a recipe's names are."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except AttributeError:
        return import_module(path)


def test_an_optimizer_of_torch_is_meant_where_another_library_has_the_name_too():
    names = OldNames()
    text = "model: {init_args: {optimizer: {class_path: AdamW}}, name: AdamW}"
    assert names.text(text) == text.replace("AdamW", "torch.optim.AdamW", 1)
    assert names.words(["--model.optimizer", "SGD"], str)[1] == "torch.optim.SGD"
    assert names.words(["--model.optimizer=Adam8bit"], str) == ["--model.optimizer=Adam8bit"]
    assert not names.met  # nothing to warn of


@pytest.mark.parametrize("old", [old for old in PATHS if "." in old])
def test_every_new_path_is_there_and_the_old_one_is_not_kept_twice(old):
    assert found(PATHS[old]) is not None
    assert OldNames().path(PATHS[old]) == PATHS[old]


def test_every_new_key_is_taken():
    for new in KEYS.values():
        assert new.removeprefix("model.") in signature(GRPO).parameters


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Those of reward functions are left to rewards.lookup.
        ("litgrpo.rewards.math.correctness", "litgrpo.rewards.math.correctness"),
        ("litgrpo.objectives.kl.k1", "litgrpo.algorithms.kl.k1"),
        ("litgrpo.rewards.process_guard.ProcessGuard", "litgrpo.rewards.ProcessRunner"),
        ("litgrpo.strategies.xla.XLASPMDStrategy", "litgrpo.xla.strategy.XLASPMDStrategy"),
        ("EagerEngine", "LocalEngine"),
        ("litgrpo.rewards.mathematics.right", "litgrpo.rewards.mathematics.right"),
        ("litgrpo.rewards.reward_model.RewardModel", "litgrpo.rewards.reward_model.RewardModel"),
        ("mine.objectives.kl", "mine.objectives.kl"),
    ],
)
def test_the_longest_row_of_whole_parts_counts(old, new):
    assert OldNames().path(old) == new


def test_a_recipe_keeps_everything_but_the_names():
    names = OldNames()
    old = (OLD / "reward_model_qwen2.5_1.5b.yaml").read_text()
    new = names.text(old)
    by_hand = old.replace("litgrpo.training.grpo.GRPO", "litgrpo.GRPO")
    by_hand = by_hand.replace("litgrpo.data.prompts.PromptData", "litgrpo.PromptData")
    assert new == by_hand.replace("    learning: {", "    update: {")
    assert names.met.keys() == {
        "litgrpo.training.grpo.GRPO",
        "litgrpo.data.prompts.PromptData",
        "model.learning",
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"model": {"guard": {"class_path": "ProcessGuard"}}}', None),
        ("model: &m {init_args: {guard: ProcessGuard}}\nother: *m\n", None),
        ("model:\n  guard: {init_args: {guard: 1}}  # guard\ndata: {guard: 2}\n", None),
        ("model: {1: [EagerEngine, 2, 1e-4, yes]}", None),
        ("", ""),
        ("model: [1\n", "model: [1\n"),
        ("model: {learning: {a: 1}, update: {b: 2}}", "model: {learning: {a: 1}, update: {b: 2}}"),
    ],
)
def test_only_names_change_in_any_yaml(old, new):
    by_hand = old.replace("ProcessGuard", "ProcessRunner").replace("EagerEngine", "LocalEngine")
    by_hand = by_hand.replace("guard", "reward_runner", 1)
    by_hand = by_hand.replace("{reward_runner: 1}", "{guard: 1}")
    assert OldNames().text(old) == (by_hand if new is None else new)


def test_a_command_line_is_read_in_both_spellings(tmp_path, capsys):
    words = ["--model.learning.epochs_per_rollout", "2", "--model.init_args.guard=InProcessGuard"]
    words += ["--model.engine", "{class_path: EagerEngine, init_args: {max_rows: 2}}", "-c", "none"]
    words += ["--model", '{"init_args": {"max_redraws": 1}}', "--data.prompts", "[a: b", "--x=-1"]
    new = [
        "--model.update.epochs_per_rollout",
        "2",
        "--model.init_args.reward_runner=InProcessRunner",
    ]
    new += ["--model.engine", "{class_path: LocalEngine, init_args: {max_rows: 2}}", "-c", "none"]
    new += [
        "--model",
        '{"init_args": {"dynamic_sampling_attempts": 1}}',
        "--data.prompts",
        "[a: b",
        "--x=-1",
    ]
    recipe = tmp_path / "new.yaml"
    recipe.write_text("seed_everything: 1\n")
    new[new.index("none")] = words[words.index("none")] = str(recipe)
    assert current_words(words, tmp_path, lambda _: None) == new
    assert capsys.readouterr().err.splitlines() == [
        f"warning: model.learning is now model.update{LATER}",
        f"warning: model.guard is now model.reward_runner{LATER}",
        f"warning: InProcessGuard is now InProcessRunner{LATER}",
        f"warning: EagerEngine is now LocalEngine{LATER}",
        f"warning: model.max_redraws is now model.dynamic_sampling_attempts{LATER}",
    ]


def test_two_recipes_of_one_name_keep_their_name_and_their_content(tmp_path):
    files = [tmp_path / folder / "a.yaml" for folder in ("one", "two")]
    for number, path in enumerate(files):
        path.parent.mkdir()
        path.write_text(f"model: {{learning: {{epochs_per_rollout: {number}}}}}")
    (tmp_path / "copies").mkdir()
    words = ["-c", str(files[0]), f"--config={files[1]}"]
    _, first, _, second = current_words(words, tmp_path / "copies", lambda _: None)
    assert Path(first).stem == Path(second).stem == "a"
    read = [yaml.safe_load(Path(path).read_text()) for path in (first, second)]
    assert read == [{"model": {"update": {"epochs_per_rollout": number}}} for number in (0, 1)]


def with_functions(config: dict) -> dict:
    """A configuration with the reward functions themselves in place of their paths."""
    for name, part in config["model"]["init_args"]["rewards"].items():
        if isinstance(part["function"], str):
            part["function"] = resolved(name, part["function"], part["kwargs"])
    return config


@pytest.mark.parametrize(
    "recipe", ["quickstart", "reasoning_gemma2_2b", "reward_model_qwen2.5_1.5b"]
)
def test_an_old_recipe_is_read_as_the_new_one(recipe, cli):
    new = Path(__file__).parents[2] / "configs" / f"{recipe}.yaml"
    shown = [cli("fit", "-c", str(path), "--print_config") for path in (OLD / new.name, new)]
    assert [code for code, _, _ in shown] == [0, 0]
    contents = [with_functions(yaml.safe_load(out)) for _, out, _ in shown]
    assert contents[0] == contents[1]
    assert "warning: litgrpo.training.grpo.GRPO is now litgrpo.GRPO" in shown[0][2]
    assert shown[1][2] == ""


def test_a_recipe_of_today_has_no_old_names(capsys):
    for path in (Path(__file__).parents[2] / "configs").rglob("*.yaml"):
        current_recipe(path.read_text())
    assert capsys.readouterr().err == ""


def test_plan_and_audit_read_old_recipes(cli, caplog):
    gemma, spmd = str(OLD / "reasoning_gemma2_2b.yaml"), str(OLD / "tpu_spmd.yaml")
    words = ("-c", gemma, "-c", spmd, "--model.learning.micro_batch_size", "8")
    code, out, err = cli("plan", *words)
    assert code == 0
    assert "FITS" in out
    assert f"warning: model.learning is now model.update{LATER}\n" in err
    code, out, err = cli("audit", "-c", str(OLD / "quickstart.yaml"), "--limit", "5")
    assert code == 0
    assert "PASS" in out
    assert "warning: litgrpo.training.grpo.GRPO is now litgrpo.GRPO" in err
    moved = "litgrpo.rewards.math.correctness is now litgrpo.rewards.correctness"
    assert moved in caplog.text


def test_a_run_and_its_checkpoint_of_the_previous_version_are_understood(cli):
    recipe = str(OLD / "quickstart.yaml")
    code, _, _ = cli("fit", "-c", recipe, *SMALL)
    assert code == 0
    path = Path("runs/quickstart/checkpoints/last.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    # As the previous version wrote it.
    config = checkpoint["callbacks"]["RunFolder"]["config"]
    back = {"litgrpo.GRPO": "litgrpo.training.grpo.GRPO", "    update:": "    learning:"}
    back |= {"engines.local.LocalEngine": "eager_engine.EagerEngine"}
    for new, old in back.items():
        assert new in config
        config = config.replace(new, old)
    checkpoint["callbacks"]["RunFolder"]["config"] = config
    del checkpoint["manifest"]
    torch.save(checkpoint | {"manifest": manifest_of(checkpoint)}, path)
    Path("runs/quickstart/config.yaml").write_text(config)

    code, _, err = cli("export", "runs/quickstart", "out")
    assert code == 0
    assert "warning: model.learning is now model.update" in err
    weights = [
        Path(folder, "model.safetensors") for folder in ("out", "runs/quickstart/final_model")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    resume = ("-c", "runs/quickstart/config.yaml", "--ckpt_path", "last")
    code, out, err = cli("fit", *resume, "--model.max_iterations", "2")
    assert code == 0
    assert "2 iterations, " in out
    assert "warning: litgrpo.training.grpo.GRPO is now litgrpo.GRPO" in err


@pytest.mark.parametrize(
    "given",
    [
        "{class_path: litgrpo.rollout.engines.base.SingleTurn}",
        "\n    class_path: litgrpo.rollout.engines.base.SingleTurn",
        "{class_path: SingleTurn, init_args: {}}",
        "SingleTurn",
    ],
)
def test_an_environment_that_did_nothing_is_none(given):
    names = OldNames()
    recipe = yaml.safe_load(names.text(f"model:\n  environment: {given}\n  seed: 3\n"))
    assert recipe == {"model": {"environment": None, "seed": 3}}
    assert names.met == {"environment: SingleTurn": "environment: null"}
