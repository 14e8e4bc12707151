"""Runs of litgrpo, TRL and verl are read into a table, samples, evaluations and a config."""

import json
import math

import pytest

from litgrpo.runs.config import RunConfig
from litgrpo.runs.run import Run, read_evaluation, read_json_lines, table_of
from litgrpo.text.program import program_name
from tests.runs.doctor.run_folders import write_run
from tests.runs.report.run_folders import make_run

NESTED = {"model": {"init_args": {"update": {"epochs_per_rollout": 2}, "kl": None}}}


# --- metrics ---


def test_rows_become_a_table_in_which_an_empty_cell_is_not_a_logged_nan():
    rows = [{"step": "0", "a": "", "val/b": "1"}, {"step": "1", "a": "2"}, {"step": "2", "a": "x"}]
    rows.append({"step": 3.0, "a": math.nan})
    run = Run(metrics=table_of(rows))
    assert run.metrics["a"].dropna().to_dict() == {1: 2.0, 2: math.inf, 3: math.inf}
    assert run["a"].to_dict() == {1: 2.0}
    assert run.iterations == 3
    assert "b" not in run
    assert run["b"].empty


def test_a_file_is_read_as_the_same_table(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,val/b,a\n0,1,\n1,,2\n2,,x\n3,,nan\n")
    run = Run(tmp_path)
    assert run.metrics["a"].dropna().to_dict() == {1: 2.0, 2: math.inf, 3: math.inf}
    assert [note.split()[0] for note in run.notes] == ["2"]


def test_a_later_value_of_an_iteration_replaces_the_earlier_one():
    rows = [{"step": 3, "a": 1, "b": 1}, {"step": 3, "a": 2}]
    assert table_of(rows).to_dict("list") == {"a": [2.0], "b": [1.0]}


def test_values_that_are_not_finite_are_counted_and_rows_without_an_iteration_left_out(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,a\n1,nan\n2,0.5\n2,0.25\nx,9\n3,inf\n")
    run = Run(tmp_path)
    assert run["a"].to_dict() == {2: 0.25}
    assert [note.split()[0] for note in run.notes] == ["2"]


def test_a_line_with_too_many_cells_is_left_out(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,a\n1,0.5\n2,0.5,7\n3,1.0\n")
    assert Run(tmp_path)["a"].to_dict() == {1: 0.5, 3: 1.0}


def test_reward_components_are_metrics_with_a_spread():
    names = ["reward/mean", "reward/std", "reward/group_std", "reward/right", "reward/right_std"]
    run = Run(metrics=table_of([dict.fromkeys(names, 1) | {"step": 1}]))
    assert run.reward_components == ["right"]


def test_the_held_out_accuracy_is_found_and_not_its_bounds():
    names = ["val/avg@4_low", "val/avg@4", "val/avg@4_high", "val/pass@4"]
    run = Run(metrics=table_of([dict.fromkeys(names, 1) | {"step": 1}]))
    assert run.held_out_accuracy == "val/avg@4"
    assert Run().held_out_accuracy == ""


# --- config ---


def test_a_key_is_found_with_and_without_init_args():
    config = RunConfig(NESTED, "runs/a/config.yaml")
    assert config.get("model.update.epochs_per_rollout") == 2
    assert config.get("model.init_args.update.epochs_per_rollout") == 2
    assert config.get("model.kl", 3) == 3
    assert config.get("model.update.nothing.there", "x") == "x"


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
        run = Run.read(given)
        assert run["reward/mean"].tolist() == [0.1, 0.2]
        assert run["completion/truncated_frac"].tolist() == [0.5, 0.5]
        assert run["reward/right"].tolist() == [1.0, 1.0]


def test_the_console_log_of_verl_is_read(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(
        "starting\n(TaskRunner pid=3) step:1 - critic/score/mean:0.25 - response_length/mean:14.5\n"
        "(TaskRunner pid=3) step:2 - critic/score/mean:np.float64(1e-1) - x:nan\n"
    )
    run = Run.read(log)
    assert run["reward/mean"].tolist() == [0.25, 0.1]
    assert run["completion/len_mean"].tolist() == [14.5]


def test_older_names_of_verl_are_read_and_completions_in_its_log_are_not(tmp_path):
    """The lines are from verl's published logs of GSM8K."""
    log = tmp_path / "run.log"
    log.write_text(
        "(TaskRunner pid=2) [response] step: 9 ducks\n(TaskRunner pid=2) Step:2 costs:3\n"
        "(TaskRunner pid=2) step:10 - actor/entropy_loss:0.255 - actor/ppo_kl:-0.000 - "
        "val-core/openai/gsm8k/reward/mean@1:0.879 - critic/score/mean:0.941\n"
    )
    run = Run.read(log)
    found = [run[name].tolist() for name in ("policy/entropy", "val/reward")]
    assert found == [[0.255], [0.879]]
    assert run["reward/mean"].tolist() == [0.941]
    assert "costs" not in run


def test_lines_cut_off_by_a_kill_are_left_out(tmp_path):
    run = write_run(tmp_path, samples=[{"completion": "a"}], a=[1])
    with (run / "samples" / "iteration-000001.jsonl").open("a") as file:
        file.write('{"completion": "b')
    with (run / "metrics.csv").open("a") as file:
        file.write("2,0.0")
    found = Run.read(run)
    assert [row["completion"] for row in found.samples] == ["a"]
    assert found["a"].tolist() == [1]


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
        Run.read(tmp_path / name)


def test_a_folder_without_metrics_and_a_missing_path_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"metrics\.csv"):
        Run.read(tmp_path)
    with pytest.raises(ValueError, match="nowhere"):
        Run.read(tmp_path / "nowhere")


def test_a_broken_config_is_an_error_in_one_line(tmp_path):
    run = write_run(tmp_path, a=[1])
    (run / "config.yaml").write_text("a: [b\n")
    with pytest.raises(ValueError, match=r"config\.yaml") as error:
        _ = Run.read(run).config
    assert "\n" not in str(error.value)


def test_a_whole_run_is_read(tmp_path):
    run = Run(make_run(tmp_path / "mine"))
    assert (run.name, run.iterations, list(run.evaluation_files)) == ("mine", 60, [0, 60])
    assert run.command.startswith("python cli.py fit -c configs/quickstart.yaml")
    assert run["val/avg@2"].to_dict() == {0: 0.25, 60: 0.75}
    assert len(run.evaluations[0]) == 20
    assert not run.notes


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="none"):
        Run(tmp_path / "none")


def test_evaluations_cut_off_by_a_kill_are_left_out_and_noted(tmp_path):
    run = make_run(tmp_path / "killed")
    with (run / "metrics.csv").open("a") as file:
        file.write("61,0.9")
    with (run / "evaluation" / "iteration-000060.jsonl").open("a") as file:
        file.write('{"index": 9, "pro')
    (run / "summary.json").write_text('{"seconds": 1')
    found = Run(run)
    assert found.iterations == 60
    assert found.evaluations.keys() == {0, 60}
    assert found.summary == {}
    assert [note.split()[0] for note in found.notes] == ["iteration-000060.jsonl:", "summary.json"]


@pytest.mark.parametrize("content", ["[1, 2]\n", '{"index": 1}\n', "null\n", "[" * 9999 + "\n"])
def test_lines_without_an_evaluation_are_left_out(content, tmp_path):
    run = make_run(tmp_path / "odd")
    (run / "evaluation" / "iteration-000060.jsonl").write_text(content)
    assert list(Run(run).evaluations) == [0]


HUGE = 10**400
OF_OTHER_KINDS = [
    *({name: [1]} for name in ("prompt", "completion", "set", "failed", "rewards", "columns")),
    *({name: {}} for name in ("prompt", "messages", "turn_rewards", "samples", "iteration")),
    *({name: HUGE} for name in ("reward", "correct", "length", "index", "iteration")),
    *({"calls": calls} for calls in ([1], {"f": 1}, {"f": [1]}, {"f": [1, HUGE]}, {"f": "ab"})),
    *({"rewards": {"a": value}} for value in ("x", [1], HUGE)),
    *({"messages": [value]} for value in (1, {}, {"role": "user"})),
    {"correct": "x"},
    {"turn_rewards": ["x"]},
]


@pytest.mark.parametrize("fields", OF_OTHER_KINDS)
def test_a_line_with_a_value_of_another_kind_is_one_that_cannot_be_read(fields, tmp_path):
    file, row = tmp_path / "a.jsonl", {"prompt": "a", "completion": "b", "reward": None}
    file.write_text(f"{json.dumps(row)}\n{json.dumps(row | fields)}\n")
    assert read_json_lines(file) == ([row], 1)
    for part in ({"samples": [row | fields]}, {"samples": [row], "greedy": row | fields}):
        file.write_text(json.dumps({"index": 0, "prompt": "a"} | part))
        assert read_evaluation(file) == ([], 1)


def test_a_number_that_python_does_not_read_is_one_line_or_file_less(tmp_path):
    digits = "1" * 5_000
    run = write_run(tmp_path, samples=[{"completion": "a"}], a=[1])
    with (run / "samples" / "iteration-000001.jsonl").open("a") as file:
        file.write(f'{{"a": {digits}}}\n')
    with (run / "metrics.csv").open("a") as file:
        file.write(f"2,{digits}\n{digits},1\n")
    (run / "summary.json").write_text(f'{{"seconds": {digits}}}')
    (run / "config.yaml").write_text(f"a: {digits}\n")
    found = Run.read(run)
    assert [row["completion"] for row in found.samples] == ["a"]
    assert found["a"].to_dict() == {1: 1}
    assert found.summary == {}
    with pytest.raises(ValueError, match=r"config\.yaml is not valid YAML"):
        _ = found.config
    state = tmp_path / "trainer_state.json"
    state.write_text(f'{{"log_history": [{{"step": {digits}}}]}}')
    with pytest.raises(ValueError, match=r"trainer_state\.json is not valid JSON"):
        Run.read(state)
    state.write_text(f'{{"log_history": [{{"step": 1, "reward": {HUGE}, "loss": 1}}]}}')
    assert Run.read(state).metrics["reward/mean"].tolist() == [math.inf]


def test_five_evaluations_are_kept_with_the_first_and_last(tmp_path):
    run = make_run(tmp_path / "many")
    text = (run / "evaluation" / "iteration-000000.jsonl").read_text()
    for n in range(1, 60):
        (run / "evaluation" / f"iteration-{n:06d}.jsonl").write_text(text)
    assert list(Run(run).evaluations) == [0, 15, 30, 45, 60]
