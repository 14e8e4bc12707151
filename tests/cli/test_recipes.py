import json
from pathlib import Path

import pytest
import yaml

from litgrpo.cli.recipes import (
    CommandLine,
    built_in_recipes,
    find_repeated_keys,
    read_recipe,
    recipe_file,
    written_out,
)
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
    assert recipe_file("algorithms/dr_grpo").parent.name == "algorithms"


def test_a_file_of_the_user_comes_first(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("quickstart.yaml").write_text("model: {}\n")
    assert recipe_file("quickstart") == Path("quickstart.yaml")


def test_a_recipe_that_is_nowhere_is_named_with_the_nearest(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with raises_for("'quikstart'", str(tmp_path), "did you mean 'quickstart'"):
        recipe_file("quikstart")


def test_all_recipes_of_the_repository_are_built_in():
    files = (ROOT / "configs").rglob("*.yaml")
    assert len(built_in_recipes()) == len(list(files)) > 30


def test_recipes_by_name_are_merged_in_their_order(cli):
    words = ("-c", "quickstart", "-c", "algorithms/dr_grpo", "--print_config")
    code, out, _ = cli("fit", *words)
    assert code == 0
    loss_aggregation = yaml.safe_load(out)["model"]["init_args"]["objective"]["loss_aggregation"]
    assert loss_aggregation == "constant_length"


def test_a_command_line_without_a_recipe_means_grpo(cli):
    words = ("--model.pretrained", "x", "--data.prompts", '["a"]', "--print_config")
    code, out, err = cli("predict", *words)
    assert (code, err) == (0, "")
    config = yaml.safe_load(out)
    assert config["model"]["class_path"] == "litgrpo.GRPO"
    assert config["data"]["class_path"] == "litgrpo.PromptData"


def test_a_recipe_may_leave_out_class_path_and_init_args(cli):
    short = "model: {pretrained: x, rewards: {r: {function: litgrpo.rewards.exact}}, group_size: 4}"
    long = yaml.safe_load(Path("grpo.yaml").read_text())
    long["model"]["init_args"] = yaml.safe_load(short)["model"]
    Path("short.yaml").write_text(f"{short}\ndata: {{train: nowhere.jsonl}}\n")
    Path("long.yaml").write_text(yaml.safe_dump(long))
    shown = [cli("fit", "-c", name, "--print_config") for name in ("short.yaml", "long.yaml")]
    assert [code for code, _, _ in shown] == [0, 0]
    configs = [yaml.safe_load(out) for _, out, _ in shown]
    assert configs[0]["model"]["init_args"] == configs[1]["model"]["init_args"]
    assert configs[0]["data"]["init_args"] == configs[1]["data"]["init_args"]


def test_an_override_without_class_path_keeps_the_class_of_the_recipe(cli):
    Path("sft.yaml").write_text("model: {class_path: SFT, pretrained: x}\ndata: PairData\n")
    Path("more.yaml").write_text("model: {max_iterations: 3}\n")
    words = ("-c", "sft.yaml", "-c", "more.yaml", "--data.train", "a", "--print_config")
    code, out, _ = cli("fit", *words)
    model = yaml.safe_load(out)["model"]
    assert code == 0
    assert model["class_path"].endswith("SFT")
    assert model["init_args"]["max_iterations"] == 3


@pytest.mark.parametrize("given", ["AdamW", {"class_path": "AdamW", "lr": 1.0}])
def test_the_short_name_of_an_optimizer_is_the_one_of_torch(given):
    optimizer = written_out({"model": {"optimizer": given}})["model"]["init_args"]["optimizer"]
    named = optimizer["class_path"] if isinstance(optimizer, dict) else optimizer
    assert named == "torch.optim.AdamW"
    words = CommandLine.read(["--model.optimizer", "AdamW"]).words()
    assert words[-1] == "--model.optimizer=torch.optim.AdamW"


def test_options_override_recipes_wherever_they_are_typed(cli):
    words = ("--model.group_size", "4", "-c", "grpo.yaml", "--print_config")
    assert yaml.safe_load(cli("fit", *words)[1])["model"]["init_args"]["group_size"] == 4


def test_numbers_in_scientific_notation_are_numbers(tmp_path):
    (tmp_path / "r.yaml").write_text("model: {kwargs: {a: 1e-6, b: '1e-6'}}")
    kwargs = read_recipe(str(tmp_path / "r.yaml"))["model"]["kwargs"]
    assert kwargs == {"a": 1e-6, "b": "1e-6"}


def test_a_word_that_is_no_option_is_rejected(cli):
    code, _, err = cli("fit", "quickstart")
    assert (code, "-c RECIPE" in err) == (2, True)


def test_a_key_that_appears_twice_is_rejected_with_both_lines(tmp_path):
    (tmp_path / "r.yaml").write_text("model:\n  a: 1\n  b: {c: 1, d: 2}\n  a: 2\n")
    with raises_for("r.yaml, line 4", "'a'", "line 2"):
        read_recipe(str(tmp_path / "r.yaml"))


def test_equal_keys_in_different_places_are_not_a_repetition():
    text = "a: {x: 1}\nb: {x: 1}\nc: [{x: 1}, {x: 2}]\n"
    assert list(find_repeated_keys(yaml.compose(text))) == []
    assert len(list(find_repeated_keys(yaml.compose("c: [{x: 1, x: 2}]\n")))) == 1


def source_of(tmp_path, value, *words: str):
    """The training source in the words for the parser."""
    (tmp_path / "r.yaml").write_text(f"data: {{class_path: PromptData, train: {value}}}\n")
    words = CommandLine.read(["-c", str(tmp_path / "r.yaml"), *words]).words()
    (recipe,) = [word for word in words if word.startswith("--config=")]
    return json.loads(recipe.removeprefix("--config="))["data"]["init_args"]["train"]


def test_a_path_takes_more_options_if_the_command_line_gives_some(tmp_path):
    limit = ("--data.train.limit", "3")
    assert source_of(tmp_path, "a b.jsonl", *limit) == {"path": "a b.jsonl"}
    assert source_of(tmp_path, "a b.jsonl") == "a b.jsonl"
    assert source_of(tmp_path, "[a, b]", *limit) == ["a", "b"]
    assert source_of(tmp_path, "{path: x}", *limit) == {"path": "x"}


def test_a_path_on_the_command_line_takes_more_options():
    words = ["--data.train", "x.jsonl", "--data.val=y.jsonl", "--data.train.limit", "3"]
    found = CommandLine.read([*words, "--data.val.limit", "1"]).words()[2:]
    assert found[:2] == ['--data.train={"path": "x.jsonl"}', '--data.val={"path": "y.jsonl"}']


def test_a_limit_reaches_a_recipe_whose_source_is_a_path(cli):
    code, out, _ = cli("fit", "-c", "grpo.yaml", "--data.train.limit", "64", "--print_config")
    train = yaml.safe_load(out)["data"]["init_args"]["train"]
    assert code == 0
    assert (train["path"], train["limit"]) == ("nowhere.jsonl", 64)


def test_a_repeated_key_ends_in_one_line(cli):
    Path("twice.yaml").write_text("model:\n  class_path: GRPO\n  class_path: SFT\n")
    code, _, err = cli("fit", "-c", "twice.yaml")
    assert code == 2
    assert err.startswith("error: twice.yaml, line 3")
    assert "'class_path'" in err


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
    given = CommandLine.read(["-c", str(recipe), *keys])
    assert given.options == [("model.group_size", "2")]
    chosen = {"class_path": "Tags", "init_args": {"call": "calc"}}
    settings = {"max_calls": 4, "call_cost": 0.5, "format": chosen, "error_text": "?"}
    environment = given.recipes[0]["model"]["init_args"]["environment"]
    assert environment == {"class_path": TOOLS, "init_args": settings}


def test_options_of_an_environment_that_the_command_line_names_go_with_it():
    words = [f"--model.environment={TOOLS}", "--model.environment.functions=[a.b]", "--x", "1"]
    other, (key, value) = CommandLine.read(words).options
    assert (other, key) == (("x", "1"), "model.environment")
    assert json.loads(value) == {"class_path": TOOLS, "init_args": {"functions": ["a.b"]}}
    assert CommandLine.read(words[:1]).options == [("model.environment", TOOLS)]


def test_keys_of_an_environment_that_nothing_names_are_refused(cli):
    code, _, err = cli("fit", "-c", "grpo.yaml", "--model.environment.init_args.call_cost=1")
    assert code == 2
    assert err.startswith("error: model.environment.call_cost belongs to an environment")
    Path("tools.yaml").write_text(PLAYS % "{calls: tags}")
    code, _, err = cli("fit", "-c", "tools.yaml", "--model.environment.init_args.calls.call=x")
    assert (code, err.count("\n")) == (2, 1)
    assert "model.environment.calls.call" in err
    assert "'tags'" in err


def test_a_lone_question_mark_is_a_text(cli):
    Path("tools.yaml").write_text(PLAYS % '{error_text: "?", functions: []}')
    code, out, err = cli(
        *("fit", "-c", "grpo.yaml", "-c", "tools.yaml", "--model.episode.tool_role", "?"),
        "--print_config",
    )
    assert (code, err) == (0, "")
    settings = yaml.safe_load(out)["model"]["init_args"]
    assert settings["environment"]["init_args"]["error_text"] == "?"
    assert settings["episode"]["tool_role"] == "?"
