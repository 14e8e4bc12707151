from litgrpo.doctor.diagnosis import diagnose, in_order
from litgrpo.doctor.finding import Diagnosis, Finding
from tests.doctor.writing import written

CONFIG = {"model": {"class_path": "litgrpo.GRPO", "init_args": {"max_completion_len": 12}}}
CUT = [0.0] * 15 + [0.8] * 15


def test_a_finding_names_the_key_the_command_the_samples_and_since_when(tmp_path):
    samples = [{"completion": "a [cut]", "truncated": True}, {"truncated": False}]
    run = written(tmp_path / "run", CONFIG, samples, completion__truncated_frac=CUT)
    (found,) = diagnose(run)
    assert (found.rule, found.severity) == ("truncated", "critical")
    assert 16 <= found.since <= 18
    assert found.samples == ({"completion": "a [cut]", "truncated": True},)
    assert (found.key, found.value) == ("model.max_completion_len", "24")
    assert f"-c {run}/config.yaml" in found.command
    assert "--model.max_completion_len 24" in found.command
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
