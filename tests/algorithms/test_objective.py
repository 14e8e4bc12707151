"""The objective: its gradient in any micro-batches, masks, terms and settings."""

import math
from dataclasses import replace

import pytest
import torch
from jsonargparse import ArgumentParser

from litgrpo.algorithms.advantages import GFPO, Normalized
from litgrpo.algorithms.aggregation import (
    TokenMean,
)
from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.kl import KLInReward, k2
from litgrpo.algorithms.objective import ALONE, RATIO_MAX, Objective
from litgrpo.algorithms.surrogates import (
    CISPO,
    DPPO,
    M2PO,
    SAPO,
    VESPO,
    ClipCov,
    Clipped,
    KLCov,
    PolicyGradient,
)
from litgrpo.types import RewardTable, TokenLogprobs, TokenRows, TrainingBatch
from tests.support.algorithms import CLIP_HIGHER, PUBLISHED
from tests.support.by_hand import batch_of, change_columns
from tests.support.comms import Twins
from tests.support.raises import raises_for

ALGORITHMS = PUBLISHED | {
    "DeepSeek-V3.2": Objective(
        Normalized(scale="none"),
        kl_coef=0.1,
        kl_bias_correction=True,
        off_policy_mask_threshold=0.01,
    ),
    "80/20, entropy bonus": Objective(top_entropy_quantile=0.3, entropy_coef=0.05),
    "80/20": Objective(
        surrogate=CLIP_HIGHER, loss_aggregation=TokenMean(), top_entropy_quantile=0.3
    ),
    "entropy bonus": Objective(entropy_coef=0.01, kl_coef=0.1, kl_estimator="abs"),
    "sampler": Objective(
        kl_coef=0.1, kl_estimator="k1", importance_correction=ImportanceCorrection()
    ),
    "sampler, sequences": Objective(
        surrogate=VESPO(),
        importance_correction=ImportanceCorrection("sequence", "mask", min=0.1, max=20.0),
    ),
    "to the sampler": Objective(
        old_policy="sampler",
        surrogate=DPPO(max_low=0.03, max_high=0.03),
        log_ratio_coef=0.3,
        kl_mask_threshold=0.01,
    ),
    "sequence_token": Objective(importance_sampling_level="sequence_token", surrogate=CISPO()),
    "some dropped": Objective(surrogate=ClipCov(frac=1.0, min_cov=0.0)),
    "some penalized": Objective(
        surrogate=KLCov(frac=0.3), importance_correction=ImportanceCorrection()
    ),
    "largest dropped": Objective(surrogate=M2PO(0.01, Clipped()), kl_coef=0.1),
}
LENGTHS = torch.tensor([5, 1, 3, 0, 4, 5])
TRUNCATED = torch.tensor([True, False, False, False, False, False])


