"""Weights for a sampler that is not the trainer."""

import math

import pytest
import torch

from litgrpo.algorithms.importance import ImportanceCorrection

OLD = torch.log(torch.tensor([[0.4, 0.1, 0.5], [0.2, 0.9, 0.9]]))
SAMPLER = torch.log(torch.tensor([[0.1, 0.2, math.nan], [0.2, math.nan, math.nan]]))
MASK = torch.tensor([[True, True, True], [True, False, False]])


def weights(**kwargs):
    return ImportanceCorrection(**kwargs)(OLD, SAMPLER, MASK)


def test_token_weights_by_hand():
    # Unknown sampler log-probs and padding weigh 1.
    torch.testing.assert_close(weights(high=None), torch.tensor([[4.0, 0.5, 1.0], [1.0, 1.0, 1.0]]))
    torch.testing.assert_close(
        weights(low=0.8, high=2.0), torch.tensor([[2.0, 0.8, 1.0], [1.0, 1.0, 1.0]])
    )
    torch.testing.assert_close(
        weights(outside="mask", high=2.0), torch.tensor([[0.0, 0.5, 1.0], [1.0, 1.0, 1.0]])
    )


def test_sequence_weights_are_products():
    torch.testing.assert_close(weights(level="sequence"), torch.tensor([[2.0], [1.0]]))
    torch.testing.assert_close(
        weights(level="sequence", outside="mask", high=1.5), torch.tensor([[0.0], [1.0]])
    )


def test_a_geometric_mean_does_not_grow_with_the_length():
    # Weights 4, 0.5 and an unknown one that agrees.
    torch.testing.assert_close(weights(level="mean"), torch.tensor([[2 ** (1 / 3)], [1.0]]))
    masked = weights(level="mean", outside="mask", high=1.2)
    torch.testing.assert_close(masked, torch.tensor([[0.0], [1.0]]))


def test_a_token_that_the_policy_would_never_say_takes_its_completion_with_it():
    by_token = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    torch.testing.assert_close(weights(veto=0.6), by_token)
    torch.testing.assert_close(weights(veto=0.4, high=None), weights(high=None))
    torch.testing.assert_close(weights(level="sequence", veto=0.6), torch.tensor([[0.0], [1.0]]))
    with pytest.raises(ValueError, match=r"veto 1.5"):
        ImportanceCorrection(veto=1.5)


def test_bounds_must_be_in_order():
    with pytest.raises(ValueError, match=r"low 3.0, high 2.0"):
        ImportanceCorrection(low=3.0, high=2.0)
