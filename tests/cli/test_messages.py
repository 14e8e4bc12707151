import inspect
from pathlib import Path

import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from litgrpo.arguments import import_by_path
from litgrpo.cli.errors import OF_VERBS, constructor_reason, explain
from litgrpo.cli.verbs import COMMANDS
from tests.cli.running import cli  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    ("key", "owner", "nearest"),
    [
        ("trainer.max_epoch", "", "trainer.max_epochs"),
        ("seed", "", "seed_everything"),
        ("model.group_sise", " (of GRPO)", "model.group_size"),
        ("model.objective.kl_coeff", " (of Objective)", "model.objective.kl_coef"),
        ("model.optimizer.lrr", " (of DefaultAdamW)", "model.optimizer.lr"),
        ("data.batchsize", " (of PromptData)", "data.batch_size"),
        ("checkpoint.every", "", "checkpoint.every_n_iterations"),
    ],
)
def test_a_wrong_key_gets_one_line_with_the_nearest_valid_key(cli, key, owner, nearest):  # noqa: F811
    line = f"error: there is no key {key!r}{owner}: did you mean {nearest!r}?\n"
    assert cli("fit", "-c", "grpo.yaml", f"--{key}", "3") == (2, "", line)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--trainer.max_epochs many", "trainer.max_epochs is 'many', expected int or null"),
        ("--model.group_size four", "model.group_size is 'four', expected int"),
        ("--checkpoint.mode 3", "checkpoint.mode is '3', expected 'max', 'min' or null"),
        ("--model GPRO", "model: there is no class 'GPRO': did you mean 'GRPO'?"),
        (
            "--model.engine LocalEngin",
            "model.engine: there is no class 'LocalEngin': did you mean 'LocalEngine'?",
        ),
        ("--seed_everything", "argument --seed_everything: expected one argument"),
    ],
)
def test_a_wrong_value_gets_one_line_that_says_what_is_expected(cli, words, line):  # noqa: F811
    assert cli("fit", "-c", "grpo.yaml", *words.split()) == (2, "", f"error: {line}\n")


@pytest.mark.parametrize("key", ["model.sampling.repetition_penalty", "repetition_penalty"])
def test_a_key_that_is_left_out_on_purpose_says_why_and_what_to_do(cli, key):  # noqa: F811
    code, _, err = cli("fit", "-c", "grpo.yaml", f"--{key}", "1.1")
    assert code == 2
    (line,) = err.splitlines()
    assert f"there is no key {key!r}: what is sampled would be another distribution" in line
    assert "litgrpo.rewards.repetition" in line


def test_a_missing_or_broken_recipe_is_one_line(cli):  # noqa: F811
    _, _, err = cli("fit", "-c", "absent.yaml")
    assert err.startswith(f"error: there is no recipe 'absent.yaml': no such file in {Path.cwd()}")
    Path("broken.yaml").write_text("model: [1\n")
    _, _, err = cli("fit", "-c", "broken.yaml")
    assert err.startswith("error: Problems parsing config: while parsing a flow sequence line 1")
    assert len(err.splitlines()) == 1


def test_a_mistake_in_a_recipe_is_told_the_same_way(cli):  # noqa: F811
    Path("more.yaml").write_text("model: {init_args: {rewards: {correct: {weigth: 2}}}}\n")
    _, _, err = cli("fit", "-c", "grpo.yaml", "-c", "more.yaml")
    expected = "there is no key 'model.rewards.correct.weigth' (of Reward): did you mean "
    assert err == f"error: {expected}'model.rewards.correct.weight'?\n"


def test_without_a_recipe_the_message_asks_for_one(cli):  # noqa: F811
    _, _, err = cli("fit")
    hint = "give a recipe, such as -c quickstart"
    assert err == f"error: missing: data, model; {hint}\n"


def test_a_value_that_a_class_refuses_is_one_sentence(cli):  # noqa: F811
    code, _, err = cli("fit", "-c", "grpo.yaml", "--model.group_size", "0")
    assert (code, err) == (2, "error: group_size is 0; it must be at least 1.\n")


def test_a_function_is_given_by_its_import_path(cli):  # noqa: F811
    code, _, err = cli("fit", "-c", "grpo.yaml", "--model.objective.kl", "k1")
    assert (code, err) == (
        2,
        "error: model.objective.kl is 'k1', but a function is given by its import path: "
        "litgrpo.algorithms.kl.k1 (there: k1, k2, k3, absolute)\n",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fit", "-c", "grpo.yaml", "--chip", "v5e"), "'plan' takes it (plan --help)"),
        (("fit", "-c", "grpo.yaml", "--folder", "x"), "it is 'run_dir'"),
        (("fit", "-c", "grpo.yaml", "--learning_rate", "1"), "it is 'model.optimizer.lr'"),
        (("compare", "quickstart", "--data.batch_size", "8"), "'fit' takes it; hand it on by"),
        (("audit", "-c", "quickstart", "--trainer.devices", "2"), "write it into a recipe"),
        (("export", "--run_dir", "x"), "here: checkpoint, folder, dtype, force, adapter"),
    ],
)
def test_a_key_of_another_verb_or_trainer_is_sent_there(cli, words, said):  # noqa: F811
    code, _, err = cli(*words)
    assert code == 2
    assert err.startswith("error: there is no key ")
    assert said in err
    assert err.count("\n") == 1


def test_keys_of_other_verbs_are_theirs():
    for key, verb in OF_VERBS.items():
        if verb != "plan":
            function = import_by_path(f"{COMMANDS[verb][0]}.{verb}")
            assert key in inspect.signature(function).parameters


class Picky:
    """Refuses to be made."""

    def __init__(self) -> None:
        raise RuntimeError("needs a moon\nthat is full")


class Logger(DummyLogger):
    """Refuses to be made, as one whose package is missing does."""

    def __init__(self) -> None:
        Picky()


def test_a_constructor_that_refuses_is_heard(cli):  # noqa: F811
    code, _, err = cli(
        "fit", "-c", "recipe.yaml", "--trainer.logger", "tests.cli.test_messages.Logger"
    )
    assert (code, err) == (2, "error: Logger cannot be made: needs a moon that is full\n")


def test_a_setting_of_a_class_that_is_not_chosen_says_what_to_write():
    told = explain(
        'Parser key "model":\n  Parser key "reward_runner":\n'
        "    Expected an instantiatable class, but litgrpo.rewards.RewardRunner is abstract"
    )
    assert "give --model.reward_runner CLASS" in told


def test_a_class_that_refuses_its_settings_is_heard_out_of_the_tree():
    tree = (
        "Does not validate against any of the Union subtypes\n"
        "Subtypes: [<class 'str'>, collections.abc.Callable]\nErrors:\n"
        "  - Expected a <class 'str'>\n  - rubric: highest is 0; it must be above 0\n"
        "Given value: 1"
    )
    assert constructor_reason(tree) == "rubric: highest is 0; it must be above 0"
    assert constructor_reason("rubric: highest is 0") is None
    assert constructor_reason(tree.replace("rubric", "a bug")) is None
