"""The doctor names the causes of the labelled runs as often as docs/reference/tools.md states."""

import pytest

from tests.runs.doctor.measure import FAILED, HEALTHY, load_runs, verdict_of_doctor


@pytest.mark.parametrize("half", ["dev", "held_out"])
def test_causes_are_named_and_healthy_runs_have_no_alarms(half):
    verdicts = [verdict_of_doctor(run) for run in load_runs(half)]
    failed = [each for each in verdicts if each.label == FAILED]
    healthy = [each for each in verdicts if each.label == HEALTHY]
    assert sum(each.cause_named for each in failed) >= 0.95 * len(failed)
    assert sum(bool(each.alarms) for each in healthy) <= 0.05 * len(healthy)


def test_the_halves_share_neither_tasks_nor_seeds():
    labels = {half: [run["label"] for run in load_runs(half)] for half in ("dev", "held_out")}
    for key in ("task", "seed"):
        of_half = [{label[key] for label in labels[half]} for half in labels]
        assert not of_half[0] & of_half[1]


def test_there_are_enough_kinds_and_runs():
    labels = [run["label"] for half in ("dev", "held_out") for run in load_runs(half)]
    assert len({label["kind"] for label in labels if label["label"] == FAILED}) >= 25
    assert len([label for label in labels if label["label"] == HEALTHY]) >= 75
