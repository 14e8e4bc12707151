"""Cross-entropy of correct completions and of observations, and the KL in the reward."""

import math
from dataclasses import replace

import pytest
import torch

from litgrpo.algorithms.advantages import GDPO, Normalized
from litgrpo.algorithms.kl import KLInReward
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.surrogates import PolicyGradient
from litgrpo.algorithms.terms import PositiveNLL, StepTokens
from litgrpo.types import RewardTable, TokenLogprobs
from tests.support.by_hand import batch_of
from tests.support.comms import in_turns

# Three completions: the policy's tokens (1), observations (2) and padding (0).
KIND = torch.tensor([[1, 2, 2, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
LOGPROBS = torch.tensor([[-1.0, -2.0, -4.0, -0.5], [-3.0, -1.0, 9.0, 9.0], [-1.0, -1.0, -2.0, 9.0]])
REWARDS = torch.tensor([1.0, 0.0, 1.5])
BOTH = Objective(
    positive_nll=PositiveNLL(coef=0.5), observation_nll_coef=0.1, surrogate=PolicyGradient()
)


def batch(objective, kind=KIND, rewards=REWARDS, logprobs=LOGPROBS):
    mask, observed = kind == 1, kind == 2
    rows = batch_of(
        mask,
        completion_mask=mask | observed,
        sampler_logprobs=logprobs,
        advantages=torch.zeros_like(logprobs),
        loss_weights=mask / mask.sum(),
        term_weights=objective.term_weights(StepTokens(mask, observed, mask, rewards)),
    )
    new = TokenLogprobs(logprobs.clone().requires_grad_(), torch.zeros_like(logprobs))
    return new, rows


def test_the_terms_are_means_over_their_tokens_by_hand():
    new, rows = batch(BOTH)
    output = BOTH.loss(new, rows)
    output.loss.backward()

    # Correct: 1, 0.5, 1, 1, 2 -> 5.5 / 5. Observations: 2, 4 -> 3.
    assert output.loss.item() == pytest.approx(0.5 * 5.5 / 5 + 0.1 * 3)
    assert output.stats["policy/positive_nll"].tolist() == [5.5, 5]
    assert output.stats["policy/observation_nll"].tolist() == [6, 2]
    expected = [[-0.1, -0.05, -0.05, -0.1], [0, 0, 0, 0], [-0.1, -0.1, -0.1, 0]]
    torch.testing.assert_close(new.logprobs.grad, torch.tensor(expected))


@pytest.mark.parametrize(
    ("objective", "names"),
    [
        (replace(BOTH, observation_nll_coef=0.0), {"policy/positive_nll"}),
        (replace(BOTH, positive_nll=None), {"policy/observation_nll"}),
    ],
)
def test_each_term_is_alone_without_the_other(objective, names):
    output = objective.loss(*batch(objective))

    assert output.loss.item() == pytest.approx(0.55 if "policy/positive_nll" in names else 0.3)
    assert {name for name in output.stats if name.endswith("nll")} == names


def test_a_step_without_correct_completions_or_observations_adds_nothing():
    new, rows = batch(BOTH, kind=KIND.clamp(max=1), rewards=torch.zeros(3))

    assert BOTH.loss(new, rows).loss.item() == 0


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_padding_may_hold_anything(junk):
    clean, dirty = (
        batch(BOTH, logprobs=LOGPROBS.masked_fill(KIND == 0, value)) for value in (0.0, junk)
    )
    losses = [BOTH.loss(*each).loss for each in (clean, dirty)]
    for loss in losses:
        loss.backward()

    assert losses[0] == losses[1]
    assert torch.equal(clean[0].logprobs.grad, dirty[0].logprobs.grad)


@pytest.mark.parametrize("parts", [[1, 2], [2, 1], [1, 1, 1]])
def test_micro_batches_add_up(parts):
    new, rows = batch(BOTH)
    total = 0.0
    for part in torch.arange(3).split(parts):
        micro = rows.select(part)
        width = micro.loss_mask.shape[1]
        given = TokenLogprobs(new.logprobs[part, :width], new.entropy[part, :width])
        total += BOTH.loss(given, micro).loss.item()

    assert total == pytest.approx(BOTH.loss(new, rows).loss.item())


def test_two_processes_share_the_denominators():
    step = StepTokens(KIND == 1, KIND == 2, KIND == 1, REWARDS)
    expected = BOTH.term_weights(step)

    def process(part):
        own = StepTokens(*(x[part] for x in vars(step).values()))
        return lambda comm: BOTH.term_weights(own, comm)

    parts = torch.arange(3).split([1, 2])
    torch.testing.assert_close(torch.cat(in_turns(*map(process, parts))), expected)


def test_correct_completions_have_a_valid_reward_of_at_least_the_least_one():
    mask = torch.ones(4, 1, dtype=torch.bool)
    step = StepTokens(mask, ~mask, mask, torch.tensor([1.0, 0.99, 2.0, math.nan]).double())

    assert PositiveNLL().select(step).flatten().tolist() == [True, False, True, False]
    assert PositiveNLL(min_reward=1.5).select(step).flatten().tolist() == [
        False,
        False,
        True,
        False,
    ]


# --- KL in the reward ---


def table_of(rewards, valid=None):
    total = torch.tensor(rewards).double()
    valid = torch.ones_like(total, dtype=torch.bool) if valid is None else torch.tensor(valid)
    return RewardTable({"r": total}, {"r": 1.0}, total, valid)


REF = torch.tensor([[-1.5, 7.0, 7.0, -0.5], [-2.0, -1.0, 7.0, 7.0], [-1.0, -3.0, -1.0, 7.0]])


def test_the_kl_of_a_completion_is_subtracted_from_its_reward_by_hand():
    # l - l_ref: 0.5, 0 | -1, 0 | 0, 2, -1; the sums are 0.5, -1 and 1. Observations do not count.
    objective = Objective(kl_in_reward=KLInReward(coef=0.1))
    found = objective.subtract_kl(table_of([[1.0, 0.0, 1.0]]), LOGPROBS, REF, KIND == 1)

    torch.testing.assert_close(found.total, torch.tensor([[0.95, 0.1, 0.9]]).double())
    assert objective.needs_reference
    # The group's mean is 0.65.
    advantages = replace(objective, advantages=Normalized(scale="none")).token_advantages(
        found, KIND == 1
    )
    torch.testing.assert_close(advantages[:, 0], torch.tensor([0.3, -0.55, 0.25]))


def test_without_the_option_the_rewards_are_the_same():
    table = table_of([[1.0, 0.0, 1.0]])
    assert Objective().subtract_kl(table, LOGPROBS, None, KIND == 1) is table


def test_an_unknown_sampler_log_probability_counts_as_no_kl():
    logprobs = torch.tensor([[math.nan, -3.0]])
    found = KLInReward().token_kl(logprobs, torch.zeros(1, 2), torch.ones(1, 2).bool())

    assert found.tolist() == [[0.0, -3.0]]


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: PositiveNLL(coef=0.0), "coef"),
        (lambda: PositiveNLL(min_reward=math.nan), "min_reward"),
        (lambda: KLInReward(coef=-1.0), "coef"),
        (lambda: KLInReward(estimator="k4"), "estimator"),
        (lambda: Objective(observation_nll_coef=-0.1), "observation_nll_coef"),
        (lambda: Objective(GDPO(), kl_in_reward=KLInReward()), "GDPO"),
    ],
)
def test_a_bad_value_names_the_setting(build, names):
    with pytest.raises((ValueError, TypeError), match=names):
        build()
