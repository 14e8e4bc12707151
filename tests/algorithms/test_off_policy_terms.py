"""Terms of the loss on completions of an older policy, against sums over all completions.

A completion is a token, an observation and a token, of a vocabulary of two. The probabilities of
the sampler are quarters, so sixteen rows are exactly its distribution, and the mean over them is
an expectation.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.kl import KLInReward
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.surrogates import Clipped, PolicyGradient
from litgrpo.algorithms.terms import PositiveNLL, StepTokens
from litgrpo.types import TokenLogprobs
from tests.support.by_hand import batch_of

FIRST, SECOND = torch.tensor([1, 3]), torch.tensor([[2, 2], [1, 3]])  # quarters, of the sampler
ROWS = [row for row in product((0, 1), (0, 1)) for _ in range(int(FIRST[row[0]] * SECOND[row]))]
TOKENS = torch.tensor(ROWS)
SAMPLER = ((FIRST / 4).double().log(), (SECOND / 4).double().log())
REFERENCE = torch.tensor([[0.7, 0.3], [0.1, 0.9], [0.45, 0.55]]).double().log()
REWARDS = torch.tensor([[0.0, 1.0], [1.0, 0.3]]).double()
SEQUENCE = ImportanceCorrection("sequence", max=None)
TOKEN = ImportanceCorrection("token", max=None)
MASK = torch.tensor([True, False, True]).expand(16, 3)


class Policy:
    """Logits of the first token, of the second after each first one, and of the observation."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(3, 2, generator=generator).double().requires_grad_()
        self.observation = torch.randn(2, generator=generator).double().requires_grad_()

    @property
    def parameters(self):
        return self.logits, self.observation

    @property
    def logp(self):
        """[3, 2] of the token without a token before it, after token 0, and after token 1."""
        return self.logits.log_softmax(1)

    def per_row(self, values):
        """[16, 3] of values [3] of a position, or [3, 2] of its token; 0 for observations."""
        first, second = TOKENS.unbind(1)
        if values.ndim == 1:
            columns = values[0].expand(16), values[1 + first]
        else:
            columns = values[0, first], values[1 + first, second]
        return torch.stack([columns[0], torch.zeros(16).double(), columns[1]], 1)

    def logprobs(self):
        """[16, 3] of the tokens and the observation."""
        observed = torch.nn.functional.logsigmoid(self.observation)[TOKENS[:, 0]]
        columns = self.per_row(self.logp).unbind(1)
        return torch.stack([columns[0], observed, columns[2]], 1)


def loss_of(objective, policy, old=None):
    """Loss of the sixteen rows as one optimizer step."""
    divergence = None
    if objective.divergence is not None:
        divergence = policy.per_row(objective.divergence(policy.logits, REFERENCE))
    entropy = -(policy.logp.exp() * policy.logp).sum(1)
    new = TokenLogprobs(policy.logprobs(), policy.per_row(entropy), divergence)
    sampler = torch.stack([SAMPLER[0], *SAMPLER[1]])
    step = StepTokens(MASK, ~MASK, MASK, REWARDS[TOKENS.unbind(1)])
    rewards = REWARDS[TOKENS.unbind(1)][:, None].expand(16, 3)
    rows = batch_of(
        MASK,
        completion_mask=torch.ones(16, 3, dtype=torch.bool),
        sampler_logprobs=policy.per_row(sampler),
        advantages=rewards * MASK,
        loss_weights=MASK / 16,  # the aggregation `sequence_sum`
        old_logprobs=None if old is None else old.logprobs().detach(),
        ref_logprobs=policy.per_row(REFERENCE),
        term_weights=objective.term_weights(step, dtype=torch.float64)
        if objective.mean_terms
        else None,
    )
    return objective.loss(new, rows).loss


def gradient(loss, policy):
    """[8] gradient by all parameters of the policy."""
    found = torch.autograd.grad(loss, policy.parameters, allow_unused=True)
    pairs = zip(found, policy.parameters, strict=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in pairs]
    )


