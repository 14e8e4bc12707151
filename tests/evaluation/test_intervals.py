"""Intervals and tests: published values, coverage, and the paired comparison of two evaluations."""

import math
import random
from math import inf, isnan

import pytest

from litgrpo.evaluation.intervals import (
    bootstrap_ratio,
    compare_evaluations,
    compute_paired_difference,
    mcnemar,
    mean_and_standard_error,
    mean_interval,
    proportion_interval,
    wilson_interval,
)
from tests.support.raises import raises_for


def close(*numbers: float, to: float = 1e-4):
    return pytest.approx(numbers, abs=to)


def test_wilson_agrees_with_published_values() -> None:
    # R: prop.test(x, n, correct = FALSE)
    assert wilson_interval(9, 10) == close(0.5958, 0.9821)
    assert wilson_interval(50, 100) == close(0.4038, 0.5962)
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
    assert wilson_interval(81, 263) == close(0.2553, 0.3662)
    assert wilson_interval(15, 148) == close(0.0624, 0.1605)
    assert wilson_interval(0, 20) == close(0.0, 0.1611)
    assert wilson_interval(1, 29) == close(0.0061, 0.1718)


def test_wilson_is_sensible_at_the_ends() -> None:
    # z^2 / (n + z^2) = 3.8415 / 13.8415
    assert wilson_interval(0, 10) == close(0.0, 0.2775)
    assert wilson_interval(10, 10) == close(0.7225, 1.0)
    assert wilson_interval(10, 10)[1] == 1.0
    assert wilson_interval(0, 0) == (0.0, 1.0)
    with raises_for("confidence", "95"):
        wilson_interval(1, 2, confidence=95)


def test_clusters_of_one_give_wilson() -> None:
    assert proportion_interval([1] * 9 + [0], 1) == pytest.approx(wilson_interval(9, 10))


def test_samples_that_always_agree_count_once() -> None:
    assert proportion_interval([4] * 9 + [0], 4) == pytest.approx(wilson_interval(9, 10))


def test_independent_samples_count_each() -> None:
    # the same rate for every prompt: no sign of clustering
    assert proportion_interval([2] * 10, 4) == pytest.approx(wilson_interval(20, 40))


def test_all_right_all_wrong_one_prompt_and_none_are_careful() -> None:
    assert proportion_interval([4] * 10, 4) == pytest.approx(wilson_interval(10, 10))
    assert proportion_interval([0] * 10, 4) == pytest.approx(wilson_interval(0, 10))
    assert proportion_interval([2], 4) == pytest.approx(wilson_interval(0.5, 1))
    assert proportion_interval([], 4) == (0.0, 1.0)


def test_the_design_effect_by_hand() -> None:
    # rates 1, 1/2, 1/2, 0: mean 1/2, variance 1/6, squared error 1/24; size (1/4) / (1/24) = 6
    assert proportion_interval([2, 1, 1, 0], 2) == pytest.approx(wilson_interval(3, 6))


def test_the_clustered_interval_covers_as_often_as_it_says() -> None:
    # rates of prompts from Beta(a, b) with mean .9 or .5, 50 prompts, 4 samples each
    draw, covered = random.Random(0), 0
    for trial in range(1000):
        a, b = ((1.8, 0.2), (1.0, 1.0))[trial % 2]
        rates = [draw.betavariate(a, b) for _ in range(50)]
        counts = [sum(draw.random() < rate for _ in range(4)) for rate in rates]
        low, high = proportion_interval(counts, 4)
        covered += low <= a / (a + b) <= high
    assert 930 <= covered <= 970


def test_clustered_mean_by_hand() -> None:
    # mean 3, variance 2.5, error sqrt(.5) = .7071, t(4) = 2.7764
    assert mean_and_standard_error([1, 2, 3, 4, 5]) == close(3, 0.7071)
    assert mean_interval([1, 2, 3, 4, 5]) == close(1.0368, 4.9632)
    assert mean_interval([0.1] * 9) == (0.1, 0.1)
    assert mean_interval([1]) == (-inf, inf)
    assert isnan(mean_and_standard_error([])[0])


