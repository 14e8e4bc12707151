"""F11: completions that say nothing or never end, padding that is the end token."""

import pytest
import torch

from litgrpo.algorithms.objective import Objective
from tests.support.training import LENGTH, batches, module, train

EVERY_TOKEN, NO_TOKEN = tuple(range(259)), (10_000,)
BATCH = ("a", "hello there")


def run_iteration(updates, eos_ids, pad_id=0, **settings):
    """Return training batch and metrics of an iteration with these end tokens."""
    grpo = module(check_invariants=False, reward=by_length_of_prompt, **settings)
    grpo.policy.eos_ids, grpo.policy.pad_id = eos_ids, pad_id
    runner = train(grpo, batches(*BATCH))
    ((training_batch, (report,)),) = updates
    assert report.skipped is None
    return training_batch, {name: float(value) for name, value in runner.logged_metrics.items()}


def by_length_of_prompt(prompts, completions):
    return [float(row % 3) for row in range(len(prompts))]


@pytest.mark.parametrize("objective", [Objective(), Objective(kl_coef=0.0, entropy_coef=0.01)])
@pytest.mark.parametrize(
    ("eos_ids", "length", "truncated"), [(EVERY_TOKEN, 1, 0.0), (NO_TOKEN, LENGTH, 1.0)]
)
def test_all_that_ends_at_once_or_never_has_a_mask_and_a_finite_loss(
    updates, objective, eos_ids, length, truncated
):
    training_batch, logged = run_iteration(updates, eos_ids, objective=objective)
    assert training_batch.tokens.completion_mask.shape == (8, length)
    assert bool(training_batch.tokens.completion_mask.all())
    assert logged["completion/truncated_frac"] == truncated
    assert all(torch.isfinite(torch.tensor(value)) for value in logged.values())


def test_an_end_token_that_is_the_padding_too_counts_once(updates):
    end = 2
    training_batch, logged = run_iteration(updates, (end, *range(100, 200)), pad_id=end)
    for ids, mask in zip(
        training_batch.tokens.completion_ids, training_batch.tokens.completion_mask, strict=True
    ):
        real = int(mask.sum())
        assert bool(mask[:real].all())
        assert bool((ids[real:] == end).all())
        assert end not in ids[: real - 1]
    assert torch.isfinite(torch.tensor(logged["optim/grad_norm"]))


def test_completions_that_never_end_can_be_left_out_of_the_loss(updates):
    training_batch, logged = run_iteration(
        updates, NO_TOKEN, objective=Objective(mask_truncated_completions=True)
    )
    assert bool((training_batch.loss_weights == 0).all())
    assert logged["optim/grad_norm"] == 0.0