def over_positions(values, first):
    """Sum of values [3] of positions, by the probability of the prefix before each of them.

    Args:
        values: with gradient.
        first: [2] log-probabilities of the first token, that of the second prefix.
    """
    return values[0] + (first.detach().exp() * values[1:]).sum()


def reverse_kl(policy):
    return (policy.logp.exp() * (policy.logp - REFERENCE)).sum(1)


def forward_kl(policy):
    return (REFERENCE.exp() * (REFERENCE - policy.logp)).sum(1)


def jsd(policy):
    p, q = policy.logp.exp(), REFERENCE.exp()
    middle = ((p + q) / 2).log()
    return ((q * (q.log() - middle)).sum(1) + (p * (p.log() - middle)).sum(1)) / 2


def entropy_cost(policy):  # the bonus is a mean over the two tokens of a completion
    return (policy.logp.exp() * policy.logp).sum(1) / 2


def estimate(name, *, bias_correction):
    return Objective(
        reward_coef=0.0, kl_coef=1.0, kl_estimator=name, kl_bias_correction=bias_correction
    )


def divergence(name):
    return Objective(reward_coef=0.0, kl_coef=1.0, kl_estimator=name)


# The KL term is on: an objective without rewards needs it; its coefficient is tiny.
NOTHING = Objective(reward_coef=0.0, kl_coef=1e-12)
# {name: (objective, its mean at each position as a function of the policy)}
OF_TOKENS = {
    "k1": (estimate("k1", bias_correction=True), reverse_kl),
    "k2": (estimate("k2", bias_correction=False), reverse_kl),
    "k3": (estimate("k3", bias_correction=True), reverse_kl),
    "k3 as in GRPO": (estimate("k3", bias_correction=False), forward_kl),
    "a function": (estimate(lambda d: d.square() / 2, bias_correction=False), reverse_kl),
}
OF_POSITIONS = {
    "reverse_kl": (divergence("reverse_kl"), reverse_kl),
    "forward_kl": (divergence("forward_kl"), forward_kl),
    "jsd": (divergence("jsd"), jsd),
    "entropy": (replace(NOTHING, entropy_coef=1.0), entropy_cost),
}
ALL_TERMS = OF_TOKENS | OF_POSITIONS


