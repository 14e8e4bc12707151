import pytest
import torch

from litgrpo.models.kernels import linear as linears
from litgrpo.training.micro_batches import (
    BatchLimits,
    RaggedBatches,
    mini_batches,
    rows_with_gradient,
)
from litgrpo.training.update_config import KEPT_BYTES, UpdateConfig
from litgrpo.types import TrainingBatch
from tests.benchmarks.kept import kept_of
from tests.support.models import tiny_policy


def training_batch(advantages, weights=None):
    """Four completions of 1, 2, 3 and 4 tokens after a prompt of 2."""
    mask = torch.arange(4) < torch.tensor([[1], [2], [3], [4]])
    zeros = torch.zeros(4, 4)
    return TrainingBatch(
        prompt_ids=torch.ones(1, 2, dtype=torch.long),
        prompt_mask=torch.ones(1, 2, dtype=torch.bool),
        prompt_of=torch.zeros(4, dtype=torch.long),
        completion_ids=mask.long(),
        completion_mask=mask,
        loss_mask=mask,
        sampler_logprobs=zeros,
        advantages=torch.tensor(advantages)[:, None] * mask,
        loss_weights=mask.float() if weights is None else torch.tensor(weights)[:, None] * mask,
    )


def test_mini_batches_keep_groups_whole_and_hold_every_row_once():
    assert [rows.tolist() for rows in mini_batches(6, 2, 2)] == [[0, 1, 2, 3], [4, 5]]
    assert [rows.tolist() for rows in mini_batches(4, 2, 9)] == [[0, 1], [2, 3]]


def test_micro_batches_hold_rows_of_similar_length_within_the_limits():
    rows = training_batch([1.0, 1.0, 1.0, 1.0])
    by_tokens = RaggedBatches().buckets(rows, BatchLimits(max_tokens=11))  # 6 + 5, 4 + 3 tokens
    assert [bucket.tolist() for bucket in by_tokens] == [[3], [2, 1], [0]]
    by_rows = RaggedBatches().buckets(rows, BatchLimits(max_rows=3))
    assert [bucket.tolist() for bucket in by_rows] == [[3, 2, 1], [0]]


def test_a_shared_prompt_counts_once_in_a_micro_batch():
    rows = training_batch([1.0, 1.0, 1.0, 1.0])
    whole = RaggedBatches().buckets(rows, BatchLimits(max_tokens=12, shared=True))
    assert [bucket.tolist() for bucket in whole] == [[0, 1, 2, 3]]  # 2 + 1 + 2 + 3 + 4
    parts = RaggedBatches().buckets(rows, BatchLimits(max_tokens=8, shared=True))
    assert [bucket.tolist() for bucket in parts] == [[0, 1, 2], [3]]  # 2 + 1 + 2 + 3, 2 + 4


def kept_of_token(model) -> float:
    """Bytes that autograd keeps of a token for the backward pass of the body."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    ids = torch.zeros(1, 256, dtype=torch.long)
    storages = (
        tensor.untyped_storage()
        for tensor in kept_of(lambda: model.base_model(input_ids=ids, use_cache=False))
    )
    return sum(each.nbytes() for each in storages if each.data_ptr() not in weights) / 256


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_a_small_model_takes_more_tokens_at_once_within_the_same_memory(architecture):
    policy = tiny_policy(architecture)
    learning = UpdateConfig().resolve_auto(linears.count_linear_outputs(policy.model))
    assert learning.max_tokens > 50_000
    # The most for GPT-2, whose activation function is made of many operations.
    assert 0.7 < learning.max_tokens * kept_of_token(policy.model) / KEPT_BYTES < 1.6


def test_a_large_model_takes_the_least_and_a_given_number_stays():
    assert (
        UpdateConfig().resolve_auto(10**6).micro_batch_tokens == UpdateConfig().max_tokens == 2048
    )
    assert UpdateConfig(micro_batch_tokens=40).resolve_auto(1).max_tokens == 40
    assert UpdateConfig(micro_batch_tokens=None).resolve_auto(1).max_tokens is None
    with pytest.raises(ValueError, match=r"update.micro_batch_tokens is 0; it must be at least"):
        UpdateConfig(micro_batch_tokens=0)


def test_rows_without_advantage_or_weight_are_left_out_but_never_all():
    assert rows_with_gradient(training_batch([0.0, 1.0, -1.0, 0.0])).tolist() == [1, 2]
    assert rows_with_gradient(
        training_batch([1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0])
    ).tolist() == [
        1,
        2,
    ]
    assert rows_with_gradient(training_batch([0.0, 0.0, 0.0, 0.0])).tolist() == [0]
