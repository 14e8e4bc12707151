import inspect
import re
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from litgrpo import GRPO, SFT, PairData, PromptData
from litgrpo.argument_types import UNSET, classes_in, members
from litgrpo.cli.main import COMMANDS
from litgrpo.cli.mistakes import (
    find_mistake,
    is_accepted,
    last_line,
    mistake_in,
    other_name,
    suggest_value,
)
from litgrpo.cli.options import Option, find_option, options_of, owners_of
from litgrpo.cli.parser import (
    CALLBACKS,
    RUN_OPTIONS,
    configure_jsonargparse,
    import_named_classes,
    read_words,
)
from litgrpo.cli.settings import CommandLine, read_option
from litgrpo.foreign_names import OTHER_NAMES
from tests.support.command_line import GRPO_RECIPE, error_of

ROOTS = {"model": GRPO, "data": PromptData, "trainer": Trainer, **CALLBACKS}
TOP = {name: Option(name, kind, UNSET, "") for name, kind in ROOTS.items()}
TOP |= {name: Option(name, kind, None, "") for name, (kind, *_) in RUN_OPTIONS.items()}
TOP |= {name: Option(name, UNSET, None, "") for name in ("ckpt_path", "seed_everything")}
REPEATS = "litgrpo.rewards.repetition"
# What jsonargparse and Python say, and users cannot read.
INTERNALS = re.compile(r"<class|typing|Union\[|Namespace|Got value|zip\(|Traceback|litgrpo\.\w+\.")


@pytest.fixture
def fit(monkeypatch, tmp_path):
    """Return a function that returns what is wrong with the options of a `fit` of a recipe."""
    monkeypatch.chdir(tmp_path)
    Path("grpo.yaml").write_text(GRPO_RECIPE)
    configure_jsonargparse()
    import_named_classes()

    def find(*words: str) -> str:
        try:
            return find_mistake(CommandLine.read(["-c", "grpo.yaml", *words], ROOTS).settings, TOP)
        except ValueError as error:
            return str(error)

    return find


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
def test_a_wrong_option_gets_one_line_with_the_nearest_valid_option(fit, key, nearest):
    line = fit(f"--{key}", "3")
    assert repr(key.replace(".init_args", "")) in line
    assert repr(nearest) in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--trainer.max_epochs many", ("trainer.max_epochs", "many", "int or null")),
        ("--model.group_size four", ("model.group_size", "four", "int")),
        ("--model.sampling.top_p all", ("model.sampling.top_p", "all", "float")),
        ("--model.rewards.correct.weight abc", ("model.rewards.correct.weight", "abc", "float")),
        ("--checkpoint.mode 3", ("checkpoint.mode", "'max' or 'min'")),
        ("--model GPRO", ("model", "GPRO", "GRPO")),
        ("--model.engine LocalEngin", ("model.engine", "LocalEngin", "LocalEngine")),
        ("--model.scoring.timeout_s now", ("model.scoring.timeout_s", "now", "float")),
        ("--seed_everything", ("--seed_everything", "needs a value")),
        ("--model.objective.kl_estimator kk1", ("model.objective.kl_estimator", "k1")),
        ("--model.sampling.repetition_penalty 1", ("model.sampling.repetition_penalty", REPEATS)),
        ("--repetition_penalty 1", ("'repetition_penalty'", REPEATS)),
        ("--model.rewards null", ("missing: model.rewards",)),
        ("--model.pretrained null", ("missing: model.pretrained",)),
        ("--model.group_size=", ("model.group_size is '', expected int",)),
        ("--model.engine=", ("model.engine: unknown class ''",)),
        ("--model.rewards [a.b", ("model.rewards is not valid YAML",)),
        ("-c list.yaml", ("init_args is [1], expected {name: value}",)),
    ],
)
def test_a_wrong_value_gets_one_line_with_its_option_and_what_is_expected(fit, words, expected):
    Path("list.yaml").write_text("model: {init_args: [1]}\n")
    line = fit(*words.split())
    assert [text for text in expected if text not in line] == []


@pytest.mark.parametrize("settings", ["{init_args: {%s}}", "{%s}"])
def test_a_mistake_in_a_recipe_is_reported_the_same_way(fit, settings):
    wrong = "rewards: {correct: {function: litgrpo.rewards.correctness, weigth: 2}}"
    Path("more.yaml").write_text(f"model: {settings % wrong}\n")
    line = fit("-c", "more.yaml")
    assert "'model.rewards.correct.weigth' (of Reward)" in line
    assert "'model.rewards.correct.weight'" in line


