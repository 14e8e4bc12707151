import json
from pathlib import Path

import pytest
import yaml

from litgrpo.cli.parser import RecipeCLI
from litgrpo.cli.recipes import (
    built_in_recipes,
    find_repeated_keys,
    plain_form,
    read_recipe,
    recipe_file,
    without_init_args,
    write_out_rewards,
)
from litgrpo.cli.settings import CommandLine
from litgrpo.rewards.reward import name_rewards
from tests.support.command_line import ROOT
from tests.support.raises import raises_for


@pytest.mark.parametrize(
    "word", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml", "configs/quickstart"]
)
def test_a_recipe_of_the_package_is_found_from_any_folder(word, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = recipe_file(word).read_text()
    assert text == (ROOT / "configs" / "quickstart.yaml").read_text()


def test_an_overlay_is_found_by_its_folder_and_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert recipe_file("hardware/cuda").parent.name == "hardware"


def test_a_file_of_the_user_comes_first(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("quickstart.yaml").write_text("model: {}\n")
    assert recipe_file("quickstart") == Path("quickstart.yaml")


def test_a_recipe_that_is_nowhere_is_named_with_the_nearest(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with raises_for("'quikstart'", str(tmp_path), "did you mean 'quickstart'"):
        recipe_file("quikstart")


def test_a_recipe_that_is_nowhere_is_named_with_the_nearest_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").touch()
    Path("mine").mkdir()
    Path("mine/large.yml").touch()
    for word, near in (("smal.yaml", "small.yaml"), ("smal", "small.yaml")):
        with raises_for(f"did you mean '{near}'"):
            recipe_file(word)
    with raises_for("did you mean 'mine/large.yml'"):
        recipe_file("mine/larg")


def test_all_recipes_of_the_repository_are_built_in():
    files = (ROOT / "configs").rglob("*.yaml")
    assert len(built_in_recipes()) == len(list(files)) > 20


def test_recipes_by_name_are_merged_in_their_order():
    words = ["-c", "quickstart", "-c", "distillation/gkd", "--model.reference", "x"]
    objective = RecipeCLI(words).recipe["model"]["init_args"]["objective"]
    assert objective["kl_estimator"] == "reverse_kl"


def test_a_command_line_without_a_recipe_means_grpo():
    words = ["--model.pretrained", "x", "--data.prompts", '["a"]']
    config = RecipeCLI(words, "predict").recipe
    assert config["model"]["class_path"] == "litgrpo.GRPO"
    assert config["data"]["class_path"] == "litgrpo.PromptData"


def test_a_recipe_may_leave_out_class_path_and_init_args(cli):
    short = "model: {pretrained: x, rewards: {r: {function: litgrpo.rewards.exact}}, group_size: 4}"
    long = yaml.safe_load(Path("grpo.yaml").read_text())
    long["model"]["init_args"] = yaml.safe_load(short)["model"]
    Path("short.yaml").write_text(f"{short}\ndata: {{train: nowhere.jsonl}}\n")
    Path("long.yaml").write_text(yaml.safe_dump(long))
    configs = [RecipeCLI(["-c", name]).recipe for name in ("short.yaml", "long.yaml")]
    assert configs[0]["model"]["init_args"] == configs[1]["model"]["init_args"]
    assert configs[0]["data"]["init_args"] == configs[1]["data"]["init_args"]


BASE = """
model: {pretrained: x, rewards: {e: {function: litgrpo.rewards.exact}}}
data: {train: a.jsonl}
"""
# {option: (class, options of a first fragment, options of a second one)}
OBJECTS = {
    "engine": ("LocalEngine", {"max_rows": 4}, {"compaction_frac": 0.1}),
    "optimizer": ("AdamW", {"lr": 0.1}, {"weight_decay": 0.5}),
    "lr_scheduler": ("WarmupCosine", {"warmup": 0.1}, {"min_lr_ratio": 0.3}),
    "scoring": (None, {"overlong_buffer_frac": 0.5}, {"format": "chat"}),
    "sampling": (None, {"top_p": 0.5}, {"temperature": 0.7}),
    "lora": (None, {"rank": 4}, {"alpha": 3}),
}


def spell(name: str | None, options: dict, spelling: str) -> dict:
    """An object's options in one of four spellings; a group of options has no class."""
    node = {"init_args": options} if "init_args" in spelling else options
    return {"class_path": name} | node if name and "class" in spelling else node


def settings_of(*recipes: dict) -> dict:
    """Options of the model by recipes, as the parser understands them; `init_args` left out."""
    for number, recipe in enumerate(recipes):
        Path(f"r{number}.yaml").write_text(yaml.safe_dump(recipe))
    words = [word for number in range(len(recipes)) for word in ("-c", f"r{number}.yaml")]
    return without_init_args(RecipeCLI(words).recipe["model"])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("flat", "class, init_args"),
        ("class, init_args", "flat"),
        ("init_args", "class, flat"),
        ("class, flat", "init_args"),
    ],
)
def test_fragments_of_both_dialects_are_merged_in_any_order(first, second, cli):
    one = {key: spell(name, options, first) for key, (name, options, _) in OBJECTS.items()}
    two = {key: spell(name, options, second) for key, (name, _, options) in OBJECTS.items()}
    # The whole section in one dialect, its objects in the other.
    model = settings_of(yaml.safe_load(BASE), {"model": {"init_args": one}}, {"model": two})
    for key, (_, *options) in OBJECTS.items():
        assert model[key].items() >= (options[0] | options[1]).items()


@pytest.mark.parametrize(
    "mixed",
    [
        "model: {init_args: {group_size: 3}, max_iterations: 7}",
        "model: {class_path: GRPO, group_size: 3, init_args: {max_iterations: 7}}",
        "model: {group_size: 3, init_args: {max_iterations: 7, sampling: {init_args: {}}}}",
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_section_of_both_dialects_is_merged_with_others_in_any_order(cli, mixed, is_first):
    recipes = [yaml.safe_load(mixed), yaml.safe_load(BASE)]
    model = settings_of(*(recipes if is_first else recipes[::-1]))
    assert (model["group_size"], model["max_iterations"]) == (3, 7)
    assert model["rewards"]["e"]["function"] == "litgrpo.rewards.exact"


def test_an_option_that_is_given_in_both_dialects_at_once_is_refused(cli):
    with raises_for("group_size", "twice"):
        plain_form({"model": {"group_size": 3, "init_args": {"group_size": 4}}})


SPELLINGS = {
    "--model.group_size=3": "--model.init_args.group_size=3",
    "--model.sampling.top_p=0.5": "--model.init_args.sampling.init_args.top_p=0.5",
    "--model.update={num_mini_batches: 2}": "--model.update={init_args: {num_mini_batches: 2}}",
    "--model.engine={class_path: LocalEngine, max_rows: 4}": "--model.engine={class_path: "
    "LocalEngine, init_args: {max_rows: 4}}",
    "--model.lr_scheduler=WarmupCosine": "--model.lr_scheduler.init_args.warmup=0.1",
    "--model.lr_scheduler.warmup=0.1": "--model.lr_scheduler.class_path=WarmupCosine",
    "--trainer.max_epochs=3": "--trainer.init_args.max_epochs=3",
    "--checkpoint.keep_last=3": "--checkpoint.init_args.keep_last=3",
}


def test_both_spellings_of_an_option_on_the_command_line_are_the_same(cli):
    Path("base.yaml").write_text(BASE)
    spelled = (SPELLINGS.keys(), SPELLINGS.values())
    recipes = [RecipeCLI(["-c", "base.yaml", *words]).recipe for words in spelled]
    assert recipes[0] == recipes[1]
    settings = without_init_args(recipes[0])
    assert settings["model"]["lr_scheduler"]["warmup"] == 0.1
    assert settings["model"]["engine"]["max_rows"] == 4
    assert (settings["checkpoint"]["keep_last"], settings["trainer"]["max_epochs"]) == (3, 3)


FUNCTION = "litgrpo.rewards.exact"
RUBRIC = {"class_path": "litgrpo.rewards.Rubric", "criteria": {}}


@pytest.mark.parametrize(
    ("short", "names"),
    [
        (FUNCTION, ["exact"]),
        ([FUNCTION, "litgrpo.rewards.numeric"], ["exact", "numeric"]),
        ({"right": FUNCTION}, ["right"]),
        ([{"function": FUNCTION, "weight": 2.0}], ["exact"]),
        ({"right": FUNCTION, "short": {"function": "a.b", "weight": 0.5}}, ["right", "short"]),
        (RUBRIC, ["Rubric"]),
        ({"right": RUBRIC}, ["right"]),
    ],
)
def test_rewards_have_the_short_forms_of_python_in_recipes_and_on_the_command_line(short, names):
    if "Rubric" not in str(short):  # which Python gets as an object
        assert list(name_rewards(short)) == names
    in_recipe = plain_form({"model": {"rewards": short}})["model"]["rewards"]
    typed = CommandLine.read(["--model.rewards", json.dumps(short)]).settings
    assert list(in_recipe) == names
    assert typed["model"]["rewards"] == in_recipe
    assert all(isinstance(reward, dict) and reward["function"] for reward in in_recipe.values())


def test_rewards_in_short_form_take_options_of_the_command_line(cli):
    Path("short.yaml").write_text(f"model: {{pretrained: x, rewards: {FUNCTION}}}\ndata: {{}}\n")
    words = ["-c", "short.yaml", "--model.rewards.exact.weight", "2"]
    words += ["--model.rewards.other", "litgrpo.rewards.numeric"]
    rewards = RecipeCLI(words).recipe["model"]["init_args"]["rewards"]
    assert {name: (r["function"], r["weight"]) for name, r in rewards.items()} == {
        "exact": (FUNCTION, 2.0),
        "other": ("litgrpo.rewards.numeric", 1.0),
    }


def test_functions_of_one_name_in_a_list_of_rewards_are_refused():
    with raises_for("exact, exact", "{name: function}"):
        write_out_rewards(["a.exact", "b.exact"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {group_size: 010}", ("line 1", "model.group_size", "010", "octal")),
        ("data:\n  batch_size: -07", ("line 2", "data.batch_size", "-07", "octal")),
        ("trainer: {max_time: 1:30}", ("trainer.max_time", "1:30", "base 60")),
        ("a: {b: [1, 12:30:00]}", ("a.b", "12:30:00", "base 60")),
        ("model: {stop: [no, a]}", ("model.stop", "no", "true or false")),
        ("data: {columns: {on: x}}", ("data.columns", "on", "true or false")),
        ("overwrite: Yes", ("overwrite", "Yes", "true or false")),
        ('data: {template: "\\boxed{}"}', ("data.template", "\\b", "single quotes")),
        ('model: {answer: "\\frac12"}', ("model.answer", "\\f", "single quotes")),
        ("a: !!set {b}", ("set",)),
        ("model: {stop: ['\\n']}", ("model.stop", "double quotes")),
        ("model: {stop: [\\n\\n]}", ("model.stop", "double quotes")),
        ("data: {template: 'Q: {{ prompt }}\\nA:'}", ("data.template", "double quotes")),
        ("data:\n  template: |\n    {{ prompt }}\\nA:\n", ("data.template", "double quotes")),
        ("data: {chat: {system: 'Be brief.\\n'}}", ("data.chat.system", "double quotes")),
    ],
)
def test_a_value_that_is_not_what_it_looks_like_is_refused_with_its_key(tmp_path, text, said):
    (tmp_path / "r.yaml").write_text(text)
    with raises_for("r.yaml", *said):
        read_recipe(str(tmp_path / "r.yaml"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'010'", "010"),
        ('"no"', "no"),
        ("0x10", 16),
        ("1_000", 1000),
        ("0.5", 0.5),
        ("0", 0),
        ("1e-3", 1e-3),
        ("2026-01-01", "2026-01-01"),
        ('"a\\n"', "a\n"),
        ("'(?s)a\\n'", "(?s)a\\n"),
    ],
)
def test_a_value_that_is_what_it_looks_like_is_read(tmp_path, text, value):
    (tmp_path / "r.yaml").write_text(f"a: {{b: {text}}}")
    assert read_recipe(str(tmp_path / "r.yaml")) == {"a": {"b": value}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.sampling.stop", "\\n"),
        ("model.sampling.stop", "['\\n']"),
        ("data.template", "Q: {{ prompt }}\\nA:"),
        ("data.chat", "{system: 'a\\nb'}"),
        ("answer_format", "{answer}\\n"),
        ("model.rewards.e.kwargs", "{x: 010}"),
        ("model.evaluation.pass_at_k", "[1:30]"),
    ],
)
def test_an_option_that_is_not_what_it_looks_like_is_refused(key, value):
    with raises_for(key):
        CommandLine.read([f"--{key}", value])


def test_a_number_in_base_60_is_no_number_on_the_command_line(cli):
    with raises_for("model.group_size", "1:30", "int"):
        RecipeCLI(["-c", "grpo.yaml", "--model.group_size", "1:30"])


def test_an_override_without_class_path_keeps_the_class_of_the_recipe(cli):
    Path("sft.yaml").write_text("model: {class_path: SFT, pretrained: x}\ndata: PairData\n")
    Path("more.yaml").write_text("model: {max_iterations: 3}\n")
    words = ["-c", "sft.yaml", "-c", "more.yaml", "--data.train", "a"]
    model = RecipeCLI(words).recipe["model"]
    assert model["class_path"].endswith("SFT")
    assert model["init_args"]["max_iterations"] == 3


@pytest.mark.parametrize("optimizer", ["AdamW", {"class_path": "AdamW", "lr": 1.0}])
def test_the_short_name_of_an_optimizer_is_the_one_of_torch(optimizer):
    optimizer = plain_form({"model": {"optimizer": optimizer}})["model"]["optimizer"]
    named = optimizer["class_path"] if isinstance(optimizer, dict) else optimizer
    assert named == "torch.optim.AdamW"
    settings = CommandLine.read(["--model.optimizer", "AdamW"]).settings
    assert settings["model"]["optimizer"] == "torch.optim.AdamW"


def test_options_override_recipes_wherever_they_are_typed(cli):
    words = ["--model.group_size", "4", "-c", "grpo.yaml"]
    assert CommandLine.read(words).settings["model"]["group_size"] == 4


def test_numbers_in_scientific_notation_are_numbers(tmp_path):
    (tmp_path / "r.yaml").write_text("model: {kwargs: {a: 1e-6, b: '1e-6'}}")
    kwargs = read_recipe(str(tmp_path / "r.yaml"))["model"]["kwargs"]
    assert kwargs == {"a": 1e-6, "b": "1e-6"}


def test_a_word_that_is_no_option_is_rejected():
    with raises_for("'quickstart'", "-c RECIPE"):
        CommandLine.read(["quickstart"])


def test_a_key_that_appears_twice_is_rejected_with_both_lines(tmp_path):
    (tmp_path / "r.yaml").write_text("model:\n  a: 1\n  b: {c: 1, d: 2}\n  a: 2\n")
    with raises_for("r.yaml, line 4", "'a'", "line 2"):
        read_recipe(str(tmp_path / "r.yaml"))


def test_equal_keys_in_different_places_are_not_a_repetition():
    text = "a: {x: 1}\nb: {x: 1}\nc: [{x: 1}, {x: 2}]\n"
    assert list(find_repeated_keys(yaml.compose(text))) == []
    assert len(list(find_repeated_keys(yaml.compose("c: [{x: 1, x: 2}]\n")))) == 1


def source_of(tmp_path, value, *words: str):
    """The training source of a recipe and options."""
    (tmp_path / "r.yaml").write_text(f"data: {{class_path: PromptData, train: {value}}}\n")
    command_line = CommandLine.read(["-c", str(tmp_path / "r.yaml"), *words])
    return command_line.settings["data"]["train"]


def test_a_path_takes_more_options_if_the_command_line_gives_some(tmp_path):
    limit = ("--data.train.limit", "3")
    assert source_of(tmp_path, "a b.jsonl", *limit) == {"path": "a b.jsonl", "limit": 3}
    assert source_of(tmp_path, "a b.jsonl") == "a b.jsonl"
    assert source_of(tmp_path, "{path: x}", *limit) == {"path": "x", "limit": 3}
    assert source_of(tmp_path, "a", *limit, "--data.train", "b") == {"path": "b", "limit": 3}
    assert source_of(tmp_path, "{path: a, limit: 9}", "--data.train", "b") == "b"


def test_a_path_on_the_command_line_takes_more_options():
    words = ["--data.train", "x.jsonl", "--data.val=y.jsonl", "--data.train.limit", "3"]
    data = CommandLine.read([*words, "--data.val.limit", "1"]).settings["data"]
    assert data["train"] == {"path": "x.jsonl", "limit": 3}
    assert data["val"] == {"path": "y.jsonl", "limit": 1}


def test_a_path_takes_more_options_from_a_later_recipe(cli):
    Path("limit.yaml").write_text("data: {train: {limit: 7}}\n")
    data = RecipeCLI(["-c", "grpo.yaml", "-c", "limit.yaml"]).recipe["data"]["init_args"]
    assert (data["train"]["path"], data["train"]["limit"]) == ("nowhere.jsonl", 7)


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [
        # An object: its options are merged, unless it is of another class.
        ("model: {engine: {class_path: LocalEngine, max_rows: 4}}",
         "model: {engine: {compaction_frac: 0.1}}",
         {"class_path": "LocalEngine", "max_rows": 4, "compaction_frac": 0.1}),
        ("model: {engine: {class_path: LocalEngine, max_rows: 4}}",
         "model: {engine: {class_path: litgrpo.LocalEngine}}",
         {"class_path": "litgrpo.LocalEngine", "max_rows": 4}),
        ("model: {engine: {class_path: LocalEngine, max_rows: 4}}",
         "model: {engine: LocalEngine}",
         {"class_path": "LocalEngine", "max_rows": 4}),
        ("model: {engine: {class_path: LocalEngine, max_rows: 4}}",
         "model: {engine: StaticEngine}",
         {"class_path": "StaticEngine"}),
        ("model: {engine: {class_path: LocalEngine, max_rows: 4}}",
         "model: {engine: {class_path: StaticEngine, sync_every_tokens: 2}}",
         {"class_path": "StaticEngine", "sync_every_tokens": 2}),
        # Any other mapping is replaced.
        ("model: {rewards: {a: b.a}}", "model: {rewards: {c: b.c}}", {"c": {"function": "b.c"}}),
        ("data: {columns: {prompt: a, answer: b}}", "data: {columns: {prompt: c}}",
         {"prompt": "c"}),
        ("data: {train: {math: a, chat: b}}", "data: {train: {path: c}}", {"path": "c"}),
        ("data: {train: {path: a, limit: 3}}", "data: {train: {path: b}}",
         {"path": "b", "limit": 3}),
        ("model: {sampling: {stop: [a]}}", "model: {sampling: {stop+: [b]}}", {"stop": ["a", "b"]}),
        ("model: {lora: {rank: 4}}", "model: {lora: null}", None),
    ],
)  # fmt: skip
def test_recipes_are_merged_option_by_option(cli, first, second, merged):
    for name, text in (("first", first), ("second", second)):
        Path(f"{name}.yaml").write_text(text)
    settings = CommandLine.read(["-c", "first.yaml", "-c", "second.yaml"]).settings
    (section, node), *_ = yaml.safe_load(first).items()
    (key,) = node
    assert settings[section][key] == merged


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--model.lora.rank 2 --model.lora null", "lora", None),
        ("--model.lora null --model.lora.rank 2", "lora", {"rank": 2}),
        ("--model.lora.rank 2 --model.lora {alpha:&3}", "lora", {"rank": 2, "alpha": 3}),
        ("--model.sampling.stop+ a --model.sampling.stop+ [b,c]", "sampling",
         {"stop": ["a", "b", "c"]}),
        ("--model.rewards.e a.b --model.rewards.e.kwargs.x 3", "rewards",
         {"e": {"function": "a.b", "kwargs": {"x": 3}}}),
    ],
)  # fmt: skip
def test_options_are_set_at_their_path(words, key, value):
    typed = [word.replace("&", " ") for word in words.split()]
    assert CommandLine.read(typed).settings["model"][key] == value


