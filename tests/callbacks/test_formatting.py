from litgrpo.callbacks.formatting import finite_or_none, format_report
from tests.support.standin import prompts, rewards_of, rollout_of


def test_a_bound_is_in_brackets_on_the_same_line():
    report = {"avg@2": 0.25, "avg@2_low": 0.0, "avg@2_high": 0.5, "loss": 123.4}
    assert format_report(report) == {"avg@2": "0.250 [0.000, 0.500]", "loss": "123"}


def test_non_finite_numbers_are_none_in_json():
    rewards = rewards_of(rollout_of(prompts("A")))
    assert finite_or_none(rewards.components["format"]) == [None, 1.0]
