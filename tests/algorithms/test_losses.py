"""The objective: every algorithm as a row, invariances, masks, bad numbers, YAML."""

import math
from dataclasses import replace

import pytest
import torch
from jsonargparse import ArgumentParser

from litgrpo.algorithms.advantages import Normalized
from litgrpo.algorithms.estimators import TopShare
from litgrpo.algorithms.importance import ImportanceCorrection
from litgrpo.algorithms.kl import absolute, k1, k2
from litgrpo.algorithms.loss_aggregation import Constant, MicroBatchTokenMean
from litgrpo.algorithms.losses import (
    RATIO_MAX,
    Clipped,
    Objective,
    SequenceMean,
    TokenMean,
)
from litgrpo.algorithms.surrogates import SAPO, VESPO, PolicyGradient
from litgrpo.types import RewardTable, TokenLogprobs, TrainingBatch, row_fields
from tests.support.algorithms import CLIP_HIGHER, PUBLISHED, SUM
from tests.support.comms import Twins

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
    "entropy bonus": Objective(entropy_coef=0.01, kl_coef=0.1, kl=absolute),
    "sampler": Objective(kl_coef=0.1, kl=k1, importance_correction=ImportanceCorrection()),
    "sampler, sequences": Objective(
        surrogate=VESPO(),
        importance_correction=ImportanceCorrection("sequence", "mask", low=0.1, high=20.0),
    ),
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
    experience = TrainingBatch(
        prompt_ids=torch.zeros(2, 1, dtype=torch.long),
        prompt_mask=torch.ones(2, 1, dtype=torch.bool),
        prompt_of=torch.tensor([0, 0, 0, 1, 1, 1]),
        completion_ids=ids,
        completion_mask=mask,
        loss_mask=mask,
        sampler_logprobs=now + rows(-0.2, 0.2),
        advantages=rows(-1.0, 1.0),
        weights=objective.token_weights(mask, TRUNCATED, 8, dtype=dtype),
        old_logprobs=now + rows(-0.4, 0.4) if old else None,
        ref_logprobs=now + rows(-0.3, 0.3),
    )
    return now, entropy, experience


def gradients(objective, now, entropy, experience, groups):
    """Total loss and gradients over the given micro-batches, in that order."""
    now, entropy = now.clone().requires_grad_(), entropy.clone().requires_grad_()
    normalizers = objective.normalizers(experience.weights, entropy)
    total = 0.0
    for rows in groups:
        # A selection is as wide as its longest row; the whole batch keeps its padding.
        micro = experience if groups is ALL else experience.select(rows)
        width = micro.weights.shape[1]
        new = TokenLogprobs(now[rows, :width], entropy[rows, :width])
        loss = objective.loss(new, micro, normalizers).loss
        loss.backward()
        total += loss.item()
    unused = torch.zeros_like(entropy)
    return total, now.grad, unused if entropy.grad is None else entropy.grad


