import re
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from litgrpo import GRPO, PromptData
from litgrpo.cli.main import COMMANDS
from litgrpo.cli.mistakes import OTHER_COMMANDS, find_mistake, last_line
from litgrpo.cli.options import find_option, options_of
from litgrpo.cli.parser import CALLBACKS, RUN_OPTIONS
from litgrpo.foreign_names import OTHER_NAMES, other_name
from litgrpo.tools.audit.command import audit
from litgrpo.tools.compare import compare
from litgrpo.tools.plan.command import plan

PAGES = Path(__file__).parents[2] / "docs" / "howto"
OPTION = re.compile(r"`((?:model|data|trainer|checkpoint|completions)\.[\w.]+|run_dir|ckpt_path)")
ROOTS = {"model": GRPO, "data": PromptData, "trainer": Trainer, **CALLBACKS}


def error_of(run, *words: str) -> str:
    """The one line that a rejected command prints."""
    code, _, err = run(*words)
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("trainer.max_epoch", "trainer.max_epochs"),
        ("model.group_sise", "model.group_size"),
        ("model.init_args.group_sise", "model.group_size"),
        ("model.objective.kl_coeff", "model.objective.kl_coef"),
        ("model.optimizer.lrr", "model.optimizer.lr"),
        ("model.rewards.correct.weigth", "model.rewards.correct.weight"),
        ("data.batchsize", "data.batch_size"),
        ("checkpoint.every", "checkpoint.every_n_iterations"),
        ("run_dri", "run_dir"),
    ],
)
def test_a_wrong_option_gets_one_line_with_the_nearest_valid_option(cli, key, nearest):
    line = error_of(cli, "fit", "-c", "grpo.yaml", f"--{key}", "3")
    assert repr(key.replace(".init_args", "")) in line
    assert repr(nearest) in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--trainer.max_epochs many", ("trainer.max_epochs", "many", "int or null")),
        ("--model.group_size four", ("model.group_size", "four", "int")),
        ("--model.sampling.top_p all", ("model.sampling.top_p", "all", "float")),
        ("--model.rewards.correct.weight abc", ("model.rewards.correct.weight", "abc", "float")),
        ("--checkpoint.mode 3", ("checkpoint.mode", "'max' or 'min'")),
        ("--model GPRO", ("model", "GPRO", "GRPO")),
        ("--model.engine LocalEngin", ("model.engine", "LocalEngin", "LocalEngine")),
        ("--model.reward_runner.timeout_s 2", ("--model.reward_runner CLASS", "ProcessRunner")),
        ("--seed_everything", ("--seed_everything", "needs a value")),
    ],
)
def test_a_wrong_value_gets_one_line_with_its_option_and_what_is_expected(cli, words, said):
    line = error_of(cli, "fit", "-c", "grpo.yaml", *words.split())
    assert [text for text in said if text not in line] == []


@pytest.mark.parametrize("key", ["model.sampling.repetition_penalty", "repetition_penalty"])
def test_an_option_that_is_left_out_on_purpose_gets_the_reason_and_an_alternative(cli, key):
    line = error_of(cli, "fit", "-c", "grpo.yaml", f"--{key}", "1.1")
    assert repr(key) in line
    assert "litgrpo.rewards.repetition" in line


def test_a_missing_or_broken_recipe_is_one_line(cli):
    line = error_of(cli, "fit", "-c", "absent.yaml")
    assert "'absent.yaml'" in line
    assert str(Path.cwd()) in line
    Path("broken.yaml").write_text("model: [1\n")
    assert "broken.yaml" in error_of(cli, "fit", "-c", "broken.yaml")
    Path("text.yaml").write_text("just text")
    assert "text.yaml" in error_of(cli, "fit", "-c", "text.yaml")


@pytest.mark.parametrize("settings", ["{init_args: {%s}}", "{%s}"])
def test_a_mistake_in_a_recipe_is_reported_the_same_way(cli, settings):
    wrong = "rewards: {correct: {function: litgrpo.rewards.correctness, weigth: 2}}"
    Path("more.yaml").write_text(f"model: {settings % wrong}\n")
    line = error_of(cli, "fit", "-c", "grpo.yaml", "-c", "more.yaml")
    assert "'model.rewards.correct.weigth' (of Reward)" in line
    assert "'model.rewards.correct.weight'" in line


def test_without_a_recipe_the_message_names_what_is_missing(cli):
    line = error_of(cli, "fit")
    assert "model.pretrained, model.rewards" in line
    assert "-c quickstart" in line


def test_a_value_that_a_class_rejects_is_one_line(cli):
    assert "group_size is 0" in error_of(cli, "fit", "-c", "grpo.yaml", "--model.group_size", "0")


