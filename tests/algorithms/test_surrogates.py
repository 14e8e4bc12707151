"""Surrogates: loss and gradient of one or two tokens, worked out by hand."""

import math

import pytest
import torch

from litgrpo.algorithms.losses import Clipped, Tokens
from litgrpo.algorithms.surrogates import CISPO, GMPO, SAPO, VESPO, PolicyGradient
from litgrpo.tensors import bounded_exp, row_mean


def evaluate(surrogate, ratios, advantages, *, sequence=False, correction=1.0):
    """Loss and gradient of one row; the log-probs now are those of the ratios, before it 0."""
    logprobs = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    log_ratio = logprobs - 0.0
    tokens = Tokens(
        logprobs,
        log_ratio,
        bounded_exp(row_mean(log_ratio, mask) if sequence else log_ratio),
        torch.tensor([advantages], dtype=torch.float64),
        mask,
        torch.full_like(logprobs, correction),
    )
    loss = surrogate(tokens).expand(1, len(ratios))
    loss.sum().backward()
    return loss.detach()[0].tolist(), logprobs.grad[0].tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # good and already more likely: cut at 1.2
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),  # bad and already less likely: cut at 0.8
        (1.5, -2.0, 3.0, 3.0),
        (0.5, 0.0, 0.0, 0.0),
    ],
)
def test_clipped(ratio, advantage, loss, gradient):
    assert evaluate(Clipped(), [ratio], [advantage]) == (
        [pytest.approx(loss)],
        [pytest.approx(gradient)],
    )


def test_clip_higher_lets_good_tokens_rise_further():
    losses, gradients = evaluate(Clipped(0.2, 0.28), [1.25, 1.3], [1.0, 1.0])

    assert losses == pytest.approx([-1.25, -1.28])
    assert gradients == pytest.approx([-1.25, 0.0])


def test_two_sided_clip_bounds_the_loss_of_a_bad_token_that_became_likely():
    assert evaluate(Clipped(cap=4.0), [10.0], [-1.0]) == ([pytest.approx(4.0)], [0.0])
    assert evaluate(Clipped(cap=4.0), [10.0], [1.0]) == ([pytest.approx(-1.2)], [0.0])


def test_gspo_takes_one_ratio_per_row_and_its_gradient_flows_through_the_mean():
    losses, gradients = evaluate(Clipped(), [4.0, 0.25], [1.0, 1.0], sequence=True)

    # Geometric mean 1; the loss of both tokens is -1, each log-prob moves both by a half.
    assert losses == pytest.approx([-1.0, -1.0])
    assert gradients == pytest.approx([-1.0, -1.0])


def test_cispo_keeps_the_gradient_of_capped_tokens():
    losses, gradients = evaluate(CISPO(2.0), [3.0, 1.5], [1.0, -2.0])

    assert losses == pytest.approx([-2 * math.log(3.0), 3 * math.log(1.5)])
    assert gradients == pytest.approx([-2.0, 3.0])


def test_sapo_by_hand():
    # On-policy the gate is a half: loss -2 / tau A, gradient -A, whatever tau.
    losses, gradients = evaluate(SAPO(2.0, 4.0), [1.0, 1.0], [3.0, -3.0])

    assert losses == pytest.approx([-3.0, 1.5])
    assert gradients == pytest.approx([-3.0, 3.0])


def test_vespo_weighs_by_the_ratio_of_the_whole_row():
    # W = 2 * 0.5 = 1: phi is 1. W = 2 * 1: phi = exp(3 + 2 log 2 - 3 * 2) = 4 e^-3.
    assert evaluate(VESPO(), [2.0, 0.5], [1.0, 1.0])[1] == pytest.approx([-1.0, -1.0])
    assert evaluate(VESPO(), [2.0, 1.0], [1.0, 1.0])[1] == pytest.approx([-4 * math.exp(-3)] * 2)
    # A < 0: k and lam are 3 and 2, phi = exp(2 + 3 log 2 - 2 * 2) = 8 e^-2.
    assert evaluate(VESPO(), [2.0, 1.0], [-1.0, -1.0])[1] == pytest.approx([8 * math.exp(-2)] * 2)


def test_vespo_takes_the_correction_into_its_ratio():
    # W = 1 * 2 by the correction of the single token.
    _, gradients = evaluate(VESPO(), [1.0], [1.0], correction=2.0)

    assert gradients == pytest.approx([-4 * math.exp(-3)])


def test_gmpo_is_a_geometric_mean_of_clipped_ratios():
    # Log-ratios 0.2 and 0.8, the second is cut to 0.4: exp(0.3), moved by the first token only.
    losses, gradients = evaluate(GMPO(), [math.exp(0.2), math.exp(0.8)], [1.0, 1.0])

    assert losses == pytest.approx([-math.exp(0.3)] * 2)
    assert gradients == pytest.approx([-math.exp(0.3), 0.0])


def test_gmpo_cuts_bad_tokens_below():
    losses, gradients = evaluate(GMPO(), [math.exp(-0.8), math.exp(0.8)], [-1.0, -1.0])

    assert losses == pytest.approx([math.exp(0.2)] * 2)
    assert gradients == pytest.approx([0.0, math.exp(0.2)])


def test_policy_gradient_ignores_the_ratio():
    losses, gradients = evaluate(PolicyGradient(), [3.0, 0.5], [2.0, -1.0])

    assert losses == pytest.approx([-2 * math.log(3.0), math.log(0.5)])
    assert gradients == pytest.approx([-2.0, 1.0])


@pytest.mark.parametrize("surrogate", [Clipped(), CISPO(), SAPO(), GMPO(), PolicyGradient()])
def test_the_correction_multiplies_the_loss(surrogate):
    plain, _ = evaluate(surrogate, [1.1, 0.7], [1.0, -2.0])
    corrected, _ = evaluate(surrogate, [1.1, 0.7], [1.0, -2.0], correction=0.5)

    assert corrected == pytest.approx([loss / 2 for loss in plain])


@pytest.mark.parametrize(
    "surrogate", [Clipped(), CISPO(), SAPO(), VESPO(), GMPO(), PolicyGradient()]
)
def test_on_policy_every_gradient_is_minus_the_advantage(surrogate):
    _, gradients = evaluate(surrogate, [1.0], [-1.5])

    assert gradients == pytest.approx([1.5])


@pytest.mark.parametrize(
    "surrogate", [Clipped(), CISPO(), SAPO(), VESPO(), GMPO(), PolicyGradient()]
)
def test_an_advantage_of_zero_has_no_gradient(surrogate):
    assert evaluate(surrogate, [1.1, 0.9], [0.0, 0.0])[1] == [0.0, 0.0]


def test_bad_settings_are_refused_and_a_small_cap_is_warned_about():
    with pytest.raises(ValueError, match=r"clip_low -0.2"):
        Clipped(clip_low=-0.2)
    with pytest.raises(ValueError, match="tau 0"):
        SAPO(tau_positive=0)
    with pytest.warns(UserWarning, match=r"cap 0.2 is <= 1"):
        CISPO(0.2)
