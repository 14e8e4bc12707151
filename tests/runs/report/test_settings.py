from litgrpo.runs.config import RunConfig
from litgrpo.runs.report.settings import (
    UsedSetting,
    describe_environment,
    list_settings,
    repeat_commands,
)
from litgrpo.runs.run import Run, table_of

CONFIG = RunConfig(
    {
        "run_dir": "runs/mine",
        "seed_everything": 3,
        "trainer": {"accelerator": "auto", "devices": 2},
        "model": {"init_args": {"group_size": 4, "max_completion_length": 40}},
        "data": {"init_args": {"batch_size": 16}},
    }
)


def test_settings_that_differ_from_the_recipe_come_first(tmp_path):
    recipe = tmp_path / "my recipe.yaml"
    recipe.write_text("model: {init_args: {group_size: 8, max_completion_length: 40.0}}\n")
    command = f"python cli.py fit -c '{recipe}' --model.group_size=4 --data.batch_size 16"
    names, settings = list_settings(Run(config=CONFIG, command=command))
    assert names == [str(recipe)]
    assert [(each.key, each.recipe, each.used, each.differs) for each in settings] == [
        ("model.init_args.group_size", "8", "4", True),
        ("data.init_args.batch_size", "", "16", True),
        ("model.init_args.max_completion_length", "40", "40", False),
    ]


def test_a_class_path_equals_its_bare_name():
    key, used = "objective.class_path", "litgrpo.algorithms.losses.TokenMean"
    assert not UsedSetting(key, "TokenMean", used).differs
    assert UsedSetting(key, "Token", used).differs
    assert UsedSetting("name", "TokenMean", used).differs


def test_a_missing_recipe_gives_no_settings():
    assert list_settings(Run(config=CONFIG, command="litgrpo fit -c gone.yaml")) == ([], [])


def test_the_environment_is_read_from_the_folder():
    summary = {"seconds": 61.5, "versions": {"torch": "2"}, "seed": 3}
    metrics = table_of([{"step": 1, "perf/generated_tokens": 1000.0, "reward/mean": 0.0}])
    run = Run(metrics=metrics, config=CONFIG, summary=summary)
    assert describe_environment(run) == [
        ("seed", "3"),
        ("devices", "2"),
        ("iterations", "1"),
        ("training", "62 s"),
        ("tokens generated for training", "1,000"),
        ("torch", "2"),
    ]


def test_a_run_is_repeated_by_its_command_or_its_config():
    assert repeat_commands(Run(config=CONFIG, command="litgrpo fit -c quickstart")) == [
        "litgrpo fit -c quickstart",
        "litgrpo fit -c runs/mine/config.yaml --run_dir runs/mine-again",
    ]
    assert repeat_commands(Run()) == []
