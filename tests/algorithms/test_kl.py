"""KL estimators."""

import math

import pytest
import torch

from litgrpo.algorithms.kl import absolute, k1, k2, k3
from litgrpo.tensors import safe_exp


def test_values_at_a_doubled_probability():
    d = torch.tensor(math.log(2.0))

    assert k1(d).item() == pytest.approx(-math.log(2.0))
    assert k2(d).item() == pytest.approx(math.log(2.0) ** 2 / 2)
    assert k3(d).item() == pytest.approx(1 - math.log(2.0))
    assert absolute(-d).item() == pytest.approx(math.log(2.0))


def test_k1_and_k3_are_unbiased():
    policy, reference = torch.tensor([0.7, 0.3]), torch.tensor([0.4, 0.6])
    d = reference.log() - policy.log()
    divergence = (policy * -d).sum()

    torch.testing.assert_close((policy * k1(d)).sum(), divergence)
    torch.testing.assert_close((policy * k3(d)).sum(), divergence)


@pytest.mark.parametrize("estimator", [k1, k2, k3, absolute])
def test_a_token_at_minus_100_against_a_reference_at_minus_1_is_finite(estimator):
    logprob = torch.tensor([-100.0], requires_grad=True)
    penalty = estimator(-1.0 - logprob)
    penalty.sum().backward()

    assert penalty.isfinite().all()
    assert logprob.grad.isfinite().all()


def test_the_bound_of_k3_still_pulls_towards_the_reference():
    logprob = torch.tensor([-100.0], requires_grad=True)
    k3(-1.0 - logprob).sum().backward()

    assert logprob.grad.item() < 0


def test_bounded_exp_is_exp_below_its_limit_and_a_tangent_above():
    x = torch.tensor([-3.0, 0.0, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    y = safe_exp(x, limit=2.0)
    y.sum().backward()

    tangent = math.exp(2.0)
    expected = torch.tensor([math.exp(-3.0), 1.0, tangent, 3 * tangent], dtype=torch.float64)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        x.grad, torch.tensor([math.exp(-3.0), 1.0, tangent, tangent]).double()
    )
    assert safe_exp(torch.tensor(-math.inf)).item() == 0


def test_the_bias_correction_makes_the_gradient_that_of_the_kl():
    # Exact sums over six actions; `sampler` drew them, `reference` and `policy` differ from it.
    generator = torch.Generator().manual_seed(0)
    logits, ref, moved = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    now, ref = logits.log_softmax(0), ref.log_softmax(0)

    def gradient(loss):
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    kl_of_policy = gradient((now.exp() * (now - ref)).sum())
    kl_of_reference = gradient((ref.exp() * (ref - now)).sum())
    for sampler in (now.detach(), (logits.detach() + 0.3 * moved).log_softmax(0)):
        for estimator in (k1, k3):
            corrected = sampler.exp() * (now - sampler).exp() * estimator(ref - now)
            torch.testing.assert_close(gradient(corrected.sum()), kl_of_policy)
    uncorrected = {
        each: gradient((now.detach().exp() * each(ref - now)).sum()) for each in (k2, k3)
    }
    torch.testing.assert_close(uncorrected[k2], kl_of_policy)
    torch.testing.assert_close(uncorrected[k3], kl_of_reference)
