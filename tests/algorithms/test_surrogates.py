"""Loss and gradient of surrogates on one or two tokens, by hand."""

import math

import pytest
import torch

from litgrpo.algorithms.surrogates import (
    CISPO,
    DPPO,
    GMPO,
    SAPO,
    VESPO,
    Clipped,
    PolicyGradient,
    SurrogateInputs,
    binary_kl,
)
from litgrpo.tensors import row_mean, safe_exp
from tests.support.raises import raises_for


def evaluate(surrogate, ratios, advantages, *, sequence=False, sampler_weight=1.0):
    """Loss and gradient of one row; the log-probs now are those of the ratios, before it 0."""
    logprobs = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    log_ratio = logprobs - 0.0
    tokens = SurrogateInputs(
        logprobs,
        log_ratio,
        safe_exp(row_mean(log_ratio, mask) if sequence else log_ratio),
        torch.tensor([advantages], dtype=torch.float64),
        mask,
        torch.full_like(logprobs, sampler_weight),
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
    assert evaluate(Clipped(max_ratio=4.0), [10.0], [-1.0]) == ([pytest.approx(4.0)], [0.0])
    assert evaluate(Clipped(max_ratio=4.0), [10.0], [1.0]) == ([pytest.approx(-1.2)], [0.0])


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
    # On-policy the gate is a half: loss -2 / tau A, gradient -A, for any tau.
    losses, gradients = evaluate(SAPO(2.0, 4.0), [1.0, 1.0], [3.0, -3.0])

    assert losses == pytest.approx([-3.0, 1.5])
    assert gradients == pytest.approx([-3.0, 3.0])


def test_sapo_takes_the_gate_of_the_advantages_sign():
    losses, _ = evaluate(SAPO(2.0, 4.0), [1.5, 1.5], [0.5, -0.5])

    gate = [4 / tau / (1 + math.exp(-tau * 0.5)) for tau in (2.0, 4.0)]
    assert losses == pytest.approx([-0.5 * gate[0], 0.5 * gate[1]])


def test_vespo_bounds_the_ratio_of_the_row_on_both_sides():
    linear = VESPO(k=(1.0, 1.0), lam=(0.0, 0.0))  # phi = W
    far = [math.exp(15.0), math.exp(15.0)]

    assert evaluate(linear, far, [1.0, 1.0])[1] == pytest.approx([-math.exp(20.0)] * 2)
    near = [1 / ratio for ratio in far]
    assert evaluate(linear, near, [1.0, 1.0])[1] == pytest.approx([-1e-8] * 2)


def test_vespo_weighs_by_the_ratio_of_the_whole_row():
    # W = 2 * 0.5 = 1: phi is 1. W = 2 * 1: phi = exp(3 + 2 log 2 - 3 * 2) = 4 e^-3.
    assert evaluate(VESPO(), [2.0, 0.5], [1.0, 1.0])[1] == pytest.approx([-1.0, -1.0])
    assert evaluate(VESPO(), [2.0, 1.0], [1.0, 1.0])[1] == pytest.approx([-4 * math.exp(-3)] * 2)
    # A < 0: k and lam are 3 and 2, phi = exp(2 + 3 log 2 - 2 * 2) = 8 e^-2.
    assert evaluate(VESPO(), [2.0, 1.0], [-1.0, -1.0])[1] == pytest.approx([8 * math.exp(-2)] * 2)


def test_vespo_takes_the_correction_into_its_ratio():
    # W = 1 * 2 by the correction of the single token.
    _, gradients = evaluate(VESPO(), [1.0], [1.0], sampler_weight=2.0)

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


def test_dppo_keeps_rare_tokens_whose_ratio_is_large_and_drops_likely_ones_that_moved():
    surrogate = DPPO(max_low=0.1, max_high=0.1, max_ratio=20.0)
    # p_old = 0.01, 0.5, 0.5, 0.5; p = 0.04, 0.65, 0.35, 0.35
    old = torch.tensor([[0.01, 0.5, 0.5, 0.5]]).double().log()
    new = torch.tensor([[0.04, 0.65, 0.35, 0.35]]).double().log().requires_grad_()
    mask = torch.ones_like(new, dtype=torch.bool)
    advantages = torch.tensor([[1.0, 1.0, -1.0, 1.0]]).double()
    s = new - old
    inputs = SurrogateInputs(new, s, s.exp(), advantages, mask, torch.ones_like(new))
    surrogate(inputs).sum().backward()

    assert new.grad[0].tolist() == pytest.approx([-4.0, 0.0, 0.0, -0.7])
    assert [x[0].tolist() for x in surrogate.find_clipped(inputs)] == [
        [False, False, True, False],
        [False, True, False, False],
    ]


def test_binary_kl_is_finite_at_the_ends():
    ends = torch.tensor([0.0, -1e-12, -1.0, -100.0])
    old, new = torch.meshgrid(ends, ends, indexing="ij")
    found = binary_kl(old, new)
    assert found.isfinite().all()
    assert (found.diagonal() == 0).all()
    expected = 0.3 * math.log(0.3 / 0.6) + 0.7 * math.log(0.7 / 0.4)
    value = binary_kl(torch.tensor(0.3).log(), torch.tensor(0.6).log()).item()
    assert value == pytest.approx(expected, rel=1e-5)


def test_policy_gradient_ignores_the_ratio():
    losses, gradients = evaluate(PolicyGradient(), [3.0, 0.5], [2.0, -1.0])

    assert losses == pytest.approx([-2 * math.log(3.0), math.log(0.5)])
    assert gradients == pytest.approx([-2.0, 1.0])


@pytest.mark.parametrize(
    "surrogate", [Clipped(), CISPO(), SAPO(), GMPO(), DPPO(), PolicyGradient()]
)
def test_the_correction_multiplies_the_loss(surrogate):
    plain, _ = evaluate(surrogate, [1.1, 0.7], [1.0, -2.0])
    corrected, _ = evaluate(surrogate, [1.1, 0.7], [1.0, -2.0], sampler_weight=0.5)

    assert corrected == pytest.approx([loss / 2 for loss in plain])


@pytest.mark.parametrize(
    "surrogate", [Clipped(), CISPO(), SAPO(), VESPO(), GMPO(), DPPO(), PolicyGradient()]
)
def test_on_policy_every_gradient_is_minus_the_advantage(surrogate):
    _, gradients = evaluate(surrogate, [1.0], [-1.5])

    assert gradients == pytest.approx([1.5])


@pytest.mark.parametrize(
    "surrogate", [Clipped(), CISPO(), SAPO(), VESPO(), GMPO(), DPPO(), PolicyGradient()]
)
def test_an_advantage_of_zero_has_no_gradient(surrogate):
    assert evaluate(surrogate, [1.1, 0.9], [0.0, 0.0])[1] == [0.0, 0.0]


def test_bad_settings_are_refused_and_a_small_cap_is_warned_about():
    with raises_for("clip_low is -0.2"):
        Clipped(clip_low=-0.2)
    with raises_for("tau_positive 0"):
        SAPO(tau_positive=0)
    with pytest.warns(UserWarning, match="max_ratio"):
        CISPO(0.2)
