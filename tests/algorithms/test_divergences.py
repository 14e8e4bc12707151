"""Divergences over the vocabulary: values, gradients, bounds, and where they are evaluated."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from litgrpo.algorithms.divergences import DIVERGENCES, JSD, ForwardKL, ReverseKL, TopK
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.terms import PositiveNLL
from litgrpo.tensors import ComparedModel, token_logprobs

ALL = [*DIVERGENCES.values(), JSD(0.1), JSD(0.9)]
ALL += [TopK(3, divergence) for divergence in ALL]


def logits(seed, rows=5, size=7, scale=2.0):
    return scale * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)).double()


def test_values_of_two_tokens_by_hand():
    p, q = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    reverse = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    forward = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert float(ReverseKL()(p, q)) == pytest.approx(reverse)
    assert float(ForwardKL()(p, q)) == pytest.approx(forward)
    middle = [0.625, 0.375]
    to_middle = [
        sum(x * math.log(x / m) for x, m in zip(each, middle, strict=True))
        for each in ([0.75, 0.25], [0.5, 0.5])
    ]
    assert float(JSD()(p, q)) == pytest.approx(sum(to_middle) / 2)


@pytest.mark.parametrize("divergence", ALL, ids=str)
def test_gradients_are_those_of_autograd(divergence):
    policy, reference = logits(0).requires_grad_(), logits(1)
    assert torch.autograd.gradcheck(lambda z: divergence(z, reference), policy)


@pytest.mark.parametrize("divergence", ALL, ids=str)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 3.0, 200.0]))
def test_a_divergence_is_positive_and_zero_for_equal_distributions(divergence, seed, scale):
    policy = logits(seed, scale=scale).requires_grad_()
    found = divergence(policy, logits(seed + 1, scale=scale))
    assert (found >= -1e-12).all()
    equal = divergence(policy, policy.detach() + 3.0)  # logits have no absolute height
    assert equal.abs().max() < 1e-9
    (gradient,) = torch.autograd.grad(found.sum() + equal.sum(), policy)
    assert gradient.isfinite().all()
    # A shift of all logits changes nothing.
    assert gradient.sum(-1).abs().max() < 1e-9


def test_top_k_puts_the_other_tokens_into_one_bin_by_hand():
    # The reference's most likely token is the second; the bins have 0.7 and 0.4.
    p, q = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.1, 0.6, 0.3]]).log()
    expected = 0.3 * math.log(0.3 / 0.6) + 0.7 * math.log(0.7 / 0.4)
    assert float(TopK(1)(p, q)) == pytest.approx(expected)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("k", [7, 8, 1000])
def test_top_k_of_the_whole_vocabulary_is_the_divergence(name, k):
    found, expected = (
        torch.autograd.grad(
            divergence(policy := logits(0).requires_grad_(), logits(1)).sum(), policy
        )
        for divergence in (TopK(k, name), DIVERGENCES[name])
    )
    assert torch.equal(found[0], expected[0])
    assert torch.equal(TopK(k, name)(logits(0), logits(1)), DIVERGENCES[name](logits(0), logits(1)))


@pytest.mark.parametrize("name", DIVERGENCES)
@given(seed=st.integers(0, 10_000))
def test_top_k_rises_with_k_to_the_divergence(name, seed):
    policy, reference = logits(seed), logits(seed + 1)
    values = [TopK(k, name)(policy, reference) for k in range(1, 8)]
    for fewer, more in pairwise(values):
        assert (fewer <= more + 1e-12).all()
    torch.testing.assert_close(values[-1], DIVERGENCES[name](policy, reference))


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: TopK(0), "k is 0"),
        (lambda: TopK(3, TopK(2)), "TopK"),
        (lambda: TopK(3, "kl"), "reverse_kl"),
    ],
)
def test_a_bad_value_of_top_k_names_the_setting(build, names):
    with pytest.raises((ValueError, TypeError), match=names):
        build()


@given(seed=st.integers(0, 10_000), beta=st.floats(0.01, 0.99))
def test_the_jensen_shannon_divergence_is_at_most_log_2(seed, beta):
    assert (JSD(beta)(logits(seed, scale=50.0), logits(seed + 1, scale=50.0)) <= math.log(2)).all()


def test_limits_of_the_jensen_shannon_divergence_are_the_two_kls():
    policy, reference = logits(3), logits(4)
    small, large = JSD(1e-6)(policy, reference) / 1e-6, JSD(1 - 1e-6)(policy, reference) / 1e-6
    torch.testing.assert_close(small, ForwardKL()(policy, reference), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(large, ReverseKL()(policy, reference), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, float("nan")])
def test_a_weight_outside_of_the_mixture_is_rejected_with_the_names_of_its_limits(beta):
    with pytest.raises(ValueError, match=r"forward_kl \(0\) and reverse_kl \(1\)"):
        JSD(beta)


@pytest.mark.parametrize("chunk_size", [2, 100])
def test_chunks_temperature_and_candidates_are_those_of_the_policy(chunk_size):
    hidden, other = logits(0, 5, 4), logits(1, 5, 3)
    head, other_head = logits(2, 4, 9), logits(3, 3, 9)
    candidates = torch.tensor([[0, 4, -1], [1, 2, 3], [8, -1, -1], [5, 6, 7], [2, 0, 1]])
    found = token_logprobs(
        hidden,
        candidates[:, 0],
        lambda h: h @ head,
        candidate_ids=candidates,
        temperature=0.5,
        chunk_size=chunk_size,
        compared=ComparedModel(other, lambda h: h @ other_head, ReverseKL()),
    )[2]
    for row in range(5):
        ids = candidates[row][candidates[row] >= 0]
        one, two = ((2 * x[row] @ y)[ids] for x, y in ((hidden, head), (other, other_head)))
        assert float(found[row]) == pytest.approx(float(ReverseKL()(one[None], two[None])))


def test_a_reference_with_more_padding_of_its_vocabulary_is_compared_on_common_tokens():
    hidden, head = logits(0, 5, 4), logits(2, 4, 9)
    wider = torch.cat([head, logits(5, 4, 3)], 1)
    compared = ComparedModel(hidden, lambda h: h @ wider, ReverseKL())
    targets = torch.zeros(5, dtype=torch.long)
    found = token_logprobs(hidden, targets, lambda h: h @ head, compared=compared)[2]
    torch.testing.assert_close(found, torch.zeros_like(found))


def test_an_objective_names_its_divergence_only_with_a_kl_term():
    assert Objective(kl_estimator="jsd").divergence is None
    assert Objective(kl_estimator="jsd", kl_coef=1.0).divergence == JSD()
    assert Objective(kl_estimator=JSD(0.1), kl_coef=1.0).divergence == JSD(0.1)
    assert Objective(kl_coef=1.0).divergence is None


def test_an_objective_without_rewards_and_teacher_is_rejected():
    with pytest.raises(ValueError, match="nothing to learn"):
        Objective(reward_coef=0.0)
    for imitation in ({"positive_nll": PositiveNLL()}, {"observation_nll_coef": 0.1}):
        assert Objective(reward_coef=0.0, **imitation).mean_terms
