"""Faults and remarks of a report."""

import json

import pytest

from litgrpo.audit.cases import GIVEN_UP, HONEST, INCORRECT, MALFORMED
from litgrpo.audit.report import KindResult, Report, RewardResult, slack


def line(kind: str, mean: float, **changes) -> KindResult:
    correct = 9 if kind == HONEST else 0
    numbers = {
        "count": 9,
        "correct": correct,
        "best_margin": -1.0,
        "beats": 0,
        "equals": 0,
        "example": "so 7",
    }
    return KindResult(kind=kind, mean=mean, **(numbers | changes))


def part(**changes) -> RewardResult:
    numbers = {"low": 0.0, "high": 1.0, "share": 0.5, "slowest_s": 0.0, "slowest_on": "digits"}
    return RewardResult(**({"name": "part", "failed": {}, "unfair": {}} | numbers | changes))


def report(honest=1.2, wrong=0.2, given_up=0.2, untagged=0.0, parts=(), conflicts=None) -> Report:
    attacks = [line(INCORRECT, wrong), line(GIVEN_UP, given_up), line(MALFORMED, untagged)]
    return Report("part", 9, [line(HONEST, honest)], attacks, list(parts), conflicts or {})


def test_sound_numbers_pass_and_become_json() -> None:
    found = report(parts=[part()])
    assert found.passed
    content = json.loads(json.dumps(found.as_dict()))
    assert content["faults"] == []
    assert content["false_negatives"] == 0
    assert content["remarks"] == found.remarks
    assert found.remarks[0].startswith("the best exploit is 'incorrect, in format': 0.2 on average")


@pytest.mark.parametrize("more", [0.0, 1e-7, 0.3 - (0.1 + 0.2), 0.0007, 0.0099])
def test_means_that_differ_by_less_than_a_hundredth_of_correctness_are_equal(more: float) -> None:
    assert report(given_up=0.2 + more).passed
    assert report(honest=2.0, wrong=1.0, given_up=1.0, untagged=-more).passed


def test_giving_up_that_pays_and_a_format_that_outweighs_are_faults() -> None:
    assert report(given_up=0.22).faults == [
        "giving up pays: 'no idea' in format earns 0.22, an incorrect attempt 0.2"
    ]
    (fault,) = report(honest=1.9, wrong=1.0, given_up=1.0).faults
    assert fault.startswith(
        "the format outweighs the answer: an incorrect answer in format earns 1, "
    )


def test_without_correctness_adds_nothing_equal_rewards_are_equal_but_for_rounding() -> None:
    assert report(honest=0.3, wrong=0.1 + 0.2, given_up=0.3, untagged=0.3).passed
    assert not report(honest=0.3, wrong=0.3, given_up=0.31, untagged=0.3).passed


def test_parts_that_are_slow_failing_or_unfair_are_faults() -> None:
    unfair = {HONEST: 2, "bold": 3}
    faults = report(parts=[part(slowest_s=1.5, failed={"IndexError": 4}, unfair=unfair)]).faults
    assert [fault.partition(":")[0] for fault in faults] == [
        *("slow", "false negatives", "false negatives", "failures"),
    ]
    assert faults[2].endswith("in the variants bold 3")
    assert faults[3].endswith("(IndexError: 4)")


def test_constant_and_dominant_parts_and_conflicts_are_remarks() -> None:
    parts = [part(low=0.3, high=0.1 + 0.2), part(name="other", share=0.97)]
    remarks = report(parts=parts, conflicts={"a_b": -0.9, "a_c": 0.9}).remarks
    assert [remark.partition(":")[0] for remark in remarks[1:]] == [
        *("constant", "dominance", "conflict"),
    ]
    assert report(parts=[part(share=1.0)]).remarks[1:] == []


def test_slack_grows_with_the_reward() -> None:
    assert slack(1000.0) > slack(-1.0) > 1e-6
