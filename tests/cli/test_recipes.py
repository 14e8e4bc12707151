import json
from pathlib import Path

import pytest
import yaml

from litgrpo.cli.recipes import (
    EnvironmentKeys,
    Sources,
    brought,
    prepared_words,
    recipe_file,
    refuse_repeated_keys,
    repeated,
    with_classes,
)
from tests.cli.running import ROOT, cli  # noqa: F401 (a fixture)


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
    said = rf"no recipe 'quikstart': no such file in {tmp_path}.*did you mean 'quickstart'"
    with pytest.raises(ValueError, match=said):
        recipe_file("quikstart")


def test_all_recipes_are_brought():
    files = (ROOT / "configs").rglob("*.yaml")
    assert len(brought()) == len(list(files)) > 30


def test_recipes_by_name_are_merged_in_their_order(cli):  # noqa: F811
    words = ("-c", "quickstart", "-c", "algorithms/dr_grpo", "--print_config")
    code, out, _ = cli("fit", *words)
    assert code == 0
    loss_aggregation = yaml.safe_load(out)["model"]["init_args"]["objective"]["loss_aggregation"]
    assert loss_aggregation["class_path"].endswith(".Constant")


def test_a_command_line_without_a_recipe_means_grpo():
    words = ["--model.pretrained", "x", "--data.prompts", '["a"]']
    front = ["--model", "litgrpo.GRPO", "--data", "litgrpo.PromptData"]
    assert with_classes("fit", words) == [*front, *words]
    rewards = with_classes("predict", words)[4:6]
    assert rewards[0] == "--model.rewards"


@pytest.mark.parametrize("words", [["-c", "a.yaml", "--model.lora.rank", "1"], ["--run_dir", "x"]])
def test_a_recipe_or_nothing_at_all_is_left_alone(words):
    assert with_classes("predict", words) == words


def test_a_key_that_stands_twice_is_refused_with_both_lines():
    text = "model:\n  a: 1\n  b: {c: 1, d: 2}\n  a: 2\n"
    with pytest.raises(ValueError, match=r"r\.yaml, line 4: the key 'a' stands .* first in line 2"):
        refuse_repeated_keys(text, "r.yaml")


def test_equal_keys_in_different_places_are_no_repetition():
    assert list(repeated(yaml.compose("a: {x: 1}\nb: {x: 1}\nc: [{x: 1}, {x: 2}]\n"))) == []
    assert len(list(repeated(yaml.compose("c: [{x: 1, x: 2}]\n")))) == 1


def test_broken_yaml_is_left_to_the_parser():
    refuse_repeated_keys("a: [", "r.yaml")
    assert Sources(["--data.train.limit", "3"]).text("a: [") == "a: ["


RECIPE = "data:\n  class_path: PromptData\n  init_args:\n    train: a b.jsonl  # mine\n    val: v\n"


def test_a_path_takes_more_keys_where_the_command_line_gives_some():
    text = Sources(["--data.train.limit", "3"]).text(RECIPE)
    assert text == RECIPE.replace("a b.jsonl", '{path: "a b.jsonl"}')


def test_without_more_keys_a_recipe_stays_to_the_letter():
    assert Sources(["--data.train", "x"]).text(RECIPE) == RECIPE


@pytest.mark.parametrize("value", ["null", "[a, b]", "{path: x}"])
def test_what_is_no_path_stays(value):
    text = RECIPE.replace("a b.jsonl", value)
    assert Sources(["--data.train.limit=3"]).text(text) == text


def test_a_path_on_the_command_line_takes_more_keys_too():
    words = ["--data.train", "x.jsonl", "--data.val=y.jsonl", "--data.train.limit", "3"]
    words += ["--data.val.limit", "1"]
    changed = Sources(words).words(words)
    assert changed[:3] == ["--data.train", '{path: "x.jsonl"}', '--data.val={path: "y.jsonl"}']


