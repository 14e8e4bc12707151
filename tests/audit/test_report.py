"""Faults and remarks of tables of numbers."""

import json
from dataclasses import replace

import pandas as pd
import pytest

from litgrpo.audit.answers import find_faults, find_remarks
from litgrpo.audit.cases import GIVEN_UP, HONEST, INCORRECT, MALFORMED
from litgrpo.audit.report import AuditReport
from litgrpo.audit.score import slack

PART = {"lowest": 0.0, "highest": 1.0, "share": 0.5, "slowest_s": 0.0, "slowest_on": "digits"}
PART["scored"] = 36


def part(**changes):
    return PART | {"failed": {}, "unfair": {}} | changes


def report(honest=1.2, wrong=0.2, given_up=0.2, untagged=0.0, parts=None, conflicts=None):
    means = {HONEST: honest, INCORRECT: wrong, GIVEN_UP: given_up, MALFORMED: untagged}
    numbers = {"count": 9, "best_margin": -1.0, "beats": 0, "equals": 0, "example": "so 7"}
    rows = {
        kind: numbers | {"mean": mean, "correct": 9 * (kind == HONEST)}
        for kind, mean in means.items()
    }
    kinds = pd.DataFrame.from_dict(rows, orient="index")
    rewards = pd.DataFrame.from_dict(parts or {"part": part()}, orient="index")
    cosines = {f"reward/cosine_{pair}": value for pair, value in (conflicts or {}).items()}
    faults = list(find_faults(kinds, rewards, ["part"], 1.0, None))
    remarks = list(find_remarks(kinds, rewards, pd.Series(cosines, dtype=float)))
    return AuditReport("nine problems", {"problems": 9}, {"kind": kinds}, faults, remarks)


def test_sound_numbers_pass_and_become_json_and_lines() -> None:
    found = report()
    assert found.passed
    content = json.loads(json.dumps(found.as_dict()))
    assert (content["faults"], content["problems"]) == ([], 9)
    assert content["remarks"] == found.remarks
    assert content["tables"]["kind"][0]["kind"] == HONEST
    assert content["tables"]["kind"][0]["correct"] == 9
    assert found.remarks[0].startswith("the best exploit is 'incorrect, in format': 0.2 on average")
    lines = list(found.lines())
    assert (lines[0], lines[-1]) == ("nine problems", "PASS")
    assert f"remark: {found.remarks[0]}" in lines
    assert any(line.startswith(f"{HONEST} ") and "'so 7'" in line for line in lines)


@pytest.mark.parametrize("more", [0.0, 1e-7, 0.3 - (0.1 + 0.2), 0.0007, 0.0099])
def test_means_that_differ_by_less_than_a_hundredth_of_correctness_are_equal(more: float) -> None:
    assert report(given_up=0.2 + more).passed
    assert report(honest=2.0, wrong=1.0, given_up=1.0, untagged=-more).passed


def test_giving_up_that_pays_and_a_format_that_outweighs_are_faults() -> None:
    assert report(given_up=0.22).faults == [
        "giving up pays: 'no idea' in format earns 0.22, an incorrect attempt 0.2"
    ]
    found = report(honest=1.9, wrong=1.0, given_up=1.0)
    assert found.faults[0].startswith(
        "the format outweighs the answer: an incorrect answer in format earns 1, "
    )
    assert list(found.lines())[-2:] == [f"FAULT: {found.faults[0]}", "FAIL: 1 fault"]


def test_without_correctness_adds_nothing_equal_rewards_are_equal_but_for_rounding() -> None:
    assert report(honest=0.3, wrong=0.1 + 0.2, given_up=0.3, untagged=0.3).passed
    assert not report(honest=0.3, wrong=0.3, given_up=0.31, untagged=0.3).passed


def test_parts_that_are_slow_failing_or_unfair_are_faults() -> None:
    unfair = {HONEST: 2, "bold": 3}
    faulty = part(slowest_s=1.5, failed={"IndexError": 4}, unfair=unfair)
    faults = report(parts={"part": faulty}).faults
    assert [fault.partition(":")[0] for fault in faults] == [
        *("slow", "false negatives", "false negatives", "failures"),
    ]
    assert faults[2].endswith("in the variants bold 3")
    assert faults[3].endswith("(IndexError: 4)")


def test_constant_and_dominant_parts_and_conflicts_are_remarks() -> None:
    parts = {"part": part(lowest=0.3, highest=0.1 + 0.2), "other": part(share=0.97)}
    assert [remark.partition(":")[0] for remark in report(parts=parts).remarks[1:]] == ["constant"]
    parts["third"] = part(share=0.03)
    remarks = report(parts=parts, conflicts={"a_b": -0.9, "a_c": 0.9}).remarks
    assert [remark.partition(":")[0] for remark in remarks[1:]] == [
        *("constant", "dominance", "conflict"),
    ]
    assert remarks[-1].startswith("conflict: a_b have opposed")
    assert report(parts={"part": part(share=1.0)}).remarks[1:] == []


def test_the_last_line_says_what_was_not_tested() -> None:
    found = replace(report(), untested="no answers")
    assert list(found.lines())[-1] == "PASS (no answers)"
    assert found.as_dict()["untested"] == "no answers"
    found.faults.append("slow")
    assert list(found.lines())[-1] == "FAIL: 1 fault"


def test_slack_grows_with_the_reward() -> None:
    assert slack(1000.0) > slack(-1.0) > 1e-6