def test_paired_difference_agrees_with_student() -> None:
    # Student 1908, the sleep data; R: t.test(paired = TRUE): p = 0.002833, 0.7001 to 2.4599
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    result = compute_paired_difference(first, second)
    assert (result.mean, result.low, result.high) == close(1.58, 0.7001, 2.4599)
    assert result.p_value == pytest.approx(0.002833, abs=5e-7)
    assert compute_paired_difference(second, first).p_value == pytest.approx(result.p_value)


def test_paired_difference_without_spread() -> None:
    assert compute_paired_difference([1, 2], [1, 2]).p_value == 1.0
    assert compute_paired_difference([1, 2], [2, 3]).p_value == 0.0
    with raises_for("before", "after"):
        compute_paired_difference([1], [1])


# --- comparison of two evaluations ---


def test_the_bootstrap_is_near_the_normal_interval_and_the_same_every_time():
    values = [float(n % 10) for n in range(400)]  # mean 4.5, deviation 2.87
    low, high = bootstrap_ratio(values, [1.0] * 400)
    half = 1.96 * 2.872 / 20
    assert (low, high) == pytest.approx((4.5 - half, 4.5 + half), abs=0.03)
    assert bootstrap_ratio(values, [1.0] * 400) == (low, high)


def test_the_bootstrap_of_few_prompts_covers_the_mean_too_rarely():
    # docs/reference/metrics.md has this count.
    draw, covered = random.Random(0), 0
    for _ in range(1000):
        low, high = bootstrap_ratio([draw.gauss(0, 1) for _ in range(10)], [1.0] * 10)
        covered += low <= 0 <= high
    assert covered == 901


def test_prompts_are_drawn_with_all_of_their_samples():
    # Sums and counts of a prompt stay together: 8 of 10 samples are ones, and every draw has them.
    assert bootstrap_ratio([8.0] * 5, [10.0] * 5) == pytest.approx((0.8, 0.8))


def test_a_single_prompt_tells_nothing_about_the_spread():
    assert all(map(math.isnan, bootstrap_ratio([1.0], [4.0])))


def test_many_prompts_are_drawn_in_parts(monkeypatch):
    monkeypatch.setattr("litgrpo.evaluation.intervals.AT_ONCE", 300)
    low, high = bootstrap_ratio([0.0, 1.0] * 50, [1.0] * 100)
    assert (low, high) == pytest.approx((0.4, 0.6), abs=0.02)


def test_mcnemar_by_hand():
    # 8 changed, 1 lost: 2 * (1 + 8) / 256
    assert mcnemar(7, 1) == mcnemar(1, 7) == pytest.approx(18 / 256)
    assert mcnemar(0, 0) == 1.0


def test_prompts_are_matched_by_their_number_and_differences_are_theirs():
    before = {"index": [0, 1, 2], "reward": [0.0, 0.5, 1.0], "greedy": [1.0, 0.0, 0.0]}
    after = {"index": [2, 1, 7], "reward": [1.5, 0.5, 9.0], "greedy": [1.0, 0.0, 1.0]}
    found = compare_evaluations(before, after)
    assert found.changes["reward"].mean == 0.25  # prompts 2 and 1; 7 is new
    assert (found.solved_by, found.gained, found.lost) == ("greedy", [2], [])
    assert compare_evaluations(before, {"index": [9.0], "reward": [1.0]}) is None


def test_without_a_greedy_answer_half_of_the_samples_must_be_right():
    before = {"index": [0, 1, 2], "avg@4": [0.25, 0.75, 0.5]}
    after = {"index": [0, 1, 2], "avg@4": [0.5, 0.25, 0.75]}
    found = compare_evaluations(before, after)
    assert (found.solved_by, found.gained, found.lost) == ("avg@4", [0], [1])
    assert found.p_value == 1.0


def test_a_prompt_that_nobody_judged_does_not_count():
    nan = float("nan")
    found = compare_evaluations(
        {"index": [0, 1], "reward": [nan, 1.0]}, {"index": [0, 1], "reward": [2.0, 3.0]}
    )
    assert found.changes["reward"].mean == 2.0


def test_pairing_finds_what_two_intervals_do_not():
    hard = [float(n) for n in range(40)]  # prompts differ far more than the training changes
    change = compare_evaluations(
        {"index": range(40), "reward": hard},
        {"index": range(40), "reward": [x + 0.1 for x in hard]},
    )
    assert (change.changes["reward"].low, change.changes["reward"].high) == pytest.approx(
        (0.1, 0.1)
    )