def test_a_limit_reaches_a_recipe_whose_source_is_a_path(cli):  # noqa: F811
    code, out, _ = cli("fit", "-c", "grpo.yaml", "--data.train.limit", "64", "--print_config")
    train = yaml.safe_load(out)["data"]["init_args"]["train"]
    assert code == 0
    assert (train["path"], train["limit"]) == ("nowhere.jsonl", 64)


def test_a_repeated_key_ends_in_one_line(cli):  # noqa: F811
    Path("twice.yaml").write_text("model:\n  class_path: GRPO\n  class_path: SFT\n")
    code, _, err = cli("fit", "-c", "twice.yaml")
    assert code == 2
    assert err.startswith("error: twice.yaml, line 3: the key 'class_path' stands twice")


def test_predict_needs_no_recipe(cli):  # noqa: F811
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


def environment_of(words, folder):
    """What the last recipe of these words names."""
    changed = prepared_words(words, folder)
    return changed, yaml.safe_load(Path(changed[1]).read_text())["model"]["init_args"][
        "environment"
    ]


def test_keys_of_the_environment_go_into_the_recipe(tmp_path):
    recipe, copies = tmp_path / "r.yaml", tmp_path / "copies"
    copies.mkdir()
    recipe.write_text(PLAYS % "{max_calls: 3, call_cost: 0.5, call_format: {class_path: Tags}}")
    keys = ["--model.environment.init_args.max_calls=4", "--model.environment.error_text", "?"]
    keys += ["--model.environment.init_args.calls.call=calc", "--model.group_size", "2"]
    words, environment = environment_of(["-c", str(recipe), *keys], copies)
    assert words[2:] == ["--model.group_size", "2"]
    assert Path(words[1]).name == "r.yaml"  # the run is named after it
    calls = {"class_path": "Tags", "init_args": {"call": "calc"}}
    settings = {"max_calls": 4, "call_cost": 0.5, "calls": calls, "error_text": "?"}
    assert environment == {"class_path": TOOLS, "init_args": settings}


def test_keys_of_an_environment_that_the_command_line_names_go_with_it():
    words = [f"--model.environment={TOOLS}", "--model.environment.functions=[a.b]", "--x", "1"]
    *others, named = EnvironmentKeys(words).words()
    assert others == ["--x", "1"]
    settings = json.loads(named.removeprefix("--model.environment="))
    assert settings == {"class_path": TOOLS, "init_args": {"functions": ["a.b"]}}
    for untouched in (words[:1], ["--model.environment.help"], ["--model.group_size", "2"]):
        assert EnvironmentKeys(untouched).words() == untouched


def test_keys_of_an_environment_that_nothing_names_are_refused(cli):  # noqa: F811
    code, _, err = cli("fit", "-c", "grpo.yaml", "--model.environment.init_args.call_cost=1")
    assert code == 2
    assert err.startswith("error: model.environment.init_args.call_cost belongs to an environment")
    Path("tools.yaml").write_text(PLAYS % "{calls: tags}")
    code, _, err = cli("fit", "-c", "tools.yaml", "--model.environment.init_args.calls.call=x")
    assert (code, err) == (
        2,
        "error: model.environment.init_args.calls.call: calls is 'tags', which has no keys.\n",
    )


def test_a_lone_question_mark_is_a_text(cli):  # noqa: F811
    import litgrpo.cli.trainer_cli  # noqa: F401 (sets how the parser reads YAML)

    Path("tools.yaml").write_text(PLAYS % '{error_text: "?", functions: []}')
    code, out, err = cli(
        *("fit", "-c", "grpo.yaml", "-c", "tools.yaml", "--model.episode.tool_role", "?"),
        "--print_config",
    )
    assert (code, err) == (0, "")
    settings = yaml.safe_load(out)["model"]["init_args"]
    assert settings["environment"]["init_args"]["error_text"] == "?"
    assert settings["episode"]["tool_role"] == "?"