@pytest.mark.parametrize("name", ALL_TERMS)
def test_weights_of_completions_make_the_gradient_that_of_the_policys_own_completions(name):
    objective, term = ALL_TERMS[name]
    policy = Policy(seed=1)
    expected = gradient(over_positions(term(policy), policy.logp[0]), policy)

    corrected = replace(objective, importance_correction=SEQUENCE)
    torch.testing.assert_close(gradient(loss_of(corrected, policy), policy), expected)
    uncorrected = gradient(loss_of(objective, policy), policy)
    assert (uncorrected - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("name", ALL_TERMS)
def test_weights_of_tokens_leave_only_the_prefixes_to_the_sampler(name):
    objective, term = ALL_TERMS[name]
    policy = Policy(seed=1)
    expected = gradient(over_positions(term(policy), SAMPLER[0]), policy)

    corrected = replace(objective, importance_correction=TOKEN)
    found = gradient(loss_of(corrected, policy), policy)
    torch.testing.assert_close(found, expected)
    if name in OF_POSITIONS:  # truncation would lower the mean weight of 1
        truncated = replace(objective, importance_correction=replace(TOKEN, max=0.5))
        torch.testing.assert_close(gradient(loss_of(truncated, policy), policy), found)


def test_the_policy_gradient_is_corrected_as_the_other_terms():
    policy = Policy(seed=2)
    objective = Objective(surrogate=PolicyGradient(), importance_correction=SEQUENCE)
    probabilities = policy.logp[0].exp()[:, None] * policy.logp[1:].exp()
    expected = gradient(-(probabilities * REWARDS).sum(), policy)

    torch.testing.assert_close(gradient(loss_of(objective, policy), policy), expected)


def test_the_squared_log_ratio_is_a_mean_over_the_policy_before_the_update():
    policy, old = Policy(seed=3), Policy(seed=4)
    squared = (policy.logp - old.logp.detach()).square()
    expected = over_positions((old.logp.detach().exp() * squared).sum(1), old.logp[0])

    objective = replace(NOTHING, log_ratio_coef=1.0, importance_correction=SEQUENCE)
    found = gradient(loss_of(objective, policy, old), policy)
    torch.testing.assert_close(found, gradient(expected, policy))


def test_the_kl_estimate_of_a_later_step_is_a_mean_over_the_current_policy():
    policy, old = Policy(seed=3), Policy(seed=4)
    # The weights are of a token, not of what came before it.
    expected = gradient(over_positions(reverse_kl(policy), SAMPLER[0]), policy)

    objective = replace(OF_TOKENS["k3"][0], importance_correction=TOKEN)
    torch.testing.assert_close(gradient(loss_of(objective, policy, old), policy), expected)


def test_the_cross_entropies_are_those_of_the_policys_own_completions():
    policy = Policy(seed=5)
    objective = replace(
        NOTHING,
        positive_nll=PositiveNLL(coef=0.5),
        observation_nll_coef=0.2,
        importance_correction=SEQUENCE,
    )
    first, second = policy.logp[0], policy.logp[1:]
    probabilities = (first[:, None] + second).exp().detach()
    # Five rows of the sampler are correct, of two tokens each: 2 of (0, 1) and 3 of (1, 0).
    nll = -(probabilities * (first[:, None] + second))[REWARDS == 1].sum() * 16 * 0.5 / 10
    observed = torch.nn.functional.logsigmoid(policy.observation)
    expected = gradient(nll - 0.2 * (first.exp().detach() * observed).sum(), policy)

    torch.testing.assert_close(gradient(loss_of(objective, policy), policy), expected)


def test_a_completion_that_the_correction_drops_has_no_term():
    dropped = ImportanceCorrection("token", max=None, token_min=0.999)  # one token is less likely
    sampler = torch.tensor([[0.0, -1.0], [-1.0, -1.0]])
    old = torch.tensor([[-0.5, -1.0], [-1.0, -1.0]])
    everything = torch.ones(2, 2, dtype=torch.bool)
    assert dropped.completion_weight(old, sampler, everything).tolist() == [[0.0], [1.0]]
    assert dropped(old, sampler, everything).tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_the_terms_without_a_weight_are_named():
    all_terms = Objective(
        kl_coef=0.1,
        log_ratio_coef=0.1,
        entropy_coef=0.1,
        positive_nll=PositiveNLL(),
        observation_nll_coef=0.1,
        kl_in_reward=KLInReward(),
    )
    on = replace(all_terms, importance_correction=SEQUENCE)
    assert on.find_uncorrected() == []
    exact = replace(all_terms, kl_estimator="jsd", importance_correction=TOKEN)
    assert exact.find_uncorrected() == ["kl_coef", "entropy_coef", "observation_nll_coef"]
    to_sampler = replace(all_terms, old_policy="sampler")
    others = ["log_ratio_coef", "entropy_coef", "positive_nll", "observation_nll_coef"]
    assert to_sampler.find_uncorrected() == others
    paper = replace(to_sampler, kl_bias_correction=False, surrogate=PolicyGradient())
    assert paper.find_uncorrected() == ["the surrogate loss", "kl_coef", *others]


def test_the_ratio_to_the_sampler_corrects_the_terms_that_have_it():
    policy = Policy(seed=1)
    objective = replace(OF_TOKENS["k3"][0], old_policy="sampler", surrogate=Clipped())
    expected = gradient(over_positions(reverse_kl(policy), SAMPLER[0]), policy)

    torch.testing.assert_close(gradient(loss_of(objective, policy), policy), expected)
