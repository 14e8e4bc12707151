"""Data classes: shape checks, selections and statistics."""

from dataclasses import fields, replace

import pytest
import torch

from litgrpo.algorithms.advantages import Normalized
from litgrpo.distributed.collectives import SingleProcess
from litgrpo.types import PromptBatch, RewardTable, Rollout, TokenRows, TrainingBatch


def prompts(rows=2, length=3) -> PromptBatch:
    ids = torch.arange(rows * length).view(rows, length)
    texts = [f"prompt {row}" for row in range(rows)]
    columns = {"answer": list(range(rows))}
    return PromptBatch(ids, ids >= 0, texts, columns, torch.arange(rows))


def rollout() -> Rollout:
    """Two prompts, two completions of each, of 1, 3, 2 and 3 tokens; the last was cut off."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]]).bool()
    truncated = torch.tensor([False, False, False, True])
    return Rollout(prompts(), 2, mask.long() * 7, mask, mask * -0.5, truncated)


def training_batch() -> TrainingBatch:
    """Three prompts of 1, 3 and 2 tokens; rows 0 to 3 continue prompts 0, 1, 2, 2."""
    prompt_mask = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1]]).bool()
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
    ids = torch.arange(16).view(4, 4)
    return TrainingBatch(
        prompt_ids=torch.arange(12).view(3, 4),
        prompt_mask=prompt_mask,
        prompt_of=torch.tensor([0, 1, 2, 2]),
        completion_ids=ids,
        completion_mask=mask,
        loss_mask=mask,
        sampler_logprobs=-ids.float(),
        advantages=ids + 0.25,
        loss_weights=ids + 0.5,
        ref_logprobs=ids - 100.0,
    )


def test_lengths_count_real_tokens():
    assert rollout().lengths.tolist() == [1, 3, 2, 3]
    assert training_batch().tokens.lengths.tolist() == [4, 1, 2, 3]
    assert (len(prompts()), len(training_batch())) == (2, 4)
    assert len(rollout().tokens) == 4


def with_turns() -> Rollout:
    """Return the same rollout; in rows 1 and 3 the second token is tool output."""
    mask = rollout().completion_mask.clone()
    mask[[1, 3], 1] = False
    return replace(rollout(), loss_mask=mask)


def test_lengths_and_stats_count_generated_tokens_and_models_read_all_tokens():
    given = with_turns()
    assert given.lengths.tolist() == [1, 2, 2, 2]
    assert float(given.stats()["completion/len_mean"]) == 1.75
    assert float(given.stats()["completion/len_max"]) == 2
    assert given.tokens.lengths.tolist() == [1, 3, 2, 3]
    assert [len(ids) for ids in given.token_lists()] == [1, 3, 2, 3]


def test_tokens_mark_generated_tokens_only_if_there_are_turns():
    given = with_turns()
    numbers = torch.where(given.loss_mask, 0, -1)
    assert torch.equal(replace(given, turns=numbers).tokens.loss_mask, given.loss_mask)
    assert rollout().tokens.loss_mask is None


def test_the_entropy_at_sampling_is_that_of_generated_tokens():
    given = with_turns()
    observed = given.completion_mask & ~given.loss_mask
    given = replace(given, sampler_logprobs=torch.where(observed, -9.0, -0.5))
    assert given.stats()["policy/entropy"].tolist() == [0.5 * 7, 7.0]


def test_loss_mask_defaults_to_the_completion_mask():
    given = rollout()
    assert given.loss_mask is given.completion_mask


def test_tokens_of_a_rollout_refer_to_their_prompts():
    tokens = rollout().tokens
    assert tokens.prompt_of.tolist() == [0, 0, 1, 1]
    assert torch.equal(tokens.completion_mask, rollout().completion_mask)
    with pytest.raises(ValueError, match="completion_mask has shape"):
        replace(tokens, completion_mask=tokens.completion_mask[:3])
    with pytest.raises(ValueError, match="prompt_of has shape"):
        replace(tokens, prompt_of=tokens.prompt_of[:3])


def test_rollout_stats_by_hand():
    given = replace(rollout(), sampler_logprobs=-rollout().completion_mask.float())
    assert {name: value.tolist() for name, value in given.stats().items()} == {
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
    stats = given.stats()
    assert stats["completion/terminated_len_mean"].tolist() == [0.0, 0.0]
    assert stats["completion/terminated_len_min"] == torch.inf


@pytest.mark.parametrize("name", ["prompt_mask", "index"])
def test_prompt_tensors_of_unequal_shapes_raise(name):
    with pytest.raises(ValueError, match=f"{name} has shape"):
        replace(prompts(), **{name: torch.ones(5)})


def test_a_column_of_another_length_raises():
    with pytest.raises(ValueError, match="answer"):
        replace(prompts(), columns={"answer": [1]})
    with pytest.raises(ValueError, match="prompts"):
        replace(prompts(), prompts=["a", "b", "c"])


def test_to_moves_tensors_and_keeps_other_fields():
    moved = prompts().to("meta")
    assert {moved.prompt_ids.device.type, moved.prompt_mask.device.type} == {"meta"}
    assert moved.index.device.type == "meta"
    assert (moved.prompts, moved.columns) == (prompts().prompts, prompts().columns)


@pytest.mark.parametrize(
    "name", ["completion_ids", "completion_mask", "sampler_logprobs", "loss_mask"]
)
def test_a_rollout_has_group_size_rows_of_each_prompt(name):
    with pytest.raises(ValueError, match=f"{name} has shape"):
        replace(rollout(), **{name: getattr(rollout(), name)[:3]})
    with pytest.raises(ValueError, match="completion_ids has shape"):
        replace(rollout(), group_size=3)


def test_truncated_needs_one_entry_per_row():
    with pytest.raises(ValueError, match="truncated has shape"):
        replace(rollout(), truncated=torch.zeros(2, dtype=torch.bool))


def table(total, valid=None, **components) -> RewardTable:
    total = torch.tensor(total, dtype=torch.float64)
    valid = torch.ones_like(total, dtype=torch.bool) if valid is None else torch.tensor(valid)
    columns = {
        name: torch.tensor(values, dtype=torch.float64) for name, values in components.items()
    }
    return RewardTable(columns, dict.fromkeys(columns, 1.0), total, valid)


def test_the_standard_deviation_of_a_single_valid_reward_is_zero():
    stats = table([[1.0, 2.0]], valid=[[True, False]]).stats()
    assert (float(stats["reward/mean"]), float(stats["reward/std"])) == (1.0, 0.0)


def test_reward_stats_by_hand():
    nan = torch.nan
    stats = table(
        [[0.0, 2.0], [3.0, 3.0]],
        valid=[[True, True], [False, True]],
        correct=[[0.0, 1.0], [nan, 1.0]],
        format=[[nan, nan], [nan, nan]],
    ).stats()
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
    names = {f"reward/{name}" for name in RewardTable.stat_names(["correct", "format"])}
    assert names == {*stats, *missing}
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(expected)
    assert {value.dtype for value in stats.values()} == {torch.float32}


def test_shares_and_cosines_of_components_by_hand():
    # Distances from the group's mean: a -1, 1; b (weighted) -2, 2 and 1, -1. Total -3, 3; 1, -1.
    given = table([[0.0, 6.0], [2.0, 0.0]], a=[[0.0, 2.0], [5.0, 5.0]], b=[[0.0, 2.0], [1.0, 0.0]])
    stats = replace(given, weights={"a": 1.0, "b": 2.0}).stats()
    # <a, total> = 6, <b, total> = 12 + 2, <total, total> = 20; cosine (2) / (sqrt 2 sqrt 2.5)
    assert float(stats["reward/a_share"]) == pytest.approx(6 / 20)
    assert float(stats["reward/b_share"]) == pytest.approx(14 / 20)
    assert float(stats["reward/cosine_a_b"]) == pytest.approx(2 / (2 * 2.5) ** 0.5)
    against = replace(given, weights={"a": 1.0, "b": -2.0}).stats()
    assert float(against["reward/cosine_a_b"]) == pytest.approx(-2 / (2 * 2.5) ** 0.5)
    assert float(against["reward/a_share"] + against["reward/b_share"]) == pytest.approx(1.0)
    assert float(against["reward/a_share"]) < 0


def test_a_component_of_weight_zero_keeps_its_sign_in_the_cosine():
    given = table([[0.0, 1.0]], a=[[0.0, 1.0]], b=[[0.0, 3.0]])
    stats = replace(given, weights={"a": 1.0, "b": 0.0}).stats()
    assert float(stats["reward/cosine_a_b"]) == pytest.approx(1.0)


def test_a_deviation_of_one_value_is_zero_and_of_infinite_ones_unknown():
    nan, inf = torch.nan, torch.inf
    stats = table([[0.0, 1.0]], one=[[nan, 3.0]], infinite=[[inf, 1.0]]).stats()
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
    stats = {name: float(value) for name, value in given.stats().items()}
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
            found = given.stats()["reward/zero_variance_groups_frac"]
            assert float(found) == pytest.approx(float((~has_gradient)[scored].double().mean()))


def test_a_single_component_is_not_compared():
    assert {f"reward/{name}" for name in RewardTable.stat_names(["a"])} == set(
        table([[0.0, 1.0]], a=[[0.0, 1.0]]).stats()
    )


def test_shares_use_counted_components_and_valid_rows():
    given = table(
        [[0.0, 1.0, 0.0]], valid=[[True, True, False]], a=[[0.0, 1.0, 9.0]], b=[[1.0] * 3]
    )
    assert float(given.stats()["reward/a_share"]) == 1.0
    zero = torch.zeros(1, 3, dtype=torch.float64)
    gated = replace(given, processed={"a": zero, "b": zero}).stats()
    assert "reward/a_share" not in gated  # nothing differs
    assert float(gated["reward/a"]) == pytest.approx(10 / 3)


def test_without_valid_rows_only_their_number_is_known_and_groups_of_one_have_no_spread():
    nothing = table([[0.0, 0.0]], valid=[[False, False]], a=[[torch.nan] * 2]).stats()
    assert nothing == {"reward/failed_frac": 1.0, "reward/unscored_groups_frac": 1.0}
    greedy = table([[1.0], [0.0]]).stats()
    assert (greedy["reward/mean"], greedy["reward/group_std"]) == (0.5, 0.0)


def test_reward_stats_do_not_depend_on_the_order_of_groups_and_rows():
    total = torch.rand(5, 4, dtype=torch.float64).round(decimals=1)
    valid = total != 0.5
    given = RewardTable({"r": total}, {"r": 1.0}, total, valid)
    order, members = torch.randperm(5), torch.randperm(4)
    moved, moved_valid = total[order][:, members], valid[order][:, members]
    shuffled = RewardTable({"r": moved}, {"r": 1.0}, moved, moved_valid)
    for name, value in given.stats().items():
        torch.testing.assert_close(shuffled.stats()[name], value)


def test_a_reward_component_without_weight_or_of_another_shape_raises():
    total = torch.zeros(2, 3, dtype=torch.float64)
    valid = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="weights"):
        RewardTable({"correct": total}, {}, total, valid)
    with pytest.raises(ValueError, match="correct has shape"):
        RewardTable({"correct": total.T}, {"correct": 1.0}, total, valid)
    with pytest.raises(ValueError, match="valid has shape"):
        RewardTable({"correct": total}, {"correct": 1.0}, total, valid.flatten())


@pytest.mark.parametrize(
    "name", ["loss_weights", "advantages", "completion_mask", "loss_mask", "ref_logprobs"]
)
def test_every_row_field_of_a_training_batch_has_the_same_shape(name):
    with pytest.raises(ValueError, match=f"{name} has shape"):
        replace(training_batch(), **{name: getattr(training_batch(), name)[:, :3]})


def test_every_completion_of_a_training_batch_continues_a_prompt():
    with pytest.raises(ValueError, match="prompt_of has shape"):
        replace(training_batch(), prompt_of=torch.tensor([0, 1]))


def test_select_trims_padding_and_renumbers_prompts():
    chosen = training_batch().select(torch.tensor([3, 1]))
    # Prompts 1 and 2 are left, of at most 3 tokens; completions also have at most 3.
    assert chosen.prompt_ids.tolist() == [[5, 6, 7], [9, 10, 11]]
    assert chosen.prompt_mask.tolist() == [[True, True, True], [False, True, True]]
    assert chosen.prompt_of.tolist() == [1, 0]
    assert chosen.completion_ids.tolist() == [[12, 13, 14], [4, 5, 6]]
    assert chosen.completion_mask.tolist() == [[True, True, True], [True, False, False]]
    assert chosen.sampler_logprobs.tolist() == [[-12, -13, -14], [-4, -5, -6]]
    assert chosen.loss_weights.tolist() == [[12.5, 13.5, 14.5], [4.5, 5.5, 6.5]]
    assert chosen.ref_logprobs.tolist() == [[-88, -87, -86], [-96, -95, -94]]
    assert chosen.old_logprobs is None


def test_selecting_all_rows_in_order_only_trims_unused_columns():
    given = training_batch()
    everything = given.select(torch.arange(4))
    for field in fields(TrainingBatch):
        before, after = getattr(given, field.name), getattr(everything, field.name)
        if field.name in ("prompt_ids", "prompt_mask"):
            before = before[:, 1:]  # no prompt has four tokens
        assert (before is None and after is None) or torch.equal(before, after)


def test_two_selections_equal_one_combined_selection():
    rows, then = torch.tensor([3, 0, 2]), torch.tensor([2, 0])
    twice, once = training_batch().select(rows).select(then), training_batch().select(rows[then])
    for field in fields(TrainingBatch):
        first, second = getattr(twice, field.name), getattr(once, field.name)
        assert (first is None and second is None) or torch.equal(first, second)


def test_a_completion_without_tokens_keeps_one_column():
    empty = replace(training_batch(), completion_mask=torch.zeros(4, 4, dtype=torch.bool))
    assert empty.select(torch.tensor([1, 2])).completion_ids.shape == (2, 1)


def test_tokens_of_a_training_batch_share_its_tensors():
    given = training_batch()
    for field in fields(TokenRows):
        assert getattr(given.tokens, field.name) is getattr(given, field.name)


def test_select_commutes_with_tokens():
    rows = torch.tensor([3, 1])
    one, other = training_batch().tokens.select(rows), training_batch().select(rows).tokens
    for field in fields(TokenRows):
        first, second = getattr(one, field.name), getattr(other, field.name)
        assert (first is None and second is None) or torch.equal(first, second)


def test_select_keeps_environment_tokens_at_the_end_of_a_row():
    # Row 2 has two real tokens; the policy did not generate the second one.
    given = training_batch()
    mask = given.loss_mask.clone()
    mask[2, 1] = False
    chosen = replace(given, loss_mask=mask).select(torch.tensor([2]))
    assert chosen.completion_ids.tolist() == [[8, 9]]
    assert chosen.loss_mask.tolist() == [[True, False]]