def test_without_a_recipe_the_message_names_what_is_missing(cli):
    line = error_of(cli, "fit")
    assert "model.pretrained, model.rewards" in line
    assert "-c quickstart" in line


def test_a_value_that_a_class_rejects_is_one_line(cli):
    assert "group_size is 0" in error_of(cli, "fit", "-c", "grpo.yaml", "--model.group_size", "0")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("--output_dir x", "'run_dir'"),
        ("--learning_rate 1", "'model.optimizer.lr'"),
        ("--model.learning_rate 1", "'model.optimizer.lr'"),
        ("--model.num_generations 8", "'model.group_size'"),
        ("--model.beta 0.1", "'model.objective.kl_coef'"),
        ("--model.max_new_tokens 9", "'model.max_completion_length'"),
        ("--model.batch_size 8", "'data.batch_size'"),
        ("--model.peft_config x", "'model.lora'"),
        ("--model.update.num_iterations 2", "epochs_per_rollout'"),
        ("--actor_rollout_ref.rollout.n 8", "'model.group_size'"),
    ],
)
def test_an_option_of_another_trainer_gets_the_right_one(fit, words, option):
    assert option in fit(*words.split())


@pytest.mark.parametrize("target", sorted({*OTHER_NAMES.values()}))
def test_names_of_trl_and_verl_lead_to_options_that_exist(target):
    if target not in (*RUN_OPTIONS, "ckpt_path", "seed_everything"):
        assert find_option(target, ROOTS).key == target


def test_the_longest_end_of_a_foreign_name_counts():
    assert other_name("actor_rollout_ref.actor.optim.lr") == "model.optimizer.lr"
    assert other_name("model.nothing") == ""


def mistake_of(option: Option, text: str) -> str:
    """What is wrong with an option's value, as it is typed."""
    try:
        value = read_option("option", text, {"option": option.hint})
    except ValueError as error:
        return str(error).replace("option", option.key, 1)
    return mistake_in(option, value, TOP)


def options_below(option: Option, levels: int = 3) -> list[Option]:
    """All options below an option, by the classes of litgrpo that its type names."""
    owners = {
        owner: None
        for owner in owners_of(option)
        if owner.__module__.startswith("litgrpo") and not inspect.isabstract(owner)
    }
    below = [inner for owner in owners for inner in options_of(owner, option.key).values()]
    if levels:
        below += [each for inner in below for each in options_below(inner, levels - 1)]
    return below


@pytest.fixture(scope="module")
def every_option() -> list[Option]:
    """Every option of GRPO, SFT, the data, the callbacks and the run, each type of it once."""
    configure_jsonargparse()
    import_named_classes()
    sections = [Option("model", SFT, UNSET, ""), Option("data", PairData, UNSET, "")]
    sections += [option for option in TOP.values() if classes_in(option.hint)]
    options = [option for option in TOP.values() if option not in sections]
    options += [each for section in sections for each in options_below(section)]
    return list({(each.key, str(each.hint)): each for each in options}.values())


def test_a_wrong_value_of_any_option_is_reported_with_the_option_and_without_internals(
    every_option,
):
    assert len(every_option) > 250
    messages = {
        (option.key, value): mistake_of(option, value)
        for option in every_option
        for value in ("wrong", "{wrong: 1}")
    }
    mistakes = {key: message for key, message in messages.items() if message}
    assert len(mistakes) > 250
    unclear = {
        key: message
        for key, message in mistakes.items()
        if key[0] not in message or INTERNALS.search(message) or "\n" in message
    }
    assert unclear == {}


def test_null_and_booleans_that_an_option_takes_are_not_blamed_for_another_mistake(every_option):
    values = {type(None): ["null"], bool: ["true", "false"]}
    cases = [
        (option, value)
        for option in every_option
        for member in members(option.hint)
        for value in values.get(member, [])
    ]
    assert len(cases) > 90
    assert {"model.lora", "data.chat", "model.reference"} <= {option.key for option, _ in cases}
    assert {(o.key, v): m for o, v in cases if (m := mistake_of(o, v))} == {}


