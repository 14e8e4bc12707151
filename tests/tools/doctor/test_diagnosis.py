import pytest

from litgrpo.tools.doctor.diagnosis import diagnose, examine, in_order
from litgrpo.tools.doctor.finding import Diagnosis, Finding
from litgrpo.tools.doctor.rule import EXPLAINS, RULES
from litgrpo.tools.doctor.run_files import read
from tests.tools.doctor.writing import written

CONFIG = {"model": {"class_path": "litgrpo.GRPO", "init_args": {"max_completion_length": 12}}}
CUT = [0.0] * 15 + [0.8] * 15


def test_a_finding_names_the_key_the_command_the_samples_and_since_when(tmp_path):
    samples = [{"completion": "a [cut]", "truncated": True}, {"truncated": False}]
    run = written(tmp_path / "run", CONFIG, samples, completion__truncated_frac=CUT)
    (found,) = diagnose(run)
    assert (found.rule, found.severity) == ("truncated", "critical")
    assert 14 <= found.since <= 18
    assert [row["completion"] for row in found.samples] == ["a [cut]"]
    assert (found.key, found.value) == ("model.max_completion_length", "24")
    assert f"-c {run}/config.yaml" in found.command
    assert "--model.max_completion_length 24" in found.command
    assert found.page == "docs/doctor.md#truncated"


def test_a_run_that_is_well_has_no_finding(tmp_path):
    assert diagnose(written(tmp_path, completion__truncated_frac=[0.01] * 30)) == []


def test_the_most_severe_comes_first_then_the_earliest():
    found = [
        Finding("c", "", "warning", 2),
        Finding("b", "", "critical", 9),
        Finding("a", "", "critical", 3),
    ]
    assert [each.rule for each in in_order(found)] == ["a", "b", "c"]


def test_every_finding_is_counted_also_what_others_explain():
    cause = Finding("a", "", "info", 1, symptoms=(Finding("b", "", "info", 1),))
    assert [each.rule for each in Diagnosis((cause,), {}, {}).every] == ["a", "b"]


def test_levels_are_ordered():
    assert Finding("a", "", "warning", 1).at_least("info")
    assert not Finding("a", "", "warning", 1).at_least("critical")


def test_what_is_explained_stands_under_its_cause_unless_it_began_before_it():
    cause = Finding("truncated", "", "critical", 20)
    late, early = Finding("too_hard", "", "warning", 18), Finding("too_hard", "", "warning", 1)
    assert [each.rule for each in in_order([cause, late])] == ["truncated"]
    assert in_order([cause, late])[0].symptoms == (late,)
    assert [each.rule for each in in_order([cause, early])] == ["truncated", "too_hard"]


def test_a_chain_of_causes_ends_at_the_first():
    names = ("not_finite", "collapsed", "kl_blowup")
    (found,) = in_order([Finding(name, "", "warning", 1) for name in names])
    assert found.rule == "not_finite"
    assert {each.rule for each in found.symptoms} == {"collapsed", "kl_blowup"}


def test_the_graph_of_causes_names_rules_and_has_no_circle():
    names = {rule.name for rule in RULES}
    assert EXPLAINS.keys() | {name for found in EXPLAINS.values() for name in found} <= names

    def reached(rule):
        return {rule}.union(*(reached(each) for each in EXPLAINS.get(rule, ())))

    for rule in EXPLAINS:
        assert all(rule not in reached(each) for each in EXPLAINS[rule])


def test_what_cannot_be_checked_is_said_with_what_is_missing(tmp_path):
    diagnosis = examine(read(written(tmp_path, completion__truncated_frac=[0.0] * 12)))
    assert diagnosis.fine.keys() == {"not_finite", "truncated"}
    assert diagnosis.unchecked["kl_blowup"] == "needs policy/kl"
    assert diagnosis.unchecked["reward_contradicts"] == "needs samples"
    assert {*diagnosis.fine, *diagnosis.unchecked} == {rule.name for rule in RULES}


def test_after_few_iterations_nothing_is_said_of_trends(tmp_path):
    diagnosis = examine(read(written(tmp_path, reward__mean=[0.5] * 6)))
    assert diagnosis.unchecked["collapsed"] == "needs 20 iterations"


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_run_of_which_no_number_is_finite_is_critical(tmp_path, value):
    (found,) = diagnose(written(tmp_path, reward__mean=[value] * 5))
    assert (found.rule, found.severity, found.since) == ("not_finite", "critical", 1)


def test_samples_with_holes_are_no_trouble(tmp_path):
    samples = [{}, {"rewards": None, "columns": None, "reward": None}, {"rewards": {"a": None}}]
    run = written(tmp_path, None, samples, reward__failed_frac=[0.5] * 30, reward__mean=[1] * 30)
    assert "rewards_fail" in [each.rule for each in diagnose(run)]
