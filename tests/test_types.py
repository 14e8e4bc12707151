"""Data classes: shape checks and selections."""

from dataclasses import replace

import pytest
import torch

from litgrpo.types import Episode, RewardTable, TokenRows, TrainingBatch, move_to_positions
from tests.support.by_hand import prompts, rollout, with_turns


def training_batch() -> TrainingBatch:
    """Three prompts of 1, 3 and 2 tokens; rows 0 to 3 continue prompts 0, 1, 2, 2."""
    prompt_mask = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1]]).bool()
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
    ids = torch.arange(16).view(4, 4)
    return TrainingBatch(
        TokenRows(
            prompt_ids=torch.arange(12).view(3, 4),
            prompt_mask=prompt_mask,
            prompt_of=torch.tensor([0, 1, 2, 2]),
            completion_ids=ids,
            completion_mask=mask,
        ),
        loss_mask=mask,
        sampler_logprobs=-ids.float(),
        advantages=ids + 0.25,
        loss_weights=ids + 0.5,
        ref_logprobs=ids - 100.0,
    )


def test_lengths_count_real_tokens():
    assert rollout().lengths.tolist() == [1, 3, 2, 3]
    assert training_batch().tokens.completion_mask.sum(1).tolist() == [4, 1, 2, 3]
    assert (len(prompts()), len(training_batch())) == (2, 4)
    assert len(rollout().tokens) == 4


def test_lengths_count_generated_tokens_and_models_read_all_tokens():
    given = with_turns()
    assert given.lengths.tolist() == [1, 2, 2, 2]
    assert given.tokens.completion_mask.sum(1).tolist() == [1, 3, 2, 3]
    assert [len(ids) for ids in given.token_lists()] == [1, 3, 2, 3]


def test_tokens_mark_generated_tokens_only_if_there_are_turns():
    given = with_turns()
    assert given.loss_mask.tolist() == (given.turns >= 0).tolist()
    assert torch.equal(given.tokens.predicted, given.loss_mask)
    assert rollout().loss_mask.tolist() == rollout().completion_mask.tolist()
    assert rollout().tokens.predicted is None


def test_rewards_of_turns_are_padded_and_those_not_given_are_unknown():
    episodes = [Episode(turn_rewards=rewards) for rewards in ([1.0, None], [], [0.5], [])]
    found = replace(with_turns(), episodes=episodes).turn_rewards
    nan = torch.nan
    expected = [[1.0, nan], [nan, nan], [0.5, nan], [nan, nan]]
    torch.testing.assert_close(found, torch.tensor(expected).double(), equal_nan=True)
    nothing = replace(with_turns(), episodes=[Episode() for _ in range(4)])
    assert nothing.turn_rewards.shape == (4, 1)


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


@pytest.mark.parametrize("name", ["completion_ids", "completion_mask", "sampler_logprobs"])
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


@pytest.mark.parametrize("name", ["loss_weights", "advantages", "loss_mask", "ref_logprobs"])
def test_every_row_field_of_a_training_batch_has_the_shape_of_its_tokens(name):
    with pytest.raises(ValueError, match=f"{name} has shape"):
        replace(training_batch(), **{name: getattr(training_batch(), name)[:, :3]})


def test_select_trims_padding_and_renumbers_prompts():
    chosen = training_batch().select(torch.tensor([3, 1]))
    tokens = chosen.tokens
    # Prompts 1 and 2 are left, of at most 3 tokens; completions also have at most 3.
    assert tokens.prompt_ids.tolist() == [[5, 6, 7], [9, 10, 11]]
    assert tokens.prompt_mask.tolist() == [[True, True, True], [False, True, True]]
    assert tokens.prompt_of.tolist() == [1, 0]
    assert tokens.completion_ids.tolist() == [[12, 13, 14], [4, 5, 6]]
    assert tokens.completion_mask.tolist() == [[True, True, True], [True, False, False]]
    assert chosen.sampler_logprobs.tolist() == [[-12, -13, -14], [-4, -5, -6]]
    assert chosen.loss_weights.tolist() == [[12.5, 13.5, 14.5], [4.5, 5.5, 6.5]]
    assert chosen.ref_logprobs.tolist() == [[-88, -87, -86], [-96, -95, -94]]
    assert chosen.old_logprobs is None


def fields_of(batch: TrainingBatch) -> dict:
    """Return all tensors of a batch and of its tokens."""
    return vars(batch) | vars(batch.tokens) | {"tokens": None, "on_host": None}


def assert_equal(one: TrainingBatch, other: TrainingBatch) -> None:
    values, others = fields_of(one), fields_of(other)
    for name, value in values.items():
        assert (value is None and others[name] is None) or torch.equal(value, others[name])


def test_selecting_all_rows_in_order_only_trims_unused_columns():
    given = training_batch()
    tokens = given.tokens  # no prompt has four tokens
    shorter = {name: getattr(tokens, name)[:, 1:] for name in ("prompt_ids", "prompt_mask")}
    expected = replace(given, tokens=replace(tokens, **shorter))
    assert_equal(given.select(torch.arange(4)), expected)


def test_two_selections_equal_one_combined_selection():
    rows, then = torch.tensor([3, 0, 2]), torch.tensor([2, 0])
    twice = training_batch().select(rows).select(then)
    assert_equal(twice, training_batch().select(rows[then]))


def test_a_completion_without_tokens_keeps_one_column():
    tokens = training_batch().tokens
    empty = replace(tokens, completion_mask=torch.zeros(4, 4, dtype=torch.bool))
    empty = replace(training_batch(), tokens=empty).select(torch.tensor([1, 2]))
    assert empty.tokens.completion_ids.shape == empty.advantages.shape == (2, 1)


def test_select_keeps_environment_tokens_at_the_end_of_a_row():
    # Row 2 has two real tokens; the policy did not generate the second one.
    given = training_batch()
    mask = given.loss_mask.clone()
    mask[2, 1] = False
    chosen = replace(given, loss_mask=mask).select(torch.tensor([2]))
    assert chosen.tokens.completion_ids.tolist() == [[8, 9]]
    assert chosen.loss_mask.tolist() == [[True, False]]


def test_tokens_with_a_term_weight_are_predicted():
    given = training_batch()
    mask = given.loss_mask.clone()
    mask[:, 1] = False
    weights = torch.zeros(4, 4, 2)
    weights[0, 1, 1] = 0.5
    given = replace(given, loss_mask=mask).with_term_weights(weights)
    expected = mask.clone()
    expected[0, 1] = True
    assert torch.equal(given.tokens.predicted, expected)
    assert torch.equal(given.tokens.on_host.predicted, expected)


def test_a_segment_becomes_a_row_whose_prompt_ends_before_its_first_generated_token():
    rows = TokenRows(
        torch.tensor([[5]]),
        torch.tensor([[True]]),
        torch.tensor([0]),
        completion_ids=torch.tensor([[7, 8, 3, 9]]),
        completion_mask=torch.tensor([[True, True, True, True]]),
        predicted=torch.tensor([[True, True, False, True]]),
        segments=torch.tensor([[0, 0, 1, 1]]),
    )
    split, positions = rows.split_segments()
    assert split.prompt_ids[split.prompt_of].tolist() == [[5], [3]]
    assert split.completion_ids.tolist() == [[7, 8], [9, 0]]
    values = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    assert move_to_positions(values, positions, torch.Size((1, 4))).tolist() == [[1, 2, 0, 3]]