def batch(objective, *, dtype=torch.float64, old=True, junk=0.0):
    """Six completions of up to five tokens, with `junk` on the padding of every field."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(5) < LENGTHS[:, None]

    def rows(low, high):
        values = torch.rand(6, 5, generator=generator, dtype=torch.float64) * (high - low) + low
        return values.to(dtype).masked_fill(~mask, junk)

    now = rows(-2.0, -0.5)
    entropy = rows(0.1, 2.0)
    ids = torch.arange(6)[:, None].expand(6, 5)
    training_batch = TrainingBatch(
        TokenRows(
            prompt_ids=torch.zeros(2, 1, dtype=torch.long),
            prompt_mask=torch.ones(2, 1, dtype=torch.bool),
            prompt_of=torch.tensor([0, 0, 0, 1, 1, 1]),
            completion_ids=ids,
            completion_mask=mask,
        ),
        loss_mask=mask,
        sampler_logprobs=now + rows(-0.2, 0.2),
        advantages=rows(-1.0, 1.0),
        loss_weights=objective.loss_weights(mask, TRUNCATED, 8, dtype=dtype),
        old_logprobs=now + rows(-0.4, 0.4) if old else None,
        ref_logprobs=now + rows(-0.3, 0.3),
    )
    return now, entropy, training_batch


def gradients(objective, now, entropy, training_batch, groups):
    """Total loss and gradients over the given micro-batches, in that order."""
    now, entropy = now.clone().requires_grad_(), entropy.clone().requires_grad_()
    training_batch = objective.prepare_step(training_batch, TokenLogprobs(now, entropy))
    total = 0.0
    for rows in groups:
        # A selection is as wide as its longest row; the whole batch keeps its padding.
        micro = training_batch if groups is ALL else training_batch.select(rows)
        width = micro.loss_weights.shape[1]
        new = TokenLogprobs(now[rows, :width], entropy[rows, :width])
        loss = objective.loss(new, micro).loss
        loss.backward()
        total += loss.item()
    unused = torch.zeros_like(entropy)
    return total, now.grad, unused if entropy.grad is None else entropy.grad


ALL = [torch.arange(6)]


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "bnpo"])
def test_any_micro_batch_split_and_row_order_gives_the_same_gradient(name):
    objective = ALGORITHMS[name]
    data = batch(objective, dtype=torch.float64)
    loss, grad, grad_entropy = gradients(objective, *data, ALL)
    order = torch.tensor([4, 2, 0, 5, 1, 3])

    for size in (1, 2, 5):
        for rows in (torch.arange(6), order):
            split = gradients(objective, *data, list(rows.split(size)))
            assert split[0] == pytest.approx(loss, rel=1e-10, abs=1e-10)
            torch.testing.assert_close(split[1], grad, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(split[2], grad_entropy, rtol=1e-10, atol=1e-12)


def test_bnpo_is_defined_by_the_split():
    objective = ALGORITHMS["bnpo"]
    data = batch(objective)
    whole, split = (
        gradients(objective, *data, ALL),
        gradients(objective, *data, list(ALL[0].split(2))),
    )

    assert not torch.allclose(whole[1], split[1])


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("old", [True, False])
def test_padding_may_hold_anything(name, junk, old):
    objective = ALGORITHMS[name]
    clean = gradients(objective, *batch(objective, old=old), ALL)
    dirty = gradients(objective, *batch(objective, old=old, junk=junk), ALL)

    assert dirty[0] == clean[0]
    torch.testing.assert_close(dirty[1], clean[1], rtol=0, atol=0)
    torch.testing.assert_close(dirty[2], clean[2], rtol=0, atol=0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_more_padding_changes_nothing(name):
    objective = ALGORITHMS[name]
    now, entropy, training_batch = batch(objective)
    loss, grad, _ = gradients(objective, now, entropy, training_batch, ALL)

    def wider(values):
        return torch.nn.functional.pad(values, (0, 3))

    padded = change_columns(training_batch, lambda _, values: wider(values))
    found = gradients(objective, wider(now), wider(entropy), padded, ALL)

    assert found[0] == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(found[1][:, :5], grad)
    assert (found[1][:, 5:] == 0).all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_all_masked_batch_is_zero_and_finite(name):
    objective = ALGORITHMS[name]
    now, entropy, training_batch = batch(objective, junk=math.nan)
    training_batch = replace(training_batch, loss_weights=torch.zeros_like(now))
    loss, grad, grad_entropy = gradients(objective, now, entropy, training_batch, ALL)

    assert loss == 0
    assert (grad == 0).all()
    assert (grad_entropy == 0).all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_policy_that_ran_away_leaves_finite_gradients(name):
    objective = ALGORITHMS[name]
    now, entropy, training_batch = batch(objective, dtype=torch.float32)
    far = replace(training_batch, ref_logprobs=torch.full_like(now, -1.0))
    for start, end in ((-100.0, -1.0), (-1.0, -100.0)):
        moved = replace(far, old_logprobs=torch.full_like(now, start))
        loss, grad, _ = gradients(objective, torch.full_like(now, end), entropy, moved, ALL)

        assert math.isfinite(loss)
        assert grad.isfinite().all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_old_logprobs_the_ratio_is_one_and_has_a_gradient(name):
    objective = ALGORITHMS[name]
    now, entropy, training_batch = batch(objective, old=False)
    if objective.old_policy == "sampler":
        training_batch = replace(training_batch, sampler_logprobs=now)
    same = replace(training_batch, old_logprobs=now)

    absent = gradients(objective, now, entropy, training_batch, ALL)
    equal = gradients(objective, now, entropy, same, ALL)

    torch.testing.assert_close(absent, equal, rtol=1e-12, atol=1e-15)
    stats = objective.loss(TokenLogprobs(now, entropy), training_batch).stats
    assert stats["policy/log_ratio"][0] == 0
    assert absent[1].abs().sum() > 0


def test_grpo_against_the_sums_of_the_paper():
    objective = PUBLISHED["grpo"]
    now, entropy, training_batch = batch(objective)
    rows = []
    for row, length in enumerate(LENGTHS.tolist()):
        tokens = []
        for t in range(length):
            logp, a = now[row, t], training_batch.advantages[row, t]
            w = math.exp(logp - training_batch.old_logprobs[row, t])
            d = training_batch.ref_logprobs[row, t] - logp
            gain = min(w * a, min(max(w, 0.8), 1.2) * a)
            tokens.append(gain - 0.04 * (math.exp(d) - d - 1))
        rows.append(sum(tokens) / length if length else 0.0)

    loss = objective.loss(TokenLogprobs(now, entropy), training_batch).loss

    assert loss.item() == pytest.approx(-float(sum(rows)) / 6)


def test_stats_are_sums_and_counts_of_tokens():
    objective = Objective(Normalized(), kl_coef=0.1, surrogate=Clipped(0.1, 0.1))
    now, entropy, training_batch = batch(objective)
    stats = objective.loss(TokenLogprobs(now, entropy), training_batch).stats
    mask, s = training_batch.tokens.completion_mask, now - training_batch.old_logprobs

    assert {value.shape for value in stats.values()} == {(2,)}
    assert stats[RATIO_MAX][1] == 1  # a largest number, not a sum
    assert {value[1].item() for name, value in stats.items() if name != RATIO_MAX} == {18.0}
    high = (s > math.log(1.1)) & (training_batch.advantages > 0) & mask
    low = (s < math.log(0.9)) & (training_batch.advantages < 0) & mask
    assert stats["policy/clip_high_frac"][0] == high.sum() > 0
    assert stats["policy/clip_low_frac"][0] == low.sum() > 0
    torch.testing.assert_close(stats["policy/entropy_trained"][0], entropy[mask].sum())
    assert stats["policy/kl"][0] > 0
    assert "policy/kl" not in Objective().loss(TokenLogprobs(now, entropy), training_batch).stats


def test_the_largest_ratio_is_a_statistic_of_the_step():
    objective = Objective()
    now, entropy, training_batch = batch(objective)
    ratio = (now - training_batch.old_logprobs)[training_batch.loss_mask].exp()

    largest, _ = objective.loss(TokenLogprobs(now, entropy), training_batch).stats[RATIO_MAX]

    assert largest == pytest.approx(ratio.max().item())
    assert largest > 1


@pytest.mark.parametrize("surrogate", [PolicyGradient(), SAPO(), VESPO()])
def test_a_surrogate_without_a_clip_range_counts_no_token_as_clipped(surrogate):
    objective = Objective(surrogate=surrogate)
    now, entropy, training_batch = batch(objective)
    stats = objective.loss(TokenLogprobs(now, entropy), training_batch).stats

    assert stats["policy/clip_low_frac"][0] == stats["policy/clip_high_frac"][0] == 0


def test_the_importance_correction_is_that_of_the_policy_before_the_update():
    objective = Objective(importance_correction=ImportanceCorrection(max=None))
    now, entropy, training_batch = batch(objective)
    gap = training_batch.old_logprobs - training_batch.sampler_logprobs

    stats = objective.loss(TokenLogprobs(now, entropy), training_batch).stats

    expected = gap[training_batch.loss_mask].exp().sum()
    torch.testing.assert_close(stats["policy/sampler_weight"][0], expected)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_corrected_kl_penalty_of_one_token_has_the_gradient_minus_d(estimator):
    objective = Objective(
        kl_coef=1.0, kl_estimator=estimator, kl_bias_correction=True, loss_aggregation=TokenMean()
    )
    now, entropy, training_batch = batch(objective, old=False)
    training_batch = replace(training_batch, advantages=torch.zeros_like(now))

    _, grad, _ = gradients(objective, now, entropy, training_batch, ALL)

    # k1: the derivative of -w d is w - w d, of which w has the mean 0 over the policy's tokens.
    d, mask = training_batch.ref_logprobs - now, training_batch.loss_mask
    expected = (1 - d if estimator == "k1" else -d) * mask / mask.sum()
    torch.testing.assert_close(grad, expected)


def test_a_function_as_kl_estimator_equals_the_estimator_of_that_name():
    named = Objective(kl_coef=0.5, kl_estimator="k2")
    now, entropy, training_batch = batch(named)
    given = Objective(kl_coef=0.5, kl_estimator=lambda d: d.square() / 2)

    expected = gradients(named, now, entropy, training_batch, ALL)
    torch.testing.assert_close(gradients(given, now, entropy, training_batch, ALL), expected)


def test_a_loss_takes_rows_that_are_not_prepared_as_the_whole_step():
    objective = Objective(top_entropy_quantile=0.4, entropy_coef=0.5)
    now, entropy, training_batch = batch(objective)
    new = TokenLogprobs(now, entropy)
    prepared = objective.prepare_step(training_batch, new)

    assert objective.loss(new, training_batch).loss == pytest.approx(
        objective.loss(new, prepared).loss.item(), rel=1e-12
    )


def test_the_fraction_of_kept_tokens_is_logged_only_if_tokens_are_left_out():
    now, entropy, training_batch = batch(Objective())
    new = TokenLogprobs(now, entropy)
    stats = Objective(top_entropy_quantile=0.5).loss(new, training_batch).stats

    assert stats["policy/kept_frac"].tolist() == [9, 18]
    assert "policy/kept_frac" not in Objective().loss(new, training_batch).stats


def test_masks_leave_the_kl_term_alone():
    plain = Objective(kl_coef=0.1)
    masked = replace(plain, top_entropy_quantile=0.3, off_policy_mask_threshold=-9.0)
    now, entropy, training_batch = batch(plain)
    only_kl = replace(training_batch, advantages=torch.zeros_like(now))
    bad = replace(training_batch, advantages=-torch.ones_like(now))

    torch.testing.assert_close(
        gradients(masked, now, entropy, bad, ALL)[1],
        gradients(plain, now, entropy, only_kl, ALL)[1],
    )


def test_top_entropy_share_learns_from_the_most_uncertain_tokens():
    objective = Objective(top_entropy_quantile=0.5, loss_aggregation=TokenMean())
    now, entropy, training_batch = batch(objective, old=False)
    mask = training_batch.tokens.completion_mask
    median = entropy[mask].quantile(0.5)

    _, grad, _ = gradients(objective, now, entropy, training_batch, ALL)

    assert torch.equal(grad != 0, mask & (entropy >= median))


def test_off_policy_limit_drops_bad_rows_that_became_unlikely():
    objective = Objective(off_policy_mask_threshold=0.5, surrogate=PolicyGradient())
    now, entropy, training_batch = batch(objective, old=False)
    signs = torch.tensor([-1.0, -1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    drift = torch.tensor([1.0, 0.4, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    moved = replace(
        training_batch,
        advantages=signs[:, None].expand(6, 5),
        sampler_logprobs=now + drift[:, None],
    )

    _, grad, _ = gradients(objective, now, entropy, moved, ALL)

    assert (grad != 0).any(1).tolist() == [False, True, True, False, True, False]


def test_off_policy_limit_keeps_tokens_of_unknown_sampler_log_probabilities():
    objective = Objective(off_policy_mask_threshold=0.5, surrogate=PolicyGradient())
    now, entropy, training_batch = batch(objective, old=False)
    sampler_logprobs = (now + 0.6).masked_fill(torch.arange(5) == 0, torch.nan)
    moved = replace(
        training_batch, advantages=-torch.ones_like(now), sampler_logprobs=sampler_logprobs
    )

    loss, grad, _ = gradients(objective, now, entropy, moved, ALL)

    assert math.isfinite(loss)
    # An unknown token counts as one that did not move: means of 0.48, 0, 0.4, 0, 0.45 and 0.48.
    assert (grad != 0).sum(1).tolist() == [5, 1, 3, 0, 4, 5]


def test_off_policy_limit_compares_the_mean_of_a_completion():
    objective = Objective(off_policy_mask_threshold=0.5, surrogate=PolicyGradient())
    now, entropy, training_batch = batch(objective, old=False)
    drift = torch.tensor([1.2, 0.0, 0.0, 0.0, 0.0]).double()  # 0.24 of five, 0.4 of three tokens
    moved = replace(training_batch, advantages=-torch.ones_like(now), sampler_logprobs=now + drift)

    _, grad, _ = gradients(objective, now, entropy, moved, ALL)

    # Only the completion of a single token has a mean above the limit.
    assert (grad != 0).sum(1).tolist() == [5, 0, 3, 0, 4, 5]


def test_entropy_bonus_raises_the_mean_entropy_of_all_tokens():
    objective = Objective(entropy_coef=0.5)
    _, _, grad = gradients(objective, *batch(objective), ALL)

    torch.testing.assert_close(grad[LENGTHS == 5][0], torch.full((5,), -0.5 / 18).double())
    assert grad.sum().item() == pytest.approx(-0.5)


def test_the_entropy_bonus_is_the_mean_of_the_tokens_that_are_kept_by_hand():
    # Entropies 1, 2, 3, 4 and padding; the upper half is kept: the bonus is 0.5 * (3 + 4) / 2.
    objective = Objective(top_entropy_quantile=0.5, entropy_coef=0.5, loss_aggregation=TokenMean())
    entropy = torch.tensor([[1.0, 4.0, 9.0], [3.0, 2.0, 9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, False]])
    now = torch.full((2, 3), -1.0)
    training_batch = batch_of(
        mask,
        sampler_logprobs=now,
        advantages=torch.zeros(2, 3),
        loss_weights=objective.loss_weights(mask, torch.zeros(2, dtype=torch.bool), 3),
    )

    training_batch = objective.prepare_step(training_batch, TokenLogprobs(now, entropy))
    loss = objective.loss(TokenLogprobs(now, entropy), training_batch).loss
    loss.backward()

    assert training_batch.step_mask.sum() == 2
    assert loss.item() == -0.5 * (3 + 4) / 2
    assert entropy.grad.tolist() == [[0, -0.25, 0], [-0.25, 0, 0]]


def test_the_entropy_bonus_is_a_mean_over_the_tokens_of_all_ranks():
    objective = Objective(top_entropy_quantile=0.5, entropy_coef=0.5)
    now, entropy, training_batch = batch(objective)
    new = TokenLogprobs(now, entropy)
    alone, twins = (objective.prepare_step(training_batch, new, x) for x in (ALONE, Twins()))

    assert alone.step_mask.sum() == twins.step_mask.sum() == (alone.term_weights != 0).sum() == 9
    assert alone.term_weights.max() == 2 * twins.term_weights.max() == 1 / 9


def test_the_entropy_threshold_is_the_quantile_of_all_ranks():
    class Other(Twins):
        def gather(self, values):
            return torch.cat([values, torch.full((18,), 0.05, dtype=values.dtype)])

    objective = Objective(top_entropy_quantile=0.5)
    now, entropy, training_batch = batch(objective)
    prepared = objective.prepare_step(training_batch, TokenLogprobs(now, entropy), Other())

    # All 18 tokens of the other rank have a lower entropy, so the upper half is this rank's.
    assert torch.equal(prepared.step_mask, training_batch.loss_mask)


def with_turns(objective, junk=0.0):
    """The rows of `batch` with two tokens of an environment after the second token of each."""
    now, entropy, training_batch = batch(objective)

    def insert_tokens(values, said):
        between = torch.full_like(values[:, :2], said)
        return torch.cat([values[:, :2], between, values[:, 2:]], 1)

    spoken_to = (LENGTHS > 2)[:, None]
    fills = dict.fromkeys(("completion_ids", "loss_mask", "loss_weights"), 0)
    width = torch.arange(7)
    seen = width < (LENGTHS + 2 * (LENGTHS > 2))[:, None]

    def insert(name, values):
        if name == "completion_mask":
            return seen & (spoken_to | (width < LENGTHS[:, None]))
        return insert_tokens(values, fills.get(name, junk))

    rows = change_columns(training_batch, insert)
    return insert_tokens(now, junk), insert_tokens(entropy, junk), rows


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("junk", [0.0, -3.0, math.nan, math.inf])
def test_tokens_of_an_environment_change_nothing_whatever_they_hold(name, junk):
    objective = ALGORITHMS[name]
    plain = batch(objective)
    insert_tokens = with_turns(objective, junk)
    own = torch.tensor([0, 1, 4, 5, 6])

    loss, grad, grad_entropy = gradients(objective, *plain, ALL)
    found = gradients(objective, *insert_tokens, ALL)

    assert found[0] == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(found[1][:, own], grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found[2][:, own], grad_entropy, rtol=1e-12, atol=1e-15)
    assert (found[1][:, 2:4] == 0).all()
    assert (found[2][:, 2:4] == 0).all()
    stats = [
        objective.loss(TokenLogprobs(now, entropy), training_batch).stats
        for now, entropy, training_batch in (plain, insert_tokens)
    ]
    for key, value in stats[0].items():
        torch.testing.assert_close(stats[1][key], value, rtol=1e-12, atol=1e-15)


def test_weights_and_advantages_of_rows_with_turns_are_those_of_the_policys_tokens():
    objective = Objective(gamma=0.9)
    own = torch.tensor([0, 1, 4, 5, 6])
    _, _, plain = batch(objective)
    _, _, insert_tokens = with_turns(objective)
    rewards = torch.tensor([[0.0, 1.0, 2.0], [5.0, 1.0, 1.0]]).double()
    table = RewardTable({"r": rewards}, {"r": 1.0}, rewards, torch.ones(2, 3, dtype=torch.bool))
    for values in ("loss_weights", "token_advantages"):
        given = (TRUNCATED, 8) if values == "loss_weights" else ()
        results = []
        for training_batch in (plain, insert_tokens):
            first = () if given else (table,)
            results.append(getattr(objective, values)(*first, training_batch.loss_mask, *given))
        torch.testing.assert_close(results[1][:, own], results[0])
        assert (results[1][:, 2:4] == 0).all()


def test_needs():
    assert not Objective().needs_reference
    assert not Objective().needs
    assert Objective(kl_coef=0.1).needs_reference
    assert Objective(kl_coef=0.1).needs == {"ref_logprobs", "all_rows"}
    assert Objective(kl_coef=0.1, kl_estimator="jsd").needs == {"ref_hidden", "all_rows"}
    assert Objective(entropy_coef=0.1).needs == {"entropy_gradient", "all_rows"}
    assert Objective(top_entropy_quantile=0.2).needs == {"before_step"}
    assert Objective(surrogate=KLCov()).needs == {"before_step"}
    in_reward = Objective(kl_in_reward=KLInReward())
    assert in_reward.needs == {"ref_logprobs"}
    assert replace(in_reward, old_policy="sampler").needs == {"ref_logprobs", "policy_logprobs"}


@pytest.mark.parametrize(
    "bad",
    [
        {"kl_coef": -0.1},
        {"log_ratio_coef": -1.0},
        {"kl_mask_threshold": -1.0},
        {"gamma": 1.1},
        {"top_entropy_quantile": -1.0},
        {"old_policy": "sampler", "importance_correction": ImportanceCorrection()},
        {"importance_sampling_level": "sequence", "surrogate": DPPO()},
    ],
)
def test_impossible_settings_are_refused(bad):
    with raises_for(next(iter(bad))):
        Objective(**bad)


def by_hand(objective, token_loss):
    """Loss [M, C] of `token_loss(p, p_old, w, A, s)`, token by token, and that of the objective."""
    now, entropy, training_batch = batch(objective)
    before = training_batch.sampler_logprobs
    if objective.old_policy == "before_update":
        before = training_batch.old_logprobs
    total = 0.0
    for row, t in training_batch.loss_mask.nonzero().tolist():
        new, old, a = (float(x[row, t]) for x in (now, before, training_batch.advantages))
        loss = token_loss(new, math.exp(new), math.exp(old), a)
        total += float(training_batch.loss_weights[row, t]) * loss
    return total, objective.loss(TokenLogprobs(now, entropy), training_batch).loss.item()


def test_dppo_against_the_formulas_of_the_paper():
    def tv(new, p, old, a):
        keep = p - old <= 0.03 if a > 0 else p - old >= -0.05
        return -a * min(p / old, 1.1) * new * keep

    def kl(new, p, old, a):
        divergence = old * math.log(old / p) + (1 - old) * math.log((1 - old) / (1 - p))
        keep = divergence <= 0.002 or (p <= old if a > 0 else p >= old)
        return -a * min(p / old, 1.1) * new * keep

    for formula, limits in ((tv, (0.05, 0.03)), (kl, (0.002, 0.002))):
        objective = Objective(
            old_policy="sampler", surrogate=DPPO(formula.__name__, *limits, max_ratio=1.1)
        )
        expected, found = by_hand(objective, formula)
        everything, _ = by_hand(objective, lambda new, p, old, a: -a * min(p / old, 1.1) * new)
        assert found == pytest.approx(expected, rel=1e-9)
        assert found != pytest.approx(everything, rel=1e-3)  # some tokens are outside


def test_the_default_loss_of_prime_rl_against_its_formula():
    def token_loss(new, p, old, a):
        keep = p - old <= 0.2 if a > 0 else p - old >= -0.2
        return -keep * a * (p / old) * new + 1e-3 * math.log(p / old) ** 2

    expected, found = by_hand(ALGORITHMS["prime_rl"], token_loss)
    assert found == pytest.approx(expected, rel=1e-9)


def test_dro_against_its_formula():
    # verl: -(log_prob * advantages - 0.5 * beta * log_ratio^2) with beta 1
    expected, found = by_hand(
        ALGORITHMS["dro"], lambda new, p, old, a: -(new * a - 0.5 * math.log(p / old) ** 2)
    )
    assert found == pytest.approx(expected, rel=1e-9)


def test_the_kl_mask_drops_tokens_that_moved_too_far_and_keeps_the_penalties():
    objective = Objective(surrogate=PolicyGradient(), kl_mask_threshold=0.02, log_ratio_coef=0.1)

    def token_loss(new, p, old, a):
        s = math.log(p / old)
        return -a * new * (s * s / 2 <= 0.02) + 0.1 * s * s

    expected, found = by_hand(objective, token_loss)
    assert found == pytest.approx(expected, rel=1e-9)


def test_gspo_token_has_the_gradient_of_gspo_if_a_completion_has_one_advantage():
    gspo, by_token = ALGORITHMS["gspo"], ALGORITHMS["gspo_token"]
    data = now, entropy, training_batch = batch(gspo)
    same = training_batch.advantages[:, :1].expand_as(now)
    one = (now, entropy, replace(training_batch, advantages=same))

    torch.testing.assert_close(gradients(by_token, *one, ALL), gradients(gspo, *one, ALL))
    assert not torch.equal(gradients(by_token, *data, ALL)[1], gradients(gspo, *data, ALL)[1])


def test_the_ratio_to_the_sampler_does_not_read_the_policy_before_the_update():
    objective = Objective(old_policy="sampler")
    now, entropy, training_batch = batch(objective)
    as_old = replace(training_batch, old_logprobs=training_batch.sampler_logprobs)

    found = gradients(objective, now, entropy, training_batch, ALL)
    torch.testing.assert_close(found, gradients(Objective(), now, entropy, as_old, ALL))


class Module:
    """Replacement of the module that holds an objective.

    Args:
        objective: what is maximized.
    """

    def __init__(self, objective: Objective = Objective()):  # noqa: B008 (frozen)
        self.objective = objective


def parse(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Module, "model")
    return parser.instantiate(parser.parse_args(["--config", str(path)])).model.objective


def test_defaults_come_through_the_parser(tmp_path):
    assert parse(tmp_path, "{}") == Objective()


def test_every_choice_can_be_made_in_yaml(tmp_path):
    found = parse(
        tmp_path,
        """
