from litgrpo.runs.config import RunConfig
from litgrpo.runs.report.settings import describe_environment, repeat_commands
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
