"""Runs of litgrpo, TRL and verl are read into series, samples and a config."""

import json
import math

import numpy as np
import pytest

from litgrpo.text.program import program_name
from litgrpo.tools.doctor.run import RunConfig, RunMetrics, measure_trend, read_run
from tests.tools.doctor.run_folders import write_run

NESTED = {"model": {"init_args": {"update": {"epochs_per_rollout": 2}, "kl": None}}}


def series_of(values):
    return RunMetrics.from_rows([{"step": n, "x": x} for n, x in enumerate(values)])["x"]


# --- series ---


def test_rows_become_series_without_empty_cells():
    rows = [{"step": "0", "a": "", "val/b": "1"}, {"step": "1", "a": "2"}, {"step": "2", "a": "x"}]
    metrics = RunMetrics.from_rows(rows)
    assert metrics["a"].steps.tolist() == [1, 2]
    assert metrics["a"].values[0] == 2
    assert math.isnan(metrics["a"].values[1])
    assert metrics["a"].finite.values.tolist() == [2]
    assert metrics.iterations == 2
    assert "b" not in metrics
    assert len(metrics["b"]) == 0


def test_a_later_row_of_an_iteration_replaces_the_earlier_one():
    metrics = RunMetrics.from_rows([{"step": 3, "a": 1}, {"step": 3, "a": 2}])
    assert metrics["a"].values.tolist() == [2]


def test_reward_components_are_metrics_with_a_spread():
    names = ["reward/mean", "reward/std", "reward/group_std", "reward/right", "reward/right_std"]
    metrics = RunMetrics.from_rows([dict.fromkeys(names, 1) | {"step": 1}])
    assert metrics.reward_components() == ["right"]


def test_the_held_out_accuracy_is_found_and_not_its_bounds():
    names = ["val/avg@4_low", "val/avg@4", "val/avg@4_high", "val/pass@4"]
    metrics = RunMetrics.from_rows([dict.fromkeys(names, 1) | {"step": 1}])
    assert metrics.held_out_accuracy() == "val/avg@4"
    assert RunMetrics().held_out_accuracy() == ""


def test_the_last_unbroken_run_of_a_condition_is_dated():
    series = RunMetrics.from_rows([{"step": n, "a": 0} for n in range(1, 9)])["a"]
    condition = np.array([True, False, False, False, True, True, False, True])
    assert series.first_step_of_last_run(condition) == 5


def test_a_trend_is_measured_against_the_noise():
    noisy = measure_trend(series_of(np.random.default_rng(0).normal(0, 1, 200)))
    assert not noisy.rose
    assert not noisy.fell
    assert measure_trend(series_of(np.linspace(0, 1, 40))).rose


# --- config ---


def test_a_key_is_found_with_and_without_init_args():
    config = RunConfig(NESTED, "runs/a/config.yaml")
    assert config.get("model.update.epochs_per_rollout") == 2
    assert config.get("model.init_args.update.epochs_per_rollout") == 2
    assert config.get("model.kl", 3) == 3
    assert config.get("model.update.nothing.there", "x") == "x"


def test_steps_per_iteration_are_unknown_without_a_config():
    assert RunConfig(NESTED).steps_per_iteration == 2
    assert RunConfig({"model": {}}).steps_per_iteration == 1
    assert RunConfig().steps_per_iteration == math.inf


def test_the_fix_command_trains_the_changed_run_in_a_new_folder():
    command = RunConfig({}, "runs/a/config.yaml").fix_command("model.group_size", "8")
    start = f"{program_name()} fit -c runs/a/config.yaml --run_dir runs/a-changed"
    assert command.startswith(start)
    assert command.endswith("--model.group_size 8")
    assert RunConfig().fix_command("model.group_size", "8") == ""
    assert RunConfig({}, "a.yaml").fix_command("model.optimizer.lr", "") == ""


def test_the_fix_command_for_a_reward_is_an_audit():
    config = RunConfig({}, "runs/my run/config.yaml")
    command = config.fix_command("model.rewards.right.function", "")
    assert command == f"{program_name()} audit -c 'runs/my run/config.yaml'"


# --- files ---


def test_the_trainer_state_of_trl_is_read(tmp_path):
    history = [
        {"step": n, "reward": n / 10, "completions/clipped_ratio": 0.5, "rewards/right/mean": 1.0}
        for n in (1, 2)
    ]
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    for given in (tmp_path, folder, folder / "trainer_state.json"):
        metrics = read_run(given).metrics
        assert metrics["reward/mean"].values.tolist() == [0.1, 0.2]
        assert metrics["completion/truncated_frac"].values.tolist() == [0.5, 0.5]
        assert metrics["reward/right"].values.tolist() == [1.0, 1.0]


def test_the_console_log_of_verl_is_read(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(
        "starting\n(TaskRunner pid=3) step:1 - critic/score/mean:0.25 - response_length/mean:14.5\n"
        "(TaskRunner pid=3) step:2 - critic/score/mean:np.float64(1e-1) - x:nan\n"
    )
    metrics = read_run(log).metrics
    assert metrics["reward/mean"].values.tolist() == [0.25, 0.1]
    assert metrics["completion/len_mean"].values.tolist() == [14.5]


def test_older_names_of_verl_are_read_and_completions_in_its_log_are_not(tmp_path):
    """The lines are from verl's published logs of GSM8K."""
    log = tmp_path / "run.log"
    log.write_text(
        "(TaskRunner pid=2) [response] step: 9 ducks\n(TaskRunner pid=2) Step:2 costs:3\n"
        "(TaskRunner pid=2) step:10 - actor/entropy_loss:0.255 - actor/ppo_kl:-0.000 - "
        "val-core/openai/gsm8k/reward/mean@1:0.879 - critic/score/mean:0.941\n"
    )
    metrics = read_run(log).metrics
    found = [metrics[name].values.tolist() for name in ("policy/entropy", "val/reward")]
    assert found == [[0.255], [0.879]]
    assert metrics["reward/mean"].values.tolist() == [0.941]
    assert "costs" not in metrics.series


def test_lines_cut_off_by_a_kill_are_left_out(tmp_path):
    run = write_run(tmp_path, samples=[{"completion": "a"}], a=[1])
    with (run / "samples" / "iteration-000001.jsonl").open("a") as file:
        file.write('{"completion": "b')
    with (run / "metrics.csv").open("a") as file:
        file.write("2,0.0")
    found = read_run(run)
    assert [row["completion"] for row in found.samples] == ["a"]
    assert found.metrics["a"].values.tolist() == [1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.csv", "step\n"),
        ("metrics.csv", "a,b\n1,2\n"),
        ("trainer_state.json", "{"),
        ("trainer_state.json", "{}"),
        ("run.log", "nothing"),
    ],
)
def test_a_file_without_metrics_is_an_error_that_names_it(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        read_run(tmp_path / name)


def test_a_folder_without_metrics_and_a_missing_path_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"metrics\.csv"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="nowhere"):
        read_run(tmp_path / "nowhere")


def test_a_broken_config_is_an_error_in_one_line(tmp_path):
    run = write_run(tmp_path, a=[1])
    (run / "config.yaml").write_text("a: [b\n")
    with pytest.raises(ValueError, match=r"config\.yaml") as error:
        read_run(run)
    assert "\n" not in str(error.value)
