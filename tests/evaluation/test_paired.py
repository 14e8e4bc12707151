import math

import pytest

from litgrpo.evaluation.paired import bootstrap_ratio, compared, mcnemar


def test_the_bootstrap_is_near_the_normal_interval_and_the_same_every_time():
    values = [float(n % 10) for n in range(400)]  # mean 4.5, deviation 2.87
    low, high = bootstrap_ratio(values, [1.0] * 400)
    half = 1.96 * 2.872 / 20
    assert (low, high) == pytest.approx((4.5 - half, 4.5 + half), abs=0.03)
    assert bootstrap_ratio(values, [1.0] * 400) == (low, high)


def test_prompts_are_drawn_with_all_of_their_samples():
    # Sums and counts of a prompt stay together: 8 of 10 samples are ones, and every draw has them.
    assert bootstrap_ratio([8.0] * 5, [10.0] * 5) == pytest.approx((0.8, 0.8))


def test_a_single_prompt_tells_nothing_about_the_spread():
    assert all(map(math.isnan, bootstrap_ratio([1.0], [4.0])))


def test_many_prompts_are_drawn_in_parts(monkeypatch):
    monkeypatch.setattr("litgrpo.evaluation.paired.AT_ONCE", 300)
    low, high = bootstrap_ratio([0.0, 1.0] * 50, [1.0] * 100)
    assert (low, high) == pytest.approx((0.4, 0.6), abs=0.02)


def test_mcnemar_by_hand():
    # 8 changed, 1 lost: 2 * (1 + 8) / 256
    assert mcnemar(7, 1) == mcnemar(1, 7) == pytest.approx(18 / 256)
    assert mcnemar(0, 0) == 1.0


def test_prompts_are_matched_by_their_number_and_differences_are_theirs():
    before = {"index": [0, 1, 2], "reward": [0.0, 0.5, 1.0], "greedy": [1.0, 0.0, 0.0]}
    after = {"index": [2, 1, 7], "reward": [1.5, 0.5, 9.0], "greedy": [1.0, 0.0, 1.0]}
    found = compared(before, after)
    assert found.changes["reward"].mean == 0.25  # prompts 2 and 1; 7 is new
    assert (found.solved_by, found.gained, found.lost) == ("greedy", [2], [])
    assert compared(before, {"index": [9.0], "reward": [1.0]}) is None


def test_without_a_greedy_answer_half_of_the_samples_must_be_right():
    before = {"index": [0, 1, 2], "avg@4": [0.25, 0.75, 0.5]}
    after = {"index": [0, 1, 2], "avg@4": [0.5, 0.25, 0.75]}
    found = compared(before, after)
    assert (found.solved_by, found.gained, found.lost) == ("avg@4", [0], [1])
    assert found.p_value == 1.0


def test_a_prompt_that_nobody_judged_does_not_count():
    nan = float("nan")
    found = compared(
        {"index": [0, 1], "reward": [nan, 1.0]}, {"index": [0, 1], "reward": [2.0, 3.0]}
    )
    assert found.changes["reward"].mean == 2.0


def test_pairing_finds_what_two_intervals_do_not():
    hard = [float(n) for n in range(40)]  # prompts differ far more than the training changes
    change = compared(
        {"index": range(40), "reward": hard},
        {"index": range(40), "reward": [x + 0.1 for x in hard]},
    )
    assert (change.changes["reward"].low, change.changes["reward"].high) == pytest.approx(
        (0.1, 0.1)
    )