def test_an_unknown_kl_estimator_names_the_known_ones(cli):
    line = error_of(cli, "fit", "-c", "grpo.yaml", "--model.objective.kl_estimator", "kk1")
    assert "model.objective.kl_estimator" in line
    assert "k1" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fit", "-c", "grpo.yaml", "--chip", "v5e"), "plan --help"),
        (("fit", "-c", "grpo.yaml", "--output_dir", "x"), "'run_dir'"),
        (("fit", "-c", "grpo.yaml", "--learning_rate", "1"), "'model.optimizer.lr'"),
        (("fit", "-c", "grpo.yaml", "--model.learning_rate", "1"), "'model.optimizer.lr'"),
        (("fit", "-c", "grpo.yaml", "--model.num_generations", "8"), "'model.group_size'"),
        (("fit", "-c", "grpo.yaml", "--model.beta", "0.1"), "'model.objective.kl_coef'"),
        (
            ("fit", "-c", "grpo.yaml", "--model.max_new_tokens", "9"),
            "'model.max_completion_length'",
        ),
        (("fit", "-c", "grpo.yaml", "--model.batch_size", "8"), "'data.batch_size'"),
        (("fit", "-c", "grpo.yaml", "--model.peft_config", "x"), "'model.lora'"),
        (("fit", "-c", "grpo.yaml", "--model.update.num_iterations", "2"), "epochs_per_rollout'"),
        (("fit", "-c", "grpo.yaml", "--actor_rollout_ref.rollout.n", "8"), "'model.group_size'"),
        (("export", "--run_dir", "x"), "checkpoint, folder, dtype, force, adapter"),
    ],
)
def test_an_option_of_another_command_or_trainer_gets_the_right_one(cli, words, said):
    assert said in error_of(cli, *words)


def test_options_of_other_commands_exist():
    functions = {"plan": plan, "audit": audit, "compare": compare}
    for key, command in OTHER_COMMANDS.items():
        assert command in COMMANDS
        assert key in options_of(functions[command])


@pytest.mark.parametrize("target", sorted({*OTHER_NAMES.values()}))
def test_names_of_trl_and_verl_lead_to_options_that_exist(target):
    if target not in (*RUN_OPTIONS, "ckpt_path", "seed_everything"):
        assert find_option(target, ROOTS).key == target


@pytest.mark.parametrize("trainer", ["trl", "verl"])
def test_hints_agree_with_the_tables_of_options(trainer):
    page = (PAGES / f"coming_from_{trainer}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \| (.+) \|$", page, re.MULTILINE)
    pairs = [
        (name, keys)
        for names, text in rows
        if (keys := OPTION.findall(text))
        for name in re.findall(r"`([\w.]+)`", names)
    ]
    assert len(pairs) > 40
    same = ("name", "trainer.logger")  # too general, and the option's own name
    hints = {name: (other_name(name), keys) for name, keys in pairs if name not in same}
    assert {name: hint for name, hint in hints.items() if not leads(*hint)} == {}


def leads(key: str, keys: list[str]) -> bool:
    """Return whether an option, or one above or below it, is among others."""
    return any(key and f"{a}.".startswith(f"{b}.") for k in keys for a, b in ((key, k), (k, key)))


def test_the_longest_end_of_a_foreign_name_counts():
    assert other_name("actor_rollout_ref.actor.optim.lr") == "model.optimizer.lr"
    assert other_name("model.nothing") == ""


def test_settings_without_a_mistake_are_accepted():
    settings = {"model": {"class_path": "GRPO", "pretrained": "a", "rewards": {}}, "run_dir": "x"}
    assert find_mistake(settings, {"model": GRPO}, ["run_dir"]) == ""


def test_the_last_line_that_is_not_about_the_given_value_is_kept():
    assert (
        last_line("a\n  - Expected a <class 'int'>\nGiven value: 3") == "Expected a <class 'int'>"
    )


class Picky:
    """A class whose constructor raises."""

    def __init__(self) -> None:
        raise RuntimeError("needs a moon\nthat is full")


class Logger(DummyLogger):
    """A logger that cannot be built, as one whose package is missing."""

    def __init__(self) -> None:
        Picky()


def test_a_class_that_cannot_be_built_is_named(cli):
    logger = "tests.cli.test_mistakes.Logger"
    line = error_of(cli, "fit", "-c", "recipe.yaml", "--trainer.logger", logger)
    assert "needs a moon that is full" in line


def test_a_reward_class_that_rejects_its_settings_is_named_with_its_option(cli):
    init_args = "{criteria: {}, judge: litgrpo.rewards.correctness}"
    rubric = f"{{class_path: litgrpo.rewards.Rubric, init_args: {init_args}}}"
    words = ("fit", "-c", "grpo.yaml", "--model.rewards.correct.function", rubric)
    line = error_of(cli, *words)
    assert "model.rewards.correct.function" in line
    assert "criterion" in line