def test_predict_needs_no_recipe(cli):
    words = ("--model.pretrained", "builtin:tiny-gemma2", "--data.prompts", '["What is 3+4?"]')
    quick = ("--model.max_completion_length", "2", "--trainer.accelerator", "cpu")
    code, out, err = cli("predict", *words, *quick)
    assert code == 0, err
    assert "What is 3+4?" in out


TOOLS = "litgrpo.environments.Tools"
PLAYS = (
    "model: {class_path: GRPO, init_args: {environment: "
    f"{{class_path: {TOOLS}, init_args: %s}}}}}}"
)


def test_options_of_the_environment_go_into_the_recipe(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(PLAYS % "{max_calls: 3, call_cost: 0.5, format: {class_path: Tags}}")
    keys = ["--model.environment.init_args.max_calls=4", "--model.environment.error_text", "?"]
    keys += ["--model.environment.init_args.format.call=calc", "--model.group_size", "2"]
    model = CommandLine.read(["-c", str(recipe), *keys]).settings["model"]
    chosen = {"class_path": "Tags", "call": "calc"}
    settings = {"max_calls": 4, "call_cost": 0.5, "format": chosen, "error_text": "?"}
    assert model["environment"] == {"class_path": TOOLS} | settings
    assert model["group_size"] == 2


def test_options_of_an_environment_that_the_command_line_names_go_with_it():
    words = [f"--model.environment={TOOLS}", "--model.environment.functions=[a.b]"]
    model = CommandLine.read(words).settings["model"]
    assert model["environment"] == {"class_path": TOOLS, "functions": ["a.b"]}
    assert CommandLine.read(words[:1]).settings["model"]["environment"] == TOOLS


def test_keys_of_an_environment_that_nothing_names_are_refused(tmp_path):
    with raises_for("model.environment.call_cost belongs to an environment"):
        CommandLine.read(["--model.environment.init_args.call_cost=1"])
    (tmp_path / "tools.yaml").write_text(PLAYS % "{calls: tags}")
    words = ["-c", str(tmp_path / "tools.yaml"), "--model.environment.init_args.calls.call=x"]
    with raises_for("model.environment.calls.call", "'tags'"):
        CommandLine.read(words)


def test_a_lone_question_mark_is_a_text(cli):
    Path("tools.yaml").write_text(PLAYS % '{error_text: "?", functions: []}')
    words = ["-c", "grpo.yaml", "-c", "tools.yaml", "--model.episode.tool_role", "?"]
    settings = RecipeCLI(words).recipe["model"]["init_args"]
    assert settings["environment"]["init_args"]["error_text"] == "?"
    assert settings["episode"]["tool_role"] == "?"
