import logging

import pytest

from litgrpo.callbacks.completions import Completions
from litgrpo.callbacks.loggers import MetricsCSV, TensorBoard
from litgrpo.runs.doctor.callback import Doctor
from litgrpo.runs.doctor.diagnosis import diagnose
from litgrpo.runs.doctor.render import render_line
from tests.runs.doctor.run_folders import write_run
from tests.support.training import batches, letters, module, train

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def train_with(caplog, *callbacks, iterations=12, **trainer):
    """Train a random model, whose completions never end; return the doctor's log lines."""
    caplog.set_level(logging.INFO, "litgrpo")
    grpo = module(reward=letters, max_iterations=iterations, check_invariants=False)
    train(grpo, batches("a", "b"), callbacks=list(callbacks), **trainer)
    return [line for line in caplog.messages if line.startswith("doctor: ")]


def files(folder):
    return {"logger": MetricsCSV(folder), "default_root_dir": folder, "log_every_n_steps": 1}


def test_a_finding_is_logged_once_with_its_section(caplog, tmp_path):
    lines = train_with(caplog, Doctor(5), iterations=21, **files(tmp_path))
    assert len([line for line in lines if "#no_end_token" in line or "#truncated" in line]) == 1
    assert "since iteration 1" in lines[0]


def test_the_callback_finds_what_the_command_finds(caplog, tmp_path):
    loggers = [MetricsCSV(tmp_path), TensorBoard(str(tmp_path))]
    given = files(tmp_path) | {"logger": loggers}
    lines = train_with(caplog, Completions(5), Doctor(10), **given)
    findings = diagnose(tmp_path)
    assert findings
    assert [line.partition(" (")[0] for line in lines] == [
        render_line(each).partition(" (")[0] for each in findings
    ]


def test_it_can_be_disabled_and_logs_nothing_after_few_iterations(caplog, tmp_path):
    assert train_with(caplog, Doctor(0), **files(tmp_path / "a")) == []
    assert train_with(caplog, Doctor(), iterations=4, **files(tmp_path / "b")) == []


def test_without_its_own_metrics_it_reads_no_earlier_run(caplog, tmp_path):
    write_run(tmp_path, completion__truncated_frac=[1.0] * 30)
    assert train_with(caplog, Doctor(5), default_root_dir=tmp_path) == []


def test_a_higher_severity_is_logged_again_and_a_resumed_run_repeats_nothing():
    doctor = Doctor()
    assert doctor.is_new("truncated", "warning")
    assert not doctor.is_new("truncated", "warning")
    assert doctor.is_new("truncated", "critical")
    resumed = Doctor()
    resumed.load_state_dict(doctor.state_dict())
    assert not resumed.is_new("truncated", "critical")
