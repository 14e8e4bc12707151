"""Metrics of rollouts and rewards."""

from dataclasses import replace

import pytest
import torch

from litgrpo.algorithms.advantages import Normalized
from litgrpo.distributed.collectives import SingleProcess
from litgrpo.metrics import reward_stat_names, reward_stats, rollout_stats
from litgrpo.types import RewardTable
from tests.support.by_hand import rollout, table, with_turns


def test_length_metrics_count_generated_tokens():
    stats = rollout_stats(with_turns())
    assert float(stats["completion/len_mean"]) == 1.75
    assert float(stats["completion/len_max"]) == 2


def test_the_entropy_at_sampling_is_that_of_generated_tokens():
    given = with_turns()
    observed = given.completion_mask & ~given.loss_mask
    given = replace(given, sampler_logprobs=torch.where(observed, -9.0, -0.5))
    assert rollout_stats(given)["policy/entropy"].tolist() == [0.5 * 7, 7.0]


def test_rollout_stats_by_hand():
    given = replace(rollout(), sampler_logprobs=-rollout().completion_mask.float())
    assert {name: value.tolist() for name, value in rollout_stats(given).items()} == {
        "completion/len_mean": 2.25,
        "completion/len_min": 1.0,
        "completion/len_max": 3.0,
        "completion/truncated_frac": 0.25,
        # One of the two of length 3 was cut off; a pair is a sum and a count.
        "completion/terminated_len_mean": [6.0, 3.0],
        "completion/terminated_len_min": 1.0,
        "completion/terminated_len_max": 3.0,
        "prompt/len_mean": 3.0,
        "prompt/len_min": 3.0,
        "prompt/len_max": 3.0,
        "policy/entropy": [9.0, 9.0],
    }


def test_without_an_ended_completion_its_length_metrics_are_empty():
    given = replace(rollout(), truncated=torch.ones(4, dtype=torch.bool))
    stats = rollout_stats(given)
    assert stats["completion/terminated_len_mean"].tolist() == [0.0, 0.0]
    assert stats["completion/terminated_len_min"] == torch.inf


def test_the_standard_deviation_of_a_single_valid_reward_is_zero():
    stats = reward_stats(table([[1.0, 2.0]], valid=[[True, False]]))
    assert (float(stats["reward/mean"]), float(stats["reward/std"])) == (1.0, 0.0)


def test_reward_stats_by_hand():
    nan = torch.nan
    stats = reward_stats(
        table(
            [[0.0, 2.0], [3.0, 3.0]],
            valid=[[True, True], [False, True]],
            correct=[[0.0, 1.0], [nan, 1.0]],
            format=[[nan, nan], [nan, nan]],
        )
    )
    # Standard deviations with n - 1: sqrt(2) and 0.
    expected = {
        "reward/mean": 5 / 3,
        "reward/std": (7 / 3) ** 0.5,  # of 0, 2 and 3
        "reward/min": 0.0,
        "reward/max": 3.0,
        "reward/group_std": 2**0.5 / 2,
        "reward/failed_frac": 0.25,
        "reward/unscored_groups_frac": 0.0,
        "reward/zero_variance_groups_frac": 0.5,
        "reward/correct": 2 / 3,
        "reward/correct_std": (1 / 3) ** 0.5,
        "reward/correct_share": 1.0,
        "reward/format_share": 0.0,
    }
    # "format" scored no completion, so it has no mean and no direction.
    missing = {"reward/format", "reward/format_std", "reward/cosine_correct_format"}
    names = {f"reward/{name}" for name in reward_stat_names(["correct", "format"])}
    assert names == {*stats, *missing}
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(expected)
    assert {value.dtype for value in stats.values()} == {torch.float32}


def test_shares_and_cosines_of_components_by_hand():
    # Distances from the group's mean: a -1, 1; b (weighted) -2, 2 and 1, -1. Total -3, 3; 1, -1.
    given = table([[0.0, 6.0], [2.0, 0.0]], a=[[0.0, 2.0], [5.0, 5.0]], b=[[0.0, 2.0], [1.0, 0.0]])
    stats = reward_stats(replace(given, weights={"a": 1.0, "b": 2.0}))
    # <a, total> = 6, <b, total> = 12 + 2, <total, total> = 20; cosine (2) / (sqrt 2 sqrt 2.5)
    assert float(stats["reward/a_share"]) == pytest.approx(6 / 20)
    assert float(stats["reward/b_share"]) == pytest.approx(14 / 20)
    assert float(stats["reward/cosine_a_b"]) == pytest.approx(2 / (2 * 2.5) ** 0.5)
    against = reward_stats(replace(given, weights={"a": 1.0, "b": -2.0}))
    assert float(against["reward/cosine_a_b"]) == pytest.approx(-2 / (2 * 2.5) ** 0.5)
    assert float(against["reward/a_share"] + against["reward/b_share"]) == pytest.approx(1.0)
    assert float(against["reward/a_share"]) < 0