ALL = [torch.arange(6)]


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "bnpo"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_any_micro_batch_split_and_row_order_gives_the_same_gradient(name, dtype, tolerance):
    objective = ALGORITHMS[name]
    data = batch(objective, dtype=dtype)
    loss, grad, grad_entropy = gradients(objective, *data, ALL)
    order = torch.tensor([4, 2, 0, 5, 1, 3])

    for size in (1, 2, 3, 5, 6):
        for rows in (torch.arange(6), order):
            split = gradients(objective, *data, list(rows.split(size)))
            assert split[0] == pytest.approx(loss, rel=tolerance, abs=tolerance)
            torch.testing.assert_close(split[1], grad, rtol=tolerance, atol=tolerance * 1e-2)
            torch.testing.assert_close(
                split[2], grad_entropy, rtol=tolerance, atol=tolerance * 1e-2
            )


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
    now, entropy, experience = batch(objective)
    loss, grad, _ = gradients(objective, now, entropy, experience, ALL)

    def wider(values):
        return torch.nn.functional.pad(values, (0, 3))

    padded = replace(
        experience, **{name: wider(value) for name, value in row_fields(experience).items()}
    )
    found = gradients(objective, wider(now), wider(entropy), padded, ALL)

    assert found[0] == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(found[1][:, :5], grad)
    assert (found[1][:, 5:] == 0).all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_all_masked_batch_is_zero_and_finite(name):
    objective = ALGORITHMS[name]
    now, entropy, experience = batch(objective, junk=math.nan)
    experience = replace(experience, weights=torch.zeros_like(now))
    loss, grad, grad_entropy = gradients(objective, now, entropy, experience, ALL)

    assert loss == 0
    assert (grad == 0).all()
    assert (grad_entropy == 0).all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_policy_that_ran_away_leaves_finite_gradients(name):
    objective = ALGORITHMS[name]
    now, entropy, experience = batch(objective, dtype=torch.float32)
    far = replace(experience, ref_logprobs=torch.full_like(now, -1.0))
    for start, end in ((-100.0, -1.0), (-1.0, -100.0)):
        moved = replace(far, old_logprobs=torch.full_like(now, start))
        loss, grad, _ = gradients(objective, torch.full_like(now, end), entropy, moved, ALL)

        assert math.isfinite(loss)
        assert grad.isfinite().all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_old_logprobs_the_ratio_is_one_and_has_a_gradient(name):
    objective = ALGORITHMS[name]
    now, entropy, experience = batch(objective, old=False)
    same = replace(experience, old_logprobs=now)

    absent = gradients(objective, now, entropy, experience, ALL)
    equal = gradients(objective, now, entropy, same, ALL)

    torch.testing.assert_close(absent, equal, rtol=1e-12, atol=1e-15)
    stats = objective.loss(TokenLogprobs(now, entropy), experience).stats
    assert stats["policy/log_ratio"][0] == 0
    assert absent[1].abs().sum() > 0


def test_grpo_against_the_sums_of_the_paper():
    objective = Objective(kl_coef=0.04)
    now, entropy, experience = batch(objective)
    rows = []
    for row, length in enumerate(LENGTHS.tolist()):
        tokens = []
        for t in range(length):
            logp, a = now[row, t], experience.advantages[row, t]
            w = math.exp(logp - experience.old_logprobs[row, t])
            d = experience.ref_logprobs[row, t] - logp
            gain = min(w * a, min(max(w, 0.8), 1.2) * a)
            tokens.append(gain - 0.04 * (math.exp(d) - d - 1))
        rows.append(sum(tokens) / length if length else 0.0)

    loss = objective.loss(TokenLogprobs(now, entropy), experience).loss

    assert loss.item() == pytest.approx(-float(sum(rows)) / 6)


def test_stats_are_sums_and_counts_of_tokens():
    objective = Objective(Normalized(), kl_coef=0.1, surrogate=Clipped(0.1, 0.1))
    now, entropy, experience = batch(objective)
    stats = objective.loss(TokenLogprobs(now, entropy), experience).stats
    mask, s = experience.completion_mask, now - experience.old_logprobs

    assert {value.shape for value in stats.values()} == {(2,)}
    assert stats[RATIO_MAX][1] == 1  # a largest number, not a sum
    assert {value[1].item() for name, value in stats.items() if name != RATIO_MAX} == {18.0}
    high = (s > math.log(1.1)) & (experience.advantages > 0) & mask
    low = (s < math.log(0.9)) & (experience.advantages < 0) & mask
    assert stats["policy/clip_high_frac"][0] == high.sum() > 0
    assert stats["policy/clip_low_frac"][0] == low.sum() > 0
    torch.testing.assert_close(stats["policy/entropy_trained"][0], entropy[mask].sum())
    assert stats["policy/kl"][0] > 0
    assert "policy/kl" not in Objective().loss(TokenLogprobs(now, entropy), experience).stats