@pytest.mark.parametrize(
    "valid",
    [
        ("data.chat", "false"),
        ("model.lora", "null"),
        ("model.lora", "~"),
        ("model.scoring.num_workers", "null"),
        ("model.sampling", "{top_p: 0.5}"),
        ("model.objective.surrogate.clip_low", "0.1"),
        ("model.engine", "{class_path: LocalEngine, max_rows: 4}"),
        ("trainer.logger", "false"),
        ("trainer.callbacks", "null"),
    ],
)
@pytest.mark.parametrize(
    ("wrong", "value"), [("model.group_size", "four"), ("data.batchsize", "3")]
)
def test_the_wrong_one_of_two_options_is_blamed(valid, wrong, value):
    words = ["--model.pretrained=x", "--model.rewards=a.b", "--{}={}".format(*valid)]
    settings = CommandLine.read([*words, f"--{wrong}={value}"], ROOTS).settings
    assert wrong in find_mistake(settings, TOP)
    later = [*words, f"--{wrong}={value}", "--model.sampling.top_k=3"]
    assert wrong in find_mistake(CommandLine.read(later, ROOTS).settings, TOP)


def test_a_value_that_is_meant_for_an_option_below_is_suggested_in_a_form_that_is_accepted(
    every_option,
):
    near = {
        (option.key, value): suggest_value(option, yaml.safe_load(value))
        for option in every_option
        for value in ("16", "0.5", "true", "wrong")
    }
    assert near["model.lora", "16"] == "{rank: 16}"
    assert near["model.sampling", "0.5"] == "{temperature: 0.5}"
    assert near["model.evaluation.pass_at_k", "16"] == "[16]"
    assert near["model.lora", "true"] == "{}"
    by_key = {option.key: option for option in every_option}
    wrong = {
        key: text
        for key, text in near.items()
        if text and not is_accepted(by_key[key[0]].hint, yaml.safe_load(text))
    }
    assert wrong == {}


@pytest.mark.parametrize("name", sorted(OTHER_NAMES))
@pytest.mark.parametrize("model", [GRPO, SFT])
def test_a_name_of_trl_or_verl_in_a_recipe_leads_to_an_option_of_its_model(name, model):
    top = TOP | {"model": Option("model", model, UNSET, "")}
    value = 1
    for part in reversed(name.split(".")[1:]):
        value = {part: value}
    settings = {"model": {"pretrained": "x"}, name.partition(".")[0]: value}
    message = find_mistake(settings, top)
    assert message
    for suggestion in re.findall(r"use '([\w.]+)'|mean '([\w.]+)'", message):
        first, *rest = "".join(suggestion).split(".")
        assert first in top
        if rest:
            find_option("".join(suggestion), {first: top[first].hint})
    if model is GRPO and name not in top:
        assert OTHER_NAMES[name] in message


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("model: {data: {train: a}}", "'data' stands at the top of a recipe, not below 'model'"),
        ("data: {trainer: {max_epochs: 3}}", "'trainer' stands at the top"),
        ("model: {run_dir: x}", "'run_dir' stands at the top"),
        ("model: {lora: {checkpoint: {keep_last: 1}}}", "'checkpoint' stands at the top"),
        ("data: {rewards: {}}", "use 'model.rewards'"),
        ("model: {max_epochs: 3}", "use 'trainer.max_epochs'"),
        ("model: {clip_low: 0.1}", "use 'model.objective.surrogate.clip_low'"),
        ("pretrained: x", "use 'model.pretrained'"),
        ("num_generations: 4\nmodel: {pretrained: x}", "use 'model.group_size'"),
        ("actor_rollout_ref: {model: {path: x}}", "use 'model.pretrained'"),
        ("data: {train_files: x, train_batch_size: 4}", "use 'data.train'"),
        ("algorithm: {adv_estimator: grpo}", "use 'model.objective.advantages'"),
    ],
)
def test_an_option_in_the_wrong_place_of_a_recipe_gets_its_place(recipe, expected):
    assert expected in find_mistake(yaml.safe_load(recipe), TOP)


