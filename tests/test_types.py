"""Data classes: shape checks and selections."""

from dataclasses import fields, replace

import pytest
import torch

from litgrpo.types import RewardTable, TokenRows, TrainingBatch
from tests.support.by_hand import prompts, rollout, with_turns


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


def test_lengths_count_generated_tokens_and_models_read_all_tokens():
    given = with_turns()
    assert given.lengths.tolist() == [1, 2, 2, 2]
    assert given.tokens.lengths.tolist() == [1, 3, 2, 3]
    assert [len(ids) for ids in given.token_lists()] == [1, 3, 2, 3]


def test_tokens_mark_generated_tokens_only_if_there_are_turns():
    given = with_turns()
    numbers = torch.where(given.loss_mask, 0, -1)
    assert torch.equal(replace(given, turns=numbers).tokens.loss_mask, given.loss_mask)
    assert rollout().tokens.loss_mask is None


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
