import math

from litgrpo.tools.doctor.config import Config

NESTED = {"model": {"init_args": {"update": {"epochs_per_rollout": 2}, "kl": None}}}


def test_a_key_is_found_with_and_without_init_args():
    config = Config(NESTED, "runs/a/config.yaml")
    assert config.get("model.update.epochs_per_rollout") == 2
    assert config.get("model.init_args.update.epochs_per_rollout") == 2
    assert config.get("model.kl", 3) == 3
    assert config.get("model.update.nothing.there", "x") == "x"
    assert config.steps_per_iteration == 2
    assert Config({"model": {}}).steps_per_iteration == 1
    assert Config().steps_per_iteration == math.inf  # of a run that says nothing of it


def test_a_command_starts_the_changed_run_in_a_folder_of_its_own():
    command = Config({}, "runs/a/config.yaml").command("model.group_size", "8")
    assert command.startswith("python cli.py fit -c runs/a/config.yaml --run_dir runs/a-changed")
    assert command.endswith("--model.group_size 8")
    assert Config().command("model.group_size", "8") == ""
    assert Config({}, "a.yaml").command("model.optimizer.lr", "") == ""


def test_where_a_reward_is_to_be_looked_at_the_command_does_that():
    command = Config({}, "runs/my run/config.yaml").command("model.rewards.right.function", "")
    assert command == "python cli.py audit -c 'runs/my run/config.yaml'"
