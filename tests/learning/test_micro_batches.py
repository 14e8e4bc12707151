from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from litgrpo.algorithms.objective import Objective
from litgrpo.distributed.device import backend
from litgrpo.learning.micro_batches import (
    BatchLimits,
    RaggedBatches,
    _without_weight,
    mini_batches,
    rows_with_gradient,
)
from litgrpo.learning.static_batches import StaticBatches
from litgrpo.learning.update_config import KEPT_BYTES, UpdateConfig
from litgrpo.models.kernels import linear as linears
from litgrpo.types import TokenLogprobs, TokenRows, TrainingBatch
from tests.support.models import tiny_policy


def training_batch(advantages, weights=None):
    """Four completions of 1, 2, 3 and 4 tokens after a prompt of 2."""
    mask = torch.arange(4) < torch.tensor([[1], [2], [3], [4]])
    zeros = torch.zeros(4, 4)
    return TrainingBatch(
        TokenRows(
            prompt_ids=torch.ones(1, 2, dtype=torch.long),
            prompt_mask=torch.ones(1, 2, dtype=torch.bool),
            prompt_of=torch.zeros(4, dtype=torch.long),
            completion_ids=mask.long(),
            completion_mask=mask,
        ),
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
    # 6 + 5, 4 + 3 tokens
    by_tokens = RaggedBatches().buckets(rows.tokens, BatchLimits(max_tokens=11))
    assert [bucket.tolist() for bucket in by_tokens] == [[3], [2, 1], [0]]
    by_rows = RaggedBatches().buckets(rows.tokens, BatchLimits(max_rows=3))
    assert [bucket.tolist() for bucket in by_rows] == [[3, 2, 1], [0]]


def test_a_shared_prompt_counts_once_in_a_micro_batch():
    rows = training_batch([1.0, 1.0, 1.0, 1.0])
    whole = RaggedBatches().buckets(rows.tokens, BatchLimits(max_tokens=12, shared=True))
    assert [bucket.tolist() for bucket in whole] == [[0, 1, 2, 3]]  # 2 + 1 + 2 + 3 + 4
    parts = RaggedBatches().buckets(rows.tokens, BatchLimits(max_tokens=8, shared=True))
    assert [bucket.tolist() for bucket in parts] == [[0, 1, 2], [3]]  # 2 + 1 + 2 + 3, 2 + 4


def test_the_last_micro_batch_of_a_step_is_marked():
    rows = training_batch([1.0, 1.0, 1.0, 1.0])
    found = list(RaggedBatches().split(rows, torch.tensor([3, 0, 2]), BatchLimits(max_rows=2)))
    assert [micro.is_last for micro in found] == [False, True]
    assert not any(micro.is_filler for micro in found)


@pytest.mark.parametrize("limits", [BatchLimits(), BatchLimits(max_rows=1), BatchLimits(None, 9)])
@pytest.mark.parametrize("batching", [RaggedBatches(), StaticBatches(backend(torch.device("cpu")))])
def test_log_probabilities_of_micro_batches_are_written_to_their_rows(batching, limits):
    tokens = training_batch([1.0, 1.0, 1.0, 1.0]).tokens
    numbers = torch.arange(16.0).view(4, 4)
    tokens = replace(tokens, completion_ids=numbers.long())

    def logprobs_of(part):
        values = part.completion_ids.float()
        return TokenLogprobs(-values, values * 10)

    found = batching.compute_logprobs(tokens, logprobs_of, limits)
    mask = tokens.completion_mask
    torch.testing.assert_close(found.logprobs[mask], -numbers[mask])
    torch.testing.assert_close(found.entropy[mask], 10 * numbers[mask])
    assert found.logprobs.shape == found.entropy.shape == (4, 4)


@st.composite
def step_rows(draw):
    """Rows of one optimizer step, with a limit of rows and one of tokens for a micro-batch."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    limit = st.none() | st.integers(1, 12)
    return lengths, draw(limit), draw(limit), draw(st.booleans()), draw(st.integers(0, 2**31))


@given(step_rows())
def test_the_gradient_is_that_of_all_rows_for_any_micro_batches(case):
    lengths, max_rows, max_tokens, shared, seed = case
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(1, *lengths))
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    objective = Objective(kl_coef=0.1, entropy_coef=0.1, loss_aggregation="sequence_mean")
    logits = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
    rows = TrainingBatch(
        TokenRows(
            prompt_ids=torch.ones(2, 3, dtype=torch.long),
            prompt_mask=torch.tensor([[False, True, True], [True, True, True]]),
            prompt_of=torch.arange(len(lengths)) % 2,
            completion_ids=torch.arange(shape[0] * shape[1]).view(shape),
            completion_mask=mask,
        ),
        loss_mask=mask,
        sampler_logprobs=torch.zeros(shape),
        advantages=torch.randn(shape, generator=generator) * mask,
        loss_weights=objective.loss_weights(mask, torch.zeros(len(lengths)).bool(), 5),
        ref_logprobs=torch.full(shape, -1.0),
    )
    rows = objective.prepare_step(rows)
    gradients = []
    for limits in (BatchLimits(), BatchLimits(max_rows, max_tokens, shared)):
        weight = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64, requires_grad=True)
        for micro in RaggedBatches().split(rows, None, limits):
            own = logits.flatten(0, 1)[micro.rows.tokens.completion_ids]
            scores = (own * weight).log_softmax(-1)
            new = TokenLogprobs(scores[..., 0], -(scores.exp() * scores).sum(-1))
            objective.loss(new, micro.rows).loss.backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("linear_outputs", [100, 1000, 5000])
def test_auto_tokens_keep_at_most_512_mib_of_activations(linear_outputs):
    tokens = UpdateConfig().resolve_auto(linear_outputs).max_tokens
    assert 0.99 < tokens * 8.5 * linear_outputs / (512 * 2**20) <= 1


def saved_bytes_per_token(model) -> float:
    """Bytes that autograd saves of a token for the backward pass of the body, without weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved = {}  # tensors are held, or a storage's address would be given to another

    def save(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model.base_model(input_ids=torch.zeros(1, 256, dtype=torch.long), use_cache=False)
    activations = [tensor for address, tensor in saved.items() if address not in weights]
    return sum(tensor.untyped_storage().nbytes() for tensor in activations) / 256


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_a_small_model_takes_more_tokens_at_once_within_the_same_memory(architecture):
    policy = tiny_policy(architecture)
    learning = UpdateConfig().resolve_auto(linears.count_linear_outputs(policy.model))
    assert learning.max_tokens > 50_000
    # The most for GPT-2, whose activation function is made of many operations.
    assert 0.7 < learning.max_tokens * saved_bytes_per_token(policy.model) / KEPT_BYTES < 1.6


def test_a_large_model_takes_the_least_and_a_given_number_stays():
    assert (
        UpdateConfig().resolve_auto(10**6).micro_batch_tokens == UpdateConfig().max_tokens == 2048
    )
    assert UpdateConfig(micro_batch_tokens=40).resolve_auto(1).max_tokens == 40
    assert UpdateConfig(micro_batch_tokens=None).resolve_auto(1).max_tokens is None
    with pytest.raises(ValueError, match=r"update.micro_batch_tokens is 0; it must be at least"):
        UpdateConfig(micro_batch_tokens=0)


def test_rows_with_a_selected_token_or_a_cross_entropy_have_a_gradient():
    rows = training_batch([0.0, 1.0, 0.0, 0.0])
    third, fourth = (rows.loss_mask & (torch.arange(4) == n)[:, None] for n in (2, 3))

    assert rows_with_gradient(replace(rows, selected=third)).tolist() == [1, 2]
    assert rows_with_gradient(replace(rows, term_weights=fourth[..., None].float())).tolist() == [
        1,
        3,
    ]


def test_a_filler_has_no_weight_in_any_term():
    rows = training_batch([1.0, 1.0, 1.0, 1.0])
    filler = _without_weight(replace(rows, term_weights=rows.loss_weights[..., None]))

    assert not any(x.any() for x in (filler.loss_weights, filler.advantages, filler.term_weights))


def test_rows_without_advantage_or_weight_are_left_out_but_never_all():
    assert rows_with_gradient(training_batch([0.0, 1.0, -1.0, 0.0])).tolist() == [1, 2]
    assert rows_with_gradient(
        training_batch([1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0])
    ).tolist() == [
        1,
        2,
    ]
    assert rows_with_gradient(training_batch([0.0, 0.0, 0.0, 0.0])).tolist() == [0]
