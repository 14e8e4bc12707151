"""The JSON settings of an older trainer become a recipe, and nothing of them is lost silently."""

import json
from pathlib import Path

import pytest
import yaml

from litgrpo.tools.convert import as_yaml, old_settings, recipe_of, table
from tests.support.recipes import FEW, read, samples_of

OPTIONS = table()["options"]
ALL = {
    "use_grpo": True,
    "num_completions_per_prompt": 4,
    "generation_max_length": 12,
    "generation_temperature": 0.7,
    "generation_top_p": 0.95,
    "generation_top_k": 20,
    "normalize_advantages": True,
    "advantage_epsilon": 1e-6,
    "use_kl_penalty": True,
    "kl_penalty_coef": 0.02,
    "output_dir": "out",
    "num_epochs": 1,
    "batch_size": 2,
    "learning_rate": 1e-4,
}


def value_at(recipe: dict, place: str):
    for section in place.split("."):
        recipe = recipe[section]
    return recipe


def test_every_option_is_in_its_place_and_named():
    assert ALL.keys() == OPTIONS.keys()
    recipe, said = recipe_of(ALL, "old.json")
    special = {"use_grpo", "use_kl_penalty", "normalize_advantages"}
    for option in ALL.keys() - special:
        assert value_at(recipe, OPTIONS[option]["key"]) == ALL[option]
    objective = recipe["model"]["init_args"]["objective"]
    assert objective["advantages"]["init_args"] == {
        "baseline": "group",
        "scale": "group",
        "eps": 1e-6,
    }
    assert recipe["model"]["class_path"] == "litgrpo.GRPO"
    assert [line.split(":")[0] for line in said] == list(OPTIONS)


def test_what_is_not_given_keeps_its_old_default_and_says_so():
    recipe, said = recipe_of({"use_grpo": True}, "old.json")
    model = recipe["model"]["init_args"]
    assert model["sampling"] == {"temperature": 0.8, "top_p": 0.9, "top_k": 50}
    assert (model["group_size"], model["max_completion_length"]) == (4, 256)
    assert model["objective"]["kl_coef"] == 0.01
    assert "batch_size" not in recipe["data"]["init_args"]
    assert any("generation_top_k: 50 (its default) -> " in line for line in said)


def test_switches_are_followed():
    recipe, said = recipe_of({"use_kl_penalty": False, "kl_penalty_coef": 0.3}, "old.json")
    assert "kl_coef" not in recipe["model"]["init_args"]["objective"]
    assert "kl_penalty_coef: 0.3 -> dropped: use_kl_penalty is false" in said
    recipe, _ = recipe_of({"normalize_advantages": False}, "old.json")
    advantages = recipe["model"]["init_args"]["objective"]["advantages"]["init_args"]
    assert advantages["scale"] == "none"


def test_supervised_settings_become_a_supervised_recipe():
    recipe, said = recipe_of(ALL | {"use_grpo": False}, "old.json")
    assert recipe["model"]["class_path"] == "litgrpo.SFT"
    assert recipe["data"]["class_path"] == "litgrpo.PairData"
    assert recipe["model"]["init_args"].keys() == {"pretrained", "optimizer"}
    dropped = [line for line in said if "supervised training samples nothing" in line]
    assert len(dropped) == 9
    assert len(said) == len(ALL)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"use_grpp": True},
            r"'use_grpp' is no option that can be converted \(did you mean 'use_grpo'\?\)",
        ),
        ({"zzz": 1}, "Known are use_grpo, num_completions_per_prompt"),
        ({"num_completions_per_prompt": 1}, "compare completions of one prompt"),
        ({"num_epochs": "three"}, "num_epochs is 'three'; it must be of type int"),
        ({"use_grpo": 1}, "use_grpo is 1; it must be of type bool"),
        ({"generation_top_p": True}, "generation_top_p is True; it must be of type float"),
        ({"batch_size": 2.5}, "batch_size is 2.5; it must be of type int"),
    ],
)
def test_a_mistake_is_named(settings, message):
    with pytest.raises(ValueError, match=f"old.json: .*{message}|old.json: {message}"):
        recipe_of(settings, "old.json")


def test_a_group_of_one_is_fine_where_nothing_is_compared():
    recipe_of({"use_grpo": False, "num_completions_per_prompt": 1}, "old.json")


def test_only_old_settings_are_taken_for_such(tmp_path):
    texts = {
        "old.json": '{"use_grpo": true, "other": 1}',
        "recipe.json": '{"model": {"class_path": "GRPO"}, "batch_size": 3}',
        "rows.json": '[{"prompt": "a"}]',
        "none.json": '{"depth": 3}',
        "broken.json": "{",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = {path.name for path in tmp_path.iterdir() if old_settings(path) is not None}
    assert found == {"old.json"}
    assert old_settings(tmp_path / "gone.json") is None


def test_the_recipe_is_that_of_the_reasoning_system():
    recipe = read("reasoning_gemma2_2b.yaml")
    made, _ = recipe_of(ALL, "")
    for key in ("pretrained", "rewards"):
        assert made["model"]["init_args"][key] == recipe["model"]["init_args"][key]
    for each in (made, recipe_of({"use_grpo": False}, "")[0]):
        assert each["data"]["init_args"]["template"] == recipe["data"]["init_args"]["template"]


@pytest.fixture
def old(tmp_path) -> Path:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(ALL | {"output_dir": str(tmp_path / "out")}))
    return path


def problems(path: Path, **more: str) -> Path:
    rows = [{"prompt": f"{n}+{n}?", "answer": str(2 * n)} | more for n in range(2 * FEW)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_convert_prints_a_recipe_and_says_what_it_did(old, program, capsys):
    assert program("convert", old, "--train", "mine.jsonl", "--pretrained", "mine") == 0
    shown = capsys.readouterr()
    recipe = yaml.safe_load(shown.out)
    assert shown.out.startswith("# Made from old.json")
    assert recipe["data"]["init_args"]["train"] == "mine.jsonl"
    assert recipe["model"]["init_args"]["pretrained"] == "mine"
    assert "learning_rate: 0.0001 -> model.init_args.optimizer.init_args.lr: 0.0001" in shown.err
    old.write_text('{"use_grpo": true, "learning_rat": 1}')
    assert program("convert", old) == 2
    error = capsys.readouterr().err
    assert error.startswith("error:")
    assert "did you mean 'learning_rate'?" in error
    old.write_text("[]")
    assert program("convert", old) == 2
    assert "no JSON file with options that can be converted" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("use_grpo", [True, False])
def test_fit_takes_the_old_settings_as_they_are(use_grpo, old, tmp_path, program, capsys):
    old.write_text(json.dumps(json.loads(old.read_text()) | {"use_grpo": use_grpo}))
    data = problems(tmp_path / "data.jsonl", completion="<answer>1</answer>")
    overlay = tmp_path / "small.yaml"
    overlay.write_text("data: {init_args: {chat: false}}\n")
    words = ["--model.pretrained", "builtin:tiny-gemma2", "--data.train", data, "-c", overlay]
    assert program("fit", "-c", old, *words, "--trainer.accelerator", "cpu") == 0
    assert "old.json is converted" in capsys.readouterr().err
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert config["trainer"]["max_epochs"] == 1
    assert (tmp_path / "out" / "final_model" / "config.json").exists()
    assert bool(samples_of(tmp_path / "out")) == use_grpo


def test_the_text_of_a_recipe_has_its_three_lines():
    text = as_yaml(recipe_of(ALL, "old.json")[0], "old.json")
    assert [line[:2] for line in text.splitlines()[:4]] == ["# ", "# ", "# ", "mo"]
