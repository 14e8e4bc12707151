import re
from pathlib import Path

import pytest

from litgrpo.runs.doctor.diagnosis import RULES, diagnose, examine, group_by_cause
from litgrpo.runs.doctor.finding import Diagnosis, Finding
from litgrpo.runs.run import Run
from tests.runs.doctor.run_folders import write_run

CONFIG = {"model": {"class_path": "litgrpo.GRPO", "init_args": {"max_completion_length": 12}}}
CUT = [0.0] * 15 + [0.8] * 15
DOCS = Path(__file__).parents[3] / "docs"
SECTIONS = dict(
    re.findall(
        r"^### (\w+)\n(.*?)(?=^##|\Z)",
        (DOCS / "reference" / "tools.md").read_text(),
        flags=re.MULTILINE | re.DOTALL,
    )
)


def test_a_finding_has_setting_command_samples_and_first_iteration(tmp_path):
    samples = [{"completion": "a [cut]", "truncated": True}, {"truncated": False}]
    run = write_run(tmp_path / "run", CONFIG, samples, completion__truncated_frac=CUT)
    (finding,) = diagnose(run)
    assert (finding.rule, finding.severity) == ("truncated", "critical")
    assert 14 <= finding.first_iteration <= 18
    assert [row["completion"] for row in finding.samples] == ["a [cut]"]
    assert (finding.setting, finding.value) == ("model.max_completion_length", "24")
    assert f"-c {run}/config.yaml" in finding.command
    assert "--model.max_completion_length 24" in finding.command
    assert finding.doc == "docs/reference/tools.md#truncated"


def test_a_healthy_run_has_no_findings(tmp_path):
    assert diagnose(write_run(tmp_path, completion__truncated_frac=[0.01] * 30)) == []


def test_the_most_severe_comes_first_then_the_earliest():
    findings = [
        Finding("c", "", "warning", 2),
        Finding("b", "", "critical", 9),
        Finding("a", "", "critical", 3),
    ]
    assert [each.rule for each in group_by_cause(findings)] == ["a", "b", "c"]


def test_all_findings_include_symptoms():
    cause = Finding("a", "", "warning", 1, symptoms=(Finding("b", "", "warning", 1),))
    assert [each.rule for each in Diagnosis((cause,), {}, {}).all_findings] == ["a", "b"]


def test_severities_are_ordered():
    assert Finding("a", "", "critical", 1).at_least("warning")
    assert not Finding("a", "", "warning", 1).at_least("critical")


def test_a_symptom_is_below_its_cause_unless_it_began_earlier():
    cause = Finding("truncated", "", "critical", 20)
    late, early = Finding("too_hard", "", "warning", 18), Finding("too_hard", "", "warning", 1)
    assert [each.rule for each in group_by_cause([cause, late])] == ["truncated"]
    assert group_by_cause([cause, late])[0].symptoms == (late,)
    assert [each.rule for each in group_by_cause([cause, early])] == ["truncated", "too_hard"]


def test_a_chain_of_causes_ends_at_the_first():
    names = ("not_finite", "collapsed", "too_hard")
    (finding,) = group_by_cause([Finding(name, "", "warning", 1) for name in names])
    assert finding.rule == "not_finite"
    assert {each.rule for each in finding.symptoms} == {"collapsed", "too_hard"}


def test_the_graph_of_causes_contains_rules_and_no_cycle():
    explains = {rule.name: rule.explains for rule in RULES}
    assert {name for symptoms in explains.values() for name in symptoms} <= explains.keys()

    def reach(rule):
        return {rule}.union(*(reach(each) for each in explains[rule]))

    for rule, symptoms in explains.items():
        assert all(rule not in reach(each) for each in symptoms)


def test_rules_without_their_metrics_are_listed_with_the_missing_ones(tmp_path):
    diagnosis = examine(Run.read(write_run(tmp_path, completion__truncated_frac=[0.0] * 12)))
    assert diagnosis.passed.keys() == {"not_finite", "truncated"}
    assert diagnosis.not_checked["double_begin"] == "needs prompt/begin_tokens"
    assert diagnosis.not_checked["reward_contradicts"] == "needs samples"
    assert {*diagnosis.passed, *diagnosis.not_checked} == {rule.name for rule in RULES}


def test_trends_are_not_checked_after_few_iterations(tmp_path):
    diagnosis = examine(Run.read(write_run(tmp_path, reward__mean=[0.5] * 6)))
    assert diagnosis.not_checked["collapsed"] == "needs 20 iterations"


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_run_without_a_finite_metric_is_critical(tmp_path, value):
    (finding,) = diagnose(write_run(tmp_path, reward__mean=[value] * 5))
    assert (finding.rule, finding.severity, finding.first_iteration) == (
        "not_finite",
        "critical",
        1,
    )


def test_samples_with_missing_fields_are_accepted(tmp_path):
    samples = [{}, {"rewards": None, "columns": None, "reward": None}, {"rewards": {"a": None}}]
    run = write_run(tmp_path, None, samples, reward__failed_frac=[0.5] * 30, reward__mean=[1] * 30)
    assert "rewards_fail" in [each.rule for each in diagnose(run)]


# --- docs/reference/tools.md ---


def test_every_rule_has_a_section_in_the_order_of_the_table():
    assert list(SECTIONS) == [rule.name for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_section_has_symptoms_reasons_and_changes_and_the_check_its_source(rule):
    for part in ("*Looks like:*", "*Why:*", "*Change:*"):
        assert part in SECTIONS[rule.name]
    assert "Source: " in rule.check.__doc__
