from litgrpo.callbacks.formatting import (
    finite_or_none,
    format_change,
    format_number,
    format_report,
    format_success,
    mark_truncated,
    strip_stage,
    without_zero_counts,
)
from tests.support.standin import prompts, rewards_of, rollout_of


def test_a_bound_is_in_brackets_on_the_same_line():
    report = {"avg@2": 0.25, "avg@2_low": 0.0, "avg@2_high": 0.5, "loss": 123.4}
    assert format_report(report) == {"avg@2": "0.250 [0.000, 0.500]", "loss": "123"}


def test_non_finite_numbers_are_none_in_json():
    rewards = rewards_of(rollout_of(prompts("A")))
    assert finite_or_none(rewards.components["format"]) == [None, 1.0]


def test_numbers_have_fewer_decimals_the_larger_they_are():
    numbers = (0.51234, 13.896, 15234.4, -0.0001)
    assert [*map(format_number, numbers)] == ["0.512", "13.9", "15234", "0.000"]
    assert [*map(format_change, numbers)] == ["+0.512", "+13.9", "+15234", "+0.000"]
    assert format_change(-13.896) == "-13.9"


def test_names_lose_their_stage_and_counts_of_nothing_are_left_out():
    report = {"val/loss": 1.0, "val/hard/greedy": 0.25, "greedy": 0.5}
    assert strip_stage(report) == {"loss": 1.0, "hard/greedy": 0.25, "greedy": 0.5}
    counts = {"avg@4": 0.0, "unscored_frac": 0.0, "greedy_unscored_frac": 0.1}
    assert without_zero_counts(counts) == {"avg@4": 0.0, "greedy_unscored_frac": 0.1}


def test_the_rule_of_success_is_in_words():
    assert format_success({"rewards": {"": "correct"}, "threshold": 1.0}).startswith("correct: ")
    assert format_success({}) == ""


def test_a_completion_that_was_cut_off_says_so():
    assert mark_truncated("once upon a", True) == "once upon a [cut]"
    assert mark_truncated("the end", False) == "the end"
