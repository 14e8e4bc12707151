import random
from math import inf, isnan

import pytest

from litgrpo.evaluation.intervals import (
    clustered_mean,
    clustered_proportion,
    mean_and_error,
    paired_difference,
    student_t_inside,
    student_t_quantile,
    wilson,
)


def close(*numbers: float, to: float = 1e-4):
    return pytest.approx(numbers, abs=to)


def test_wilson_agrees_with_published_values() -> None:
    # R: prop.test(x, n, correct = FALSE)
    assert wilson(9, 10) == close(0.5958, 0.9821)
    assert wilson(50, 100) == close(0.4038, 0.5962)
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
    assert wilson(81, 263) == close(0.2553, 0.3662)
    assert wilson(15, 148) == close(0.0624, 0.1605)
    assert wilson(0, 20) == close(0.0, 0.1611)
    assert wilson(1, 29) == close(0.0061, 0.1718)


def test_wilson_is_sensible_at_the_ends() -> None:
    # z^2 / (n + z^2) = 3.8415 / 13.8415
    assert wilson(0, 10) == close(0.0, 0.2775)
    assert wilson(10, 10) == close(0.7225, 1.0)
    assert wilson(10, 10)[1] == 1.0
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="confidence must be between 0 and 1, got 95"):
        wilson(1, 2, confidence=95)


def test_clusters_of_one_give_wilson() -> None:
    assert clustered_proportion([1] * 9 + [0], 1) == pytest.approx(wilson(9, 10))


def test_samples_that_always_agree_count_once() -> None:
    assert clustered_proportion([4] * 9 + [0], 4) == pytest.approx(wilson(9, 10))


def test_independent_samples_count_each() -> None:
    # the same rate for every prompt: no sign of clustering
    assert clustered_proportion([2] * 10, 4) == pytest.approx(wilson(20, 40))


def test_all_right_all_wrong_one_prompt_and_none_are_careful() -> None:
    assert clustered_proportion([4] * 10, 4) == pytest.approx(wilson(10, 10))
    assert clustered_proportion([0] * 10, 4) == pytest.approx(wilson(0, 10))
    assert clustered_proportion([2], 4) == pytest.approx(wilson(0.5, 1))
    assert clustered_proportion([], 4) == (0.0, 1.0)


def test_the_design_effect_by_hand() -> None:
    # rates 1, 1/2, 1/2, 0: mean 1/2, variance 1/6, squared error 1/24; size (1/4) / (1/24) = 6
    assert clustered_proportion([2, 1, 1, 0], 2) == pytest.approx(wilson(3, 6))


def test_the_clustered_interval_covers_as_often_as_it_says() -> None:
    # rates of prompts from Beta(a, b) with mean .9 or .5, 50 prompts, 4 samples each
    draw, covered = random.Random(0), 0
    for trial in range(1000):
        a, b = ((1.8, 0.2), (1.0, 1.0))[trial % 2]
        rates = [draw.betavariate(a, b) for _ in range(50)]
        counts = [sum(draw.random() < rate for _ in range(4)) for rate in rates]
        low, high = clustered_proportion(counts, 4)
        covered += low <= a / (a + b) <= high
    assert 930 <= covered <= 970


def test_student_t_agrees_with_tables() -> None:
    # t tables (two-sided 95 and 99 %)
    for df, t95, t99 in [
        (1, 12.7062, 63.6567),
        (2, 4.3027, 9.9248),
        (5, 2.5706, 4.0321),
        (30, 2.0423, 2.75),
    ]:
        assert student_t_quantile(0.975, df) == pytest.approx(t95, abs=5e-5)
        assert student_t_quantile(0.995, df) == pytest.approx(t99, abs=5e-5)
    assert student_t_quantile(0.975, 10_001) == pytest.approx(1.9602, abs=5e-5)
    assert student_t_inside(0.0, 7) == 0.0


def test_clustered_mean_by_hand() -> None:
    # mean 3, variance 2.5, error sqrt(.5) = .7071, t(4) = 2.7764
    assert mean_and_error([1, 2, 3, 4, 5]) == close(3, 0.7071)
    assert clustered_mean([1, 2, 3, 4, 5]) == close(1.0368, 4.9632)
    assert clustered_mean([0.1] * 9) == (0.1, 0.1)
    assert clustered_mean([1]) == (-inf, inf)
    assert isnan(mean_and_error([])[0])


def test_paired_difference_agrees_with_student() -> None:
    # Student 1908, the sleep data; R: t.test(paired = TRUE): p = 0.002833, 0.7001 to 2.4599
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    result = paired_difference(first, second)
    assert (result.mean, result.low, result.high) == close(1.58, 0.7001, 2.4599)
    assert result.p_value == pytest.approx(0.002833, abs=5e-7)
    assert paired_difference(second, first).p_value == pytest.approx(result.p_value)


def test_paired_difference_without_spread() -> None:
    assert paired_difference([1, 2], [1, 2]).p_value == 1.0
    assert paired_difference([1, 2], [2, 3]).p_value == 0.0
    with pytest.raises(ValueError, match="the same prompts twice, at least 2"):
        paired_difference([1], [1])
