"""The labelled runs say of the doctor what docs/doctor.md says."""

import pytest

from tests.tools.doctor.measure import FAILED, HEALTHY, labelled, ours


@pytest.mark.parametrize("half", ["dev", "held_out"])
def test_causes_are_named_and_healthy_runs_left_alone(half):
    verdicts = [ours(line) for line in labelled(half)]
    failed = [each for each in verdicts if each.label == FAILED]
    healthy = [each for each in verdicts if each.label == HEALTHY]
    assert sum(each.named for each in failed) >= 0.95 * len(failed)
    assert sum(bool(each.alarms) for each in healthy) <= 0.05 * len(healthy)


def test_neither_a_task_nor_a_seed_is_in_both_halves():
    labels = {half: [line["label"] for line in labelled(half)] for half in ("dev", "held_out")}
    for key in ("task", "seed"):
        of_half = [{label[key] for label in labels[half]} for half in labels]
        assert not of_half[0] & of_half[1]


def test_there_are_enough_kinds_and_runs():
    labels = [line["label"] for half in ("dev", "held_out") for line in labelled(half)]
    assert len({label["kind"] for label in labels if label["label"] == FAILED}) >= 25
    assert len([label for label in labels if label["label"] == HEALTHY]) >= 75