def test_masks_and_corrections_leave_the_kl_term_alone():
    plain = Objective(kl_coef=0.1)
    masked = replace(plain, top_entropy_quantile=0.3, off_policy_mask_threshold=-9.0)
    masked = replace(masked, importance_correction=ImportanceCorrection(outside="mask", high=0.0))
    now, entropy, experience = batch(plain)
    only_kl = replace(experience, advantages=torch.zeros_like(now))
    bad = replace(experience, advantages=-torch.ones_like(now))

    torch.testing.assert_close(
        gradients(masked, now, entropy, bad, ALL)[1],
        gradients(plain, now, entropy, only_kl, ALL)[1],
    )


def test_top_entropy_share_learns_from_the_most_uncertain_tokens():
    objective = Objective(top_entropy_quantile=0.5, loss_aggregation=TokenMean())
    now, entropy, experience = batch(objective, old=False)
    mask = experience.completion_mask
    median = entropy[mask].quantile(0.5)

    _, grad, _ = gradients(objective, now, entropy, experience, ALL)

    assert torch.equal(grad != 0, mask & (entropy >= median))


def test_off_policy_limit_drops_bad_rows_that_became_unlikely():
    objective = Objective(off_policy_mask_threshold=0.5, surrogate=PolicyGradient())
    now, entropy, experience = batch(objective, old=False)
    signs = torch.tensor([-1.0, -1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    drift = torch.tensor([1.0, 0.4, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    moved = replace(
        experience,
        advantages=signs[:, None].expand(6, 5),
        sampler_logprobs=now + drift[:, None],
    )

    _, grad, _ = gradients(objective, now, entropy, moved, ALL)

    assert (grad != 0).any(1).tolist() == [False, True, True, False, True, False]


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
    experience = TrainingBatch(
        prompt_ids=torch.zeros(1, 1, dtype=torch.long),
        prompt_mask=torch.ones(1, 1, dtype=torch.bool),
        prompt_of=torch.zeros(2, dtype=torch.long),
        completion_ids=torch.zeros(2, 3, dtype=torch.long),
        completion_mask=mask,
        loss_mask=mask,
        sampler_logprobs=now,
        advantages=torch.zeros(2, 3),
        weights=objective.token_weights(mask, torch.zeros(2, dtype=torch.bool), 3),
    )

    normalizers = objective.normalizers(experience.weights, entropy)
    loss = objective.loss(TokenLogprobs(now, entropy), experience, normalizers).loss
    loss.backward()

    assert normalizers.num_tokens == 2
    assert loss.item() == -0.5 * (3 + 4) / 2
    assert entropy.grad.tolist() == [[0, -0.25, 0], [-0.25, 0, 0]]


def test_normalizers_count_the_tokens_of_all_processes():
    objective = Objective(top_entropy_quantile=0.5, entropy_coef=0.5)
    _, entropy, experience = batch(objective)
    alone = objective.normalizers(experience.weights, entropy)
    twins = objective.normalizers(experience.weights, entropy, Twins())

    assert twins.num_tokens == 2 * alone.num_tokens == 2 * 9


def with_turns(objective, junk=0.0):
    """The rows of `batch` with two tokens of an environment after the second token of each."""
    now, entropy, experience = batch(objective)

    def parted(values, said):
        between = torch.full_like(values[:, :2], said)
        return torch.cat([values[:, :2], between, values[:, 2:]], 1)

    spoken_to = (LENGTHS > 2)[:, None]
    fills = dict.fromkeys(("completion_ids", "loss_mask", "weights"), 0)
    rows = {
        name: parted(value, fills.get(name, junk)) for name, value in row_fields(experience).items()
    }
    width = torch.arange(7)
    seen = width < (LENGTHS + 2 * (LENGTHS > 2))[:, None]
    rows["completion_mask"] = seen & (spoken_to | (width < LENGTHS[:, None]))
    return parted(now, junk), parted(entropy, junk), replace(experience, **rows)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("junk", [0.0, -3.0, math.nan, math.inf])
def test_tokens_of_an_environment_change_nothing_whatever_they_hold(name, junk):
    objective = ALGORITHMS[name]
    plain = batch(objective)
    parted = with_turns(objective, junk)
    own = torch.tensor([0, 1, 4, 5, 6])

    loss, grad, grad_entropy = gradients(objective, *plain, ALL)
    found = gradients(objective, *parted, ALL)

    assert found[0] == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(found[1][:, own], grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found[2][:, own], grad_entropy, rtol=1e-12, atol=1e-15)
    assert (found[1][:, 2:4] == 0).all()
    assert (found[2][:, 2:4] == 0).all()
    stats = [
        objective.loss(TokenLogprobs(now, entropy), experience).stats
        for now, entropy, experience in (plain, parted)
    ]
    for key, value in stats[0].items():
        torch.testing.assert_close(stats[1][key], value, rtol=1e-12, atol=1e-15)


def test_weights_and_advantages_of_rows_with_turns_are_those_of_the_policys_tokens():
    objective = Objective(gamma=0.9)
    own = torch.tensor([0, 1, 4, 5, 6])
    _, _, plain = batch(objective)
    _, _, parted = with_turns(objective)
    rewards = torch.tensor([[0.0, 1.0, 2.0], [5.0, 1.0, 1.0]]).double()
    table = RewardTable({"r": rewards}, {"r": 1.0}, rewards, torch.ones(2, 3, dtype=torch.bool))
    for values in ("token_weights", "token_advantages"):
        given = (TRUNCATED, 8) if values == "token_weights" else ()
        results = []
        for experience in (plain, parted):
            first = () if given else (table,)
            results.append(getattr(objective, values)(*first, experience.loss_mask, *given))
        torch.testing.assert_close(results[1][:, own], results[0])
        assert (results[1][:, 2:4] == 0).all()


def test_needs():
    assert not Objective().needs_reference
    assert not Objective().needs_all_rows
    assert Objective(kl_coef=0.1).needs_reference
    assert Objective(kl_coef=0.1).needs_all_rows
    assert Objective(entropy_coef=0.1).needs_all_rows
    assert Objective(top_entropy_quantile=0.2).needs_entropy


@pytest.mark.parametrize("bad", [{"kl_coef": -0.1}, {"gamma": 1.1}, {"top_entropy_quantile": -1.0}])
def test_impossible_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="kl_coef"):
        Objective(**bad)


class Module:
    """Stands in for the module that holds an objective.

    Args:
        objective: what is maximized.
    """

    def __init__(self, objective: Objective = Objective()):  # noqa: B008 (frozen)
        self.objective = objective


def parsed(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Module, "model")
    return parser.instantiate(parser.parse_args(["--config", str(path)])).model.objective


def test_defaults_come_through_the_parser(tmp_path):
    assert parsed(tmp_path, "{}") == Objective()


def test_every_choice_can_be_made_in_yaml(tmp_path):
    found = parsed(
        tmp_path,
        """
model:
  objective:
    advantages:
      class_path: litgrpo.algorithms.estimators.TopShare
      init_args:
        by: shortest
        of:
          class_path: Normalized
          init_args: {scale: none}
    ratio: sequence
    surrogate:
      class_path: VESPO
      init_args: {k: [1, 2], lam: [3, 4]}
    loss_aggregation:
      class_path: Constant
      init_args: {by_limit: false}
    kl_coef: 1e-3
    kl: litgrpo.algorithms.kl.k2
    off_policy_mask_threshold: 0.5
    importance_correction: {level: sequence, outside: mask, high: null}
""",
    )

    assert found == Objective(
        TopShare(by="shortest", of=Normalized(scale="none")),
        ratio="sequence",
        surrogate=VESPO((1.0, 2.0), (3.0, 4.0)),
        loss_aggregation=SUM,
        kl_coef=1e-3,
        kl=k2,
        off_policy_mask_threshold=0.5,
        importance_correction=ImportanceCorrection("sequence", "mask", high=None),
    )


def test_short_class_names_are_enough(tmp_path):
    found = parsed(tmp_path, "model: {objective: {surrogate: SAPO, loss_aggregation: TokenMean}}")

    assert found == Objective(surrogate=SAPO(), loss_aggregation=TokenMean())


MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
UNCUT = torch.zeros(3, dtype=torch.bool)
ROWS = [
    (SequenceMean(), [[1 / 6, 1 / 6, 0], [1 / 3, 0, 0], [0, 0, 0]]),
    (TokenMean(), [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0], [0, 0, 0]]),
    (Constant(), [[1 / 12, 1 / 12, 0], [1 / 12, 0, 0], [0, 0, 0]]),
    (Constant(by_limit=False), [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0], [0, 0, 0]]),
]


@pytest.mark.parametrize(("loss_aggregation", "expected"), ROWS, ids=lambda row: str(row)[:30])
def test_weights_by_hand(loss_aggregation, expected):
    objective = Objective(loss_aggregation=loss_aggregation)

    weights = objective.token_weights(MASK, UNCUT, max_completion_length=4, dtype=torch.float64)

    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("loss_aggregation", "expected"), ROWS, ids=lambda row: str(row)[:30])
