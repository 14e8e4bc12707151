"""The objective, surrogates, loss aggregation, KL estimators and importance correction."""

import math
from dataclasses import replace

import pytest
import torch
from jsonargparse import ArgumentParser

from litgrpo.algorithms.advantages import GFPO, Normalized
from litgrpo.algorithms.aggregation import (
    ConstantLength,
    MicroBatchTokenMean,
    SequenceMean,
    SequenceSum,
    TokenMean,
)
from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.kl import KLInReward, absolute, k1, k2, k3
from litgrpo.algorithms.objective import ALONE, RATIO_MAX, Objective
from litgrpo.algorithms.surrogates import (
    CISPO,
    DPPO,
    GMPO,
    M2PO,
    SAPO,
    VESPO,
    ClipCov,
    Clipped,
    KLCov,
    PolicyGradient,
    SurrogateInputs,
    binary_kl,
)
from litgrpo.tensors import row_mean, safe_exp
from litgrpo.types import RewardTable, TokenLogprobs, TokenRows, TrainingBatch
from tests.support.algorithms import CLIP_HIGHER, PUBLISHED
from tests.support.by_hand import change_columns
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
    training_batch = TrainingBatch(
        TokenRows(
            prompt_ids=torch.zeros(1, 1, dtype=torch.long),
            prompt_mask=torch.ones(1, 1, dtype=torch.bool),
            prompt_of=torch.zeros(2, dtype=torch.long),
            completion_ids=torch.zeros(2, 3, dtype=torch.long),
            completion_mask=mask,
        ),
        loss_mask=mask,
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


MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
UNCUT = torch.zeros(3, dtype=torch.bool)
ROWS = [
    (SequenceMean(), [[1 / 6, 1 / 6, 0], [1 / 3, 0, 0], [0, 0, 0]]),
    (TokenMean(), [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0], [0, 0, 0]]),
    (ConstantLength(), [[1 / 12, 1 / 12, 0], [1 / 12, 0, 0], [0, 0, 0]]),
    (SequenceSum(), [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0], [0, 0, 0]]),
]


@pytest.mark.parametrize(("loss_aggregation", "expected"), ROWS, ids=lambda row: str(row)[:30])
def test_weights_by_hand(loss_aggregation, expected):
    objective = Objective(loss_aggregation=loss_aggregation)

    weights = objective.loss_weights(MASK, UNCUT, max_completion_length=4, dtype=torch.float64)

    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("loss_aggregation", "expected"), ROWS, ids=lambda row: str(row)[:30])
def test_two_equal_processes_halve_the_weights(loss_aggregation, expected):
    objective = Objective(loss_aggregation=loss_aggregation)

    weights = objective.loss_weights(MASK, UNCUT, 4, comm=Twins())

    torch.testing.assert_close(weights, torch.tensor(expected) / 2)


def test_truncated_rows_lose_their_tokens_but_stay_in_the_number_of_rows():
    cut = torch.tensor([True, False, False])
    per_sequence = Objective(
        mask_truncated_completions=True, loss_aggregation="sequence_mean"
    ).loss_weights(MASK, cut, 4)
    per_token = Objective(
        mask_truncated_completions=True, loss_aggregation=TokenMean()
    ).loss_weights(MASK, cut, 4)

    torch.testing.assert_close(per_sequence, torch.tensor([[0, 0, 0], [1 / 3, 0, 0], [0, 0, 0]]))
    torch.testing.assert_close(per_token, torch.tensor([[0.0, 0, 0], [1.0, 0, 0], [0, 0, 0]]))
    assert Objective().loss_weights(MASK, cut, 4)[0, 0] > 0


@pytest.mark.parametrize(("loss_aggregation", "expected"), ROWS, ids=lambda row: str(row)[:30])
def test_groups_without_variance_are_in_no_denominator_if_excluded(loss_aggregation, expected):
    objective = Objective(loss_aggregation=loss_aggregation, exclude_zero_variance=True)
    more, cut = torch.cat([MASK, MASK]), torch.zeros(6, dtype=torch.bool)
    informative = torch.tensor([True] * 3 + [False] * 3)

    found = objective.loss_weights(more, cut, 4, dtype=torch.float64, informative=informative)
    counted = Objective(loss_aggregation=loss_aggregation).loss_weights(
        more, cut, 4, dtype=torch.float64, informative=informative
    )

    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, torch.cat([expected, torch.zeros_like(expected)]))
    torch.testing.assert_close(counted, torch.cat([expected, expected]) / 2)


def test_bnpo_shares_out_the_part_of_each_micro_batch():
    loss_aggregation = MicroBatchTokenMean()
    weights = Objective(loss_aggregation=loss_aggregation).loss_weights(MASK, UNCUT, 4)

    # One row of three, two tokens: each counts 1/3 * 1/2.
    torch.testing.assert_close(
        loss_aggregation.rescale_micro_batch(weights[:1], MASK[:1]),
        torch.tensor([[1 / 6, 1 / 6, 0.0]]),
    )
    # All three rows: a plain mean over three tokens.
    assert loss_aggregation.rescale_micro_batch(weights, MASK).sum().item() == pytest.approx(1.0)


def test_a_batch_without_tokens_has_no_weight():
    for loss_aggregation, _ in ROWS:
        weights = Objective(loss_aggregation=loss_aggregation).loss_weights(MASK & False, UNCUT, 4)
        assert (weights == 0).all()


@pytest.mark.parametrize(("loss_aggregation", "expected"), ROWS, ids=lambda row: str(row)[:30])
def test_tokens_of_an_environment_have_no_weight_and_are_in_no_denominator(
    loss_aggregation, expected
):
    # The same three rows with two tokens of an environment after the first column.
    said = torch.zeros(3, 2, dtype=torch.bool)
    mask = torch.cat([MASK[:, :1], said, MASK[:, 1:]], 1)
    expected = torch.tensor(expected, dtype=torch.float64)

    weights = Objective(loss_aggregation=loss_aggregation).loss_weights(
        mask, UNCUT, 4, dtype=torch.float64
    )

    torch.testing.assert_close(
        weights, torch.cat([expected[:, :1], said.double(), expected[:, 1:]], 1)
    )


# --- surrogates: loss and gradient of one or two tokens, by hand ---


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


# --- KL estimators ---


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


# --- importance correction ---


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


@pytest.mark.parametrize("option", ["loss_aggregation", "kl_estimator"])
def test_an_unknown_name_is_rejected(option):
    with pytest.raises(ValueError, match=f"{option} is 'nope'"):
        Objective(**{option: "nope"})
