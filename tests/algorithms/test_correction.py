"""Importance correction."""

import math

import torch

from litgrpo.algorithms.correction import ImportanceCorrection
from tests.support.raises import raises_for

OLD = torch.log(torch.tensor([[0.4, 0.1, 0.5], [0.2, 0.9, 0.9]]))
SAMPLER = torch.log(torch.tensor([[0.1, 0.2, math.nan], [0.2, math.nan, math.nan]]))
SAMPLED = torch.tensor([[True, True, True], [True, False, False]])


def weights(**kwargs):
    return ImportanceCorrection(**kwargs)(OLD, SAMPLER, SAMPLED)


def test_loss_weights_by_hand():
    # Unknown sampler log-probs and padding weigh 1.
    torch.testing.assert_close(weights(max=None), torch.tensor([[4.0, 0.5, 1.0], [1.0, 1.0, 1.0]]))
    torch.testing.assert_close(weights(), torch.tensor([[3.0, 0.5, 1.0], [1.0, 1.0, 1.0]]))
    torch.testing.assert_close(
        weights(min=0.8, max=2.0), torch.tensor([[2.0, 0.8, 1.0], [1.0, 1.0, 1.0]])
    )
    torch.testing.assert_close(
        weights(mode="mask", max=2.0), torch.tensor([[0.0, 0.5, 1.0], [1.0, 1.0, 1.0]])
    )


def test_sequence_weights_are_products():
    torch.testing.assert_close(weights(level="sequence"), torch.tensor([[2.0], [1.0]]))
    torch.testing.assert_close(
        weights(level="sequence", mode="mask", max=1.5), torch.tensor([[0.0], [1.0]])
    )


def test_a_geometric_mean_does_not_grow_with_the_length():
    # Weights 4, 0.5 and an unknown one that agrees.
    torch.testing.assert_close(
        weights(level="geometric_mean"), torch.tensor([[2 ** (1 / 3)], [1.0]])
    )
    masked = weights(level="geometric_mean", mode="mask", max=1.2)
    torch.testing.assert_close(masked, torch.tensor([[0.0], [1.0]]))


def test_a_token_that_the_policy_would_never_say_takes_its_completion_with_it():
    by_token = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    torch.testing.assert_close(weights(token_min=0.6), by_token)
    torch.testing.assert_close(weights(token_min=0.4, max=None), weights(max=None))
    torch.testing.assert_close(
        weights(level="sequence", token_min=0.6), torch.tensor([[0.0], [1.0]])
    )
    with raises_for("token_min"):
        ImportanceCorrection(token_min=1.5)


def test_bounds_must_be_in_order():
    with raises_for("min 3.0", "max 2.0"):
        ImportanceCorrection(min=3.0, max=2.0)
