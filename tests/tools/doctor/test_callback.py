import logging

import pytest

from litgrpo.callbacks.loggers import Board
from litgrpo.callbacks.metrics_csv import MetricsCSV
from litgrpo.tools.doctor.callback import Doctor
from litgrpo.tools.doctor.diagnosis import diagnose
from tests.support.training import batches, letters, module, train

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def said(caplog):
    return [line for line in caplog.messages if line.startswith("doctor: ")]


def fitted(caplog, *callbacks, iterations=12, **trainer):
    """A run whose completions never end: the tiny model is random."""
    caplog.set_level(logging.INFO, "litgrpo")
    grpo = module(reward=letters, max_iterations=iterations, check_invariants=False)
    train(grpo, batches("a", "b"), callbacks=list(callbacks), **trainer)
    return said(caplog)


def test_a_finding_is_said_once_with_its_page(caplog):
    lines = fitted(caplog, Doctor(5), iterations=21)
    assert len([line for line in lines if "#no_end_token" in line or "#truncated" in line]) == 1
    assert "since iteration 1" in lines[0]


def test_it_says_what_the_verb_says_of_the_folder(caplog, tmp_path):
    loggers = [MetricsCSV(tmp_path), Board(str(tmp_path))]
    lines = fitted(caplog, Doctor(10), logger=loggers, log_every_n_steps=1)
    found = [each.rule for each in diagnose(tmp_path)]
    assert found
    assert all(any(f"#{rule})" in line for line in lines) for rule in found)


def test_it_can_be_switched_off_and_says_nothing_before_it_can_judge(caplog):
    assert fitted(caplog, Doctor(0)) == []
    assert fitted(caplog, Doctor(), iterations=4) == []


def test_what_became_worse_is_news_and_a_resumed_run_repeats_nothing():
    doctor = Doctor()
    assert doctor.is_news("loops", "warning")
    assert not doctor.is_news("loops", "warning")
    assert doctor.is_news("loops", "critical")
    resumed = Doctor()
    resumed.load_state_dict(doctor.state_dict())
    assert not resumed.is_news("loops", "critical")


def test_a_resumed_run_remembers_its_numbers_up_to_the_checkpoint(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,reward/mean\n1,0.5\n2,0.6\n3,0.7\n")
    doctor = Doctor()
    doctor.remember(tmp_path / "metrics.csv", 2)
    assert doctor.numbers["reward/mean"] == {1: 0.5, 2: 0.6}
