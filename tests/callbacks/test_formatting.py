from litgrpo.callbacks.formatting import (
    align_columns,
    finite_or_none,
    format_report,
    markdown_table,
)
from tests.support.standin import prompts, rewards_of, rollout_of


def test_a_bound_stands_in_brackets_and_not_on_a_line_of_its_own():
    report = {"avg@2": 0.25, "avg@2_low": 0.0, "avg@2_high": 0.5, "loss": 123.4}
    assert format_report(report) == {"avg@2": "0.250 [0.000, 0.500]", "loss": "123"}


def test_columns_of_a_table_stand_under_each_other():
    assert align_columns([["a", "bb"], ["ccc", "d"]]) == ["a    bb", "ccc  d"]
    assert markdown_table([["a"], ["b"]]) == "| a |\n| --- |\n| b |"


def test_json_gets_nothing_for_what_is_no_number():
    rewards = rewards_of(rollout_of(prompts("A")))
    assert finite_or_none(rewards.components["format"]) == [None, 1.0]
