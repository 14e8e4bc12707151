import json

import pytest

from litgrpo.tools.doctor.run_files import read
from tests.tools.doctor.writing import written


def test_trls_state_is_read_by_its_names(tmp_path):
    history = [
        {"step": n, "reward": n / 10, "completions/clipped_ratio": 0.5, "rewards/right/mean": 1.0}
        for n in (1, 2)
    ]
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    for given in (tmp_path, folder, folder / "trainer_state.json"):
        metrics = read(given).metrics
        assert metrics["reward/mean"].values.tolist() == [0.1, 0.2]
        assert metrics["completion/truncated_frac"].values.tolist() == [0.5, 0.5]
        assert metrics["reward/right"].values.tolist() == [1.0, 1.0]


def test_verls_console_is_read_by_its_names(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(
        "starting\n(TaskRunner pid=3) step:1 - critic/score/mean:0.25 - response_length/mean:14.5\n"
        "(TaskRunner pid=3) step:2 - critic/score/mean:np.float64(1e-1) - x:nan\n"
    )
    metrics = read(log).metrics
    assert metrics["reward/mean"].values.tolist() == [0.25, 0.1]
    assert metrics["completion/len_mean"].values.tolist() == [14.5]


def test_verls_older_names_are_read_and_completions_in_its_log_are_not(tmp_path):
    """As verl's published logs of GSM8K are written."""
    log = tmp_path / "run.log"
    log.write_text(
        "(TaskRunner pid=2) [response] step: 9 ducks\n(TaskRunner pid=2) Step:2 costs:3\n"
        "(TaskRunner pid=2) step:10 - actor/entropy_loss:0.255 - actor/ppo_kl:-0.000 - "
        "val-core/openai/gsm8k/reward/mean@1:0.879 - critic/score/mean:0.941\n"
    )
    metrics = read(log).metrics
    found = [metrics[name].values.tolist() for name in ("policy/entropy", "val/reward")]
    assert found == [[0.255], [0.879]]
    assert metrics["reward/mean"].values.tolist() == [0.941]
    assert "costs" not in metrics.series


def test_a_file_of_samples_that_a_kill_cut_short_is_read_as_far_as_it_goes(tmp_path):
    run = written(tmp_path, samples=[{"completion": "a"}], a=[1])
    with (run / "samples" / "iteration-000001.jsonl").open("a") as file:
        file.write('{"completion": "b')
    assert [row["completion"] for row in read(run).samples] == ["a"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.csv", "step\n", "holds no numbers"),
        ("trainer_state.json", "{", "is no JSON"),
        ("trainer_state.json", "{}", "no log_history"),
        ("run.log", "nothing", "holds no numbers"),
        ("metrics.csv", "a,b\n1,2\n", "holds no numbers"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_a_folder_without_numbers_and_a_path_that_is_not_there_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no metrics"):
        read(tmp_path)
    with pytest.raises(ValueError, match="there is no run folder"):
        read(tmp_path / "nowhere")


def test_a_recipe_that_is_broken_is_said_in_one_line(tmp_path):
    run = written(tmp_path, a=[1])
    (run / "config.yaml").write_text("a: [b\n")
    with pytest.raises(ValueError, match="is no YAML") as refused:
        read(run)
    assert "\n" not in str(refused.value)
