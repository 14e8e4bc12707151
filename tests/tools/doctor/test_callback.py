import logging

import pytest

from litgrpo.callbacks.loggers import MetricsCSV, TensorBoard
from litgrpo.tools.doctor.callback import Doctor
from litgrpo.tools.doctor.diagnosis import diagnose
from tests.support.training import batches, letters, module, train

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def train_with(caplog, *callbacks, iterations=12, **trainer):
    """Train a random model, whose completions never end; return the doctor's log lines."""
    caplog.set_level(logging.INFO, "litgrpo")
    grpo = module(reward=letters, max_iterations=iterations, check_invariants=False)
    train(grpo, batches("a", "b"), callbacks=list(callbacks), **trainer)
    return [line for line in caplog.messages if line.startswith("doctor: ")]


def test_a_finding_is_logged_once_with_its_section(caplog):
    lines = train_with(caplog, Doctor(5), iterations=21)
    assert len([line for line in lines if "#no_end_token" in line or "#truncated" in line]) == 1
    assert "since iteration 1" in lines[0]


def test_the_callback_finds_what_the_command_finds(caplog, tmp_path):
    loggers = [MetricsCSV(tmp_path), TensorBoard(str(tmp_path))]
    lines = train_with(caplog, Doctor(10), logger=loggers, log_every_n_steps=1)
    rules = [each.rule for each in diagnose(tmp_path)]
    assert rules
    assert all(any(f"#{rule})" in line for line in lines) for rule in rules)


def test_it_can_be_disabled_and_logs_nothing_after_few_iterations(caplog):
    assert train_with(caplog, Doctor(0)) == []
    assert train_with(caplog, Doctor(), iterations=4) == []


def test_a_higher_severity_is_logged_again_and_a_resumed_run_repeats_nothing():
    doctor = Doctor()
    assert doctor.is_new("loops", "warning")
    assert not doctor.is_new("loops", "warning")
    assert doctor.is_new("loops", "critical")
    resumed = Doctor()
    resumed.load_state_dict(doctor.state_dict())
    assert not resumed.is_new("loops", "critical")


def test_a_resumed_run_loads_its_metrics_up_to_the_checkpoint(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,reward/mean\n1,0.5\n2,0.6\n3,0.7\n")
    doctor = Doctor()
    doctor.load_metrics(tmp_path / "metrics.csv", 2)
    assert doctor.columns["reward/mean"] == {1: 0.5, 2: 0.6}