def test_an_unknown_option_is_reported_before_a_missing_one():
    settings = {"model": {"pretrained": "x"}, "data": {"batchsize": 3}}
    assert "data.batchsize" in find_mistake(settings, TOP)
    assert find_mistake({"model": {"pretrained": "x"}}, TOP).startswith("missing: model.rewards")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("audit -c grpo.yaml --limit x", ("limit", "'x'", "int")),
        ("plan -c grpo.yaml --chips many", ("chips", "'many'", "int or null")),
        ("plan -c grpo.yaml --measure 3", ("measure", "3", "bool")),
        ("fit -c grpo.yaml --overwrite maybe", ("overwrite", "'maybe'", "bool")),
        ("fit -c grpo.yaml --seed_everything x", ("seed_everything", "'x'", "int")),
        ("doctor . --fail_on warn", ("fail_on", "'warn'", "'warning'")),
        ("doctor . --fail_on", ("--fail_on needs a value",)),
        ("doctor . here", ("unexpected 'here'", "run")),
        ("doctor --fail_onn info .", ("'fail_onn'", "'fail_on'")),
        ("replay . --iteration last", ("iteration", "'last'", "int or null")),
        ("export . x --dtype half", ("dtype", "'half'", "'float16'")),
        ("export . x --force 3", ("force", "3", "bool")),
        ("export --run_dir x", ("checkpoint, folder, dtype, force, adapter",)),
        ("fit -c grpo.yaml --output_dir x", ("'output_dir'", "'run_dir'")),
        ("fit -c grpo.yaml --model.environment math.sqrt", ("math.sqrt is not a class",)),
        ("fit -c grpo.yaml --debug maybe", ("debug", "'maybe'", "bool")),
        ("fit -c grpo.yaml --model.sampling 0.5", ("model.sampling", "0.5", "{temperature: 0.5}")),
        ("fit -c grpo.yaml --model.rewards.other 3", ("model.rewards.other is 3", "Reward")),
        ("plan -c grpo.yaml --model.precision 5", ("model.precision is 5", "Precision")),
        ("plan -c grpo.yaml --progress 3", ("progress is 3", "{every_s: 3}")),
        ("plan -c grpo.yaml --model.optimizer.lr 1e-5x", ("lr is '1e-5x'", "float")),
        ("plan -c grpo.yaml --model.optimizer.betas 0.9", ("betas is 0.9", "tuple")),
        ("plan -c grpo.yaml --model.optimizer Adamw", ("'Adamw'", "'AdamW'")),
        ("plan -c grpo.yaml --model.source StoredRollouts", ("missing: model.source.run_dir",)),
        ("plan -c grpo.yaml --model.engine ServerEngine", ("missing: model.engine.urls",)),
        ("plan -c grpo.yaml --model.rewards.correct null", ("correct is null", "Reward")),
        ("plan -c grpo.yaml --report none/x.json", ("the folder none",)),
        ("predict -c grpo.yaml --model SFT", ("SFT generates nothing",)),
        ("compare quickstart --jobs 0", ("jobs is 0",)),
        ("compare nowhere", ("recipe 'nowhere' not found",)),
        ("report a🙂 b", ("a🙂",)),
        ("compare quickstart --jobs two", ("jobs", "'two'", "int")),
        ("compare quickstart --seeds 3", ("seeds", "3", "[3]")),
        ("compare quickstart --algorithms dapo", ("algorithms", "'dapo'", "['dapo']")),
    ],
)
def test_a_wrong_value_of_any_command_is_one_line_with_its_option(cli, words, expected):
    line = error_of(cli, *words.split())
    assert [text for text in expected if text not in line] == []
    assert not INTERNALS.search(line)


@pytest.mark.parametrize("command", ["doctor", "report", "export", "replay", "compare"])
def test_a_command_without_arguments_names_what_is_missing_and_the_runs(cli, command):
    first = next(iter(options_of(COMMANDS[command].load())))
    line = error_of(cli, command)
    assert line.startswith(f"error: missing: {first} (")
    assert ("no run folder below runs/" in line) == (command != "compare")
    for run in ("runs/first", "runs/compare/seed=0"):
        Path(run).mkdir(parents=True)
        Path(run, "config.yaml").touch()
    line = error_of(cli, command)
    listed = "run folders here: " in line and "runs/first" in line and "compare/seed=0" in line
    assert listed == (command != "compare")


def test_words_of_a_command_without_a_mistake_are_accepted():
    options = options_of(COMMANDS["export"].load())
    words = ["a", "b", "--force", "--dtype", "float16"]
    settings = {"checkpoint": "a", "folder": "b", "force": True, "dtype": "float16"}
    assert read_words(words, options) == settings
    assert find_mistake(settings, options) == ""


def test_words_that_are_left_are_a_list_and_dotted_options_are_those_of_fit():
    runs = options_of(COMMANDS["report"].load())
    assert read_words(["a", "--output", "x", "🙂"], runs) == {"runs": ["a", "🙂"], "output": "x"}
    words = ["quickstart", "--data.val.limit", "50", "--jobs", "2", "--model.lora.rank=4"]
    settings = read_words(words, options_of(COMMANDS["compare"].load()))
    assert settings == {
        "recipe": "quickstart",
        "jobs": 2,
        "fit_options": ["--data.val.limit", "50", "--model.lora.rank", "4"],
    }


def test_settings_without_a_mistake_are_accepted():
    settings = {"model": {"class_path": "GRPO", "pretrained": "a", "rewards": {}}, "run_dir": "x"}
    assert find_mistake(settings, TOP) == ""


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