def test_two_equal_processes_halve_the_weights(loss_aggregation, expected):
    objective = Objective(loss_aggregation=loss_aggregation)

    weights = objective.token_weights(MASK, UNCUT, 4, comm=Twins())

    torch.testing.assert_close(weights, torch.tensor(expected) / 2)


def test_truncated_rows_lose_their_tokens_but_stay_in_the_number_of_rows():
    cut = torch.tensor([True, False, False])
    per_sequence = Objective(mask_truncated_completions=True).token_weights(MASK, cut, 4)
    per_token = Objective(
        mask_truncated_completions=True, loss_aggregation=TokenMean()
    ).token_weights(MASK, cut, 4)

    torch.testing.assert_close(per_sequence, torch.tensor([[0, 0, 0], [1 / 3, 0, 0], [0, 0, 0]]))
    torch.testing.assert_close(per_token, torch.tensor([[0.0, 0, 0], [1.0, 0, 0], [0, 0, 0]]))
    assert Objective().token_weights(MASK, cut, 4)[0, 0] > 0


def test_bnpo_shares_out_the_part_of_each_micro_batch():
    loss_aggregation = MicroBatchTokenMean()
    weights = Objective(loss_aggregation=loss_aggregation).token_weights(MASK, UNCUT, 4)

    # One row of three, two tokens: each counts 1/3 * 1/2.
    torch.testing.assert_close(
        loss_aggregation.within(weights[:1], MASK[:1]), torch.tensor([[1 / 6, 1 / 6, 0.0]])
    )
    # All three rows: a plain mean over three tokens.
    assert loss_aggregation.within(weights, MASK).sum().item() == pytest.approx(1.0)


def test_a_batch_without_tokens_has_no_weight():
    for loss_aggregation, _ in ROWS:
        weights = Objective(loss_aggregation=loss_aggregation).token_weights(MASK & False, UNCUT, 4)
        assert (weights == 0).all()


@pytest.mark.parametrize(("loss_aggregation", "expected"), ROWS, ids=lambda row: str(row)[:30])
def test_tokens_of_an_environment_have_no_weight_and_are_in_no_denominator(
    loss_aggregation, expected
):
    # The same three rows with two tokens of an environment after the first column.
    said = torch.zeros(3, 2, dtype=torch.bool)
    mask = torch.cat([MASK[:, :1], said, MASK[:, 1:]], 1)
    expected = torch.tensor(expected, dtype=torch.float64)

    weights = Objective(loss_aggregation=loss_aggregation).token_weights(
        mask, UNCUT, 4, dtype=torch.float64
    )

    torch.testing.assert_close(
        weights, torch.cat([expected[:, :1], said.double(), expected[:, 1:]], 1)
    )
