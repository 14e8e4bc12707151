import json

import yaml

GAME = {
    "model": {
        "class_path": "litgrpo.GRPO",
        "init_args": {
            "pretrained": "builtin:tiny-gemma2",
            "environment": {"class_path": "litgrpo.environments.examples.NumberGame"},
            "episode": {"max_turns": 2, "max_turn_tokens": 6, "turn_format": "inline"},
            "rewards": {"environment": {"weight": 1.0}},
            "max_completion_length": 16,
        },
    },
    "data": {
        "class_path": "litgrpo.PromptData",
        "init_args": {
            "train": {"class_path": "litgrpo.data.EpisodePrompts", "init_args": {"size": 6}},
        },
    },
}


def test_an_environment_is_audited_with_its_scripted_policies(cli, tmp_path):
    recipe, report = tmp_path / "game.yaml", tmp_path / "report.json"
    recipe.write_text(yaml.safe_dump(GAME))
    code, out, err = cli("audit", "-c", str(recipe), "--limit", "2", "--report", str(report))
    assert code in (0, 1), err  # a policy may guess correctly by luck
    assert "playing 4 episodes of 2 rows" in out
    assert "gives empty turns " in out
    found = json.loads(report.read_text())
    assert found["rows"] == 2
    lines = found["tables"]["policy"]
    assert not any(line["failed"] for line in lines)
    nothing = next(line for line in lines if line["policy"] == "gives empty turns")
    assert (nothing["mean"], nothing["turns"]) == (0.0, 2.0)


def test_the_reward_of_an_environment_without_one_is_rejected_as_in_fit(cli, tmp_path):
    recipe = tmp_path / "game.yaml"
    recipe.write_text(yaml.safe_dump(GAME))
    code, _, err = cli("audit", "-c", str(recipe), "--model.environment", "null")
    assert (code, err.count("\n")) == (2, 1)
    assert "the environment's own reward, but model.environment is not set" in err


def test_missing_rows_or_model_is_one_line(cli, tmp_path):
    recipe = tmp_path / "game.yaml"
    recipe.write_text(yaml.safe_dump({"model": GAME["model"]}))
    code, _, err = cli("audit", "-c", str(recipe))
    assert (code, err.count("\n")) == (2, 1)
    assert "--problems" in err
    del GAME["model"]["init_args"]["pretrained"]
    recipe.write_text(yaml.safe_dump(GAME))
    code, _, err = cli("audit", "-c", str(recipe))
    assert (code, err.count("\n")) == (2, 1)
    assert "model.pretrained" in err