model:
  objective:
    advantages:
      class_path: litgrpo.algorithms.advantages.GFPO
      init_args:
        rank_by: shortest
        advantages:
          class_path: Normalized
          init_args: {scale: none}
    importance_sampling_level: sequence
    surrogate:
      class_path: VESPO
      init_args: {k: [1, 2], lam: [3, 4]}
    loss_aggregation: sequence_sum
    kl_coef: 1e-3
    kl_estimator: litgrpo.algorithms.kl.k2
    off_policy_mask_threshold: 0.5
    importance_correction: {level: sequence, mode: mask, max: null}
""",
    )

    assert found == Objective(
        GFPO(rank_by="shortest", advantages=Normalized(scale="none")),
        importance_sampling_level="sequence",
        surrogate=VESPO((1.0, 2.0), (3.0, 4.0)),
        loss_aggregation="sequence_sum",
        kl_coef=1e-3,
        kl_estimator=k2,
        off_policy_mask_threshold=0.5,
        importance_correction=ImportanceCorrection("sequence", "mask", max=None),
    )


def test_short_class_names_are_enough(tmp_path):
    found = parse(tmp_path, "model: {objective: {surrogate: SAPO, loss_aggregation: TokenMean}}")

    assert found == Objective(surrogate=SAPO(), loss_aggregation=TokenMean())


@pytest.mark.parametrize("option", ["loss_aggregation", "kl_estimator"])
def test_an_unknown_name_is_rejected(option):
    with pytest.raises(ValueError, match=f"{option} is 'nope'"):
        Objective(**{option: "nope"})