def test_a_component_of_weight_zero_keeps_its_sign_in_the_cosine():
    given = table([[0.0, 1.0]], a=[[0.0, 1.0]], b=[[0.0, 3.0]])
    stats = reward_stats(replace(given, weights={"a": 1.0, "b": 0.0}))
    assert float(stats["reward/cosine_a_b"]) == pytest.approx(1.0)


def test_a_deviation_of_one_value_is_zero_and_of_infinite_ones_unknown():
    nan, inf = torch.nan, torch.inf
    stats = reward_stats(table([[0.0, 1.0]], one=[[nan, 3.0]], infinite=[[inf, 1.0]]))
    assert float(stats["reward/one_std"]) == 0.0
    assert "reward/infinite_std" not in stats


def test_unscored_rows_are_in_no_statistic_of_groups():
    """Their totals are 0, which is no reward: the first two groups have one gradient among them."""
    yes, no = True, False
    given = table(
        [[1.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0], [5.0, 1.0, 0.0]],
        valid=[[yes, yes, no], [yes, yes, no], [no, no, no], [no, yes, no]],
    )
    zero_variance = [1.0, 0.0, pytest.approx(torch.nan, nan_ok=True), 1.0]
    assert given.find_zero_variance().tolist() == zero_variance
    stats = {name: float(value) for name, value in reward_stats(given).items()}
    assert stats == pytest.approx(
        {
            "reward/mean": 1.0,  # of 1, 1, 2, 0, 1
            "reward/std": 0.5**0.5,
            "reward/min": 0.0,
            "reward/max": 2.0,
            "reward/group_std": 2**0.5 / 3,  # 0, sqrt 2 and, of a single completion, 0
            "reward/failed_frac": 7 / 12,
            "reward/unscored_groups_frac": 1 / 4,
            "reward/zero_variance_groups_frac": 2 / 3,
        }
    )


def test_metrics_and_training_agree_on_the_groups_without_variance():
    """Also where only rounding, a failed row or a None differs; 60 random tables."""
    torch.manual_seed(0)
    for _ in range(60):
        total = torch.randint(3, (4, 3)).double() / 3
        total += 1e-17 * torch.rand(4, 3).double()
        valid = torch.rand(4, 3) < 0.6
        given = RewardTable({}, {}, total.masked_fill(~valid, 0.0), valid)
        advantages = Normalized()(given, torch.ones(4, 3), SingleProcess())
        has_gradient = advantages.any(1)
        assert (given.find_zero_variance() == 0).tolist() == has_gradient.tolist()
        scored = valid.any(1)
        if scored.any():
            found = reward_stats(given)["reward/zero_variance_groups_frac"]
            assert float(found) == pytest.approx(float((~has_gradient)[scored].double().mean()))


def test_a_single_component_is_not_compared():
    assert {f"reward/{name}" for name in reward_stat_names(["a"])} == set(
        reward_stats(table([[0.0, 1.0]], a=[[0.0, 1.0]]))
    )


def test_shares_use_counted_components_and_valid_rows():
    given = table(
        [[0.0, 1.0, 0.0]], valid=[[True, True, False]], a=[[0.0, 1.0, 9.0]], b=[[1.0] * 3]
    )
    assert float(reward_stats(given)["reward/a_share"]) == 1.0
    zero = torch.zeros(1, 3, dtype=torch.float64)
    gated = reward_stats(replace(given, processed={"a": zero, "b": zero}))
    assert "reward/a_share" not in gated  # nothing differs
    assert float(gated["reward/a"]) == pytest.approx(10 / 3)


def test_without_valid_rows_only_their_number_is_known_and_groups_of_one_have_no_spread():
    nothing = reward_stats(table([[0.0, 0.0]], valid=[[False, False]], a=[[torch.nan] * 2]))
    assert nothing == {"reward/failed_frac": 1.0, "reward/unscored_groups_frac": 1.0}
    greedy = reward_stats(table([[1.0], [0.0]]))
    assert (greedy["reward/mean"], greedy["reward/group_std"]) == (0.5, 0.0)


def test_reward_stats_do_not_depend_on_the_order_of_groups_and_rows():
    total = torch.rand(5, 4, dtype=torch.float64).round(decimals=1)
    valid = total != 0.5
    given = RewardTable({"r": total}, {"r": 1.0}, total, valid)
    order, members = torch.randperm(5), torch.randperm(4)
    moved, moved_valid = total[order][:, members], valid[order][:, members]
    shuffled = RewardTable({"r": moved}, {"r": 1.0}, moved, moved_valid)
    for name, value in reward_stats(given).items():
        torch.testing.assert_close(reward_stats(shuffled)[name], value)
