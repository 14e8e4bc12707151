"""Tokens that a surrogate selects among all of an optimizer step: Clip-Cov, KL-Cov, M2PO."""

import math
from dataclasses import replace

import pytest
import torch

from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.surrogates import (
    DPPO,
    M2PO,
    ClipCov,
    Clipped,
    KLCov,
    PolicyGradient,
    Surrogate,
)
from litgrpo.algorithms.token_selection import smallest, token_keys
from litgrpo.distributed.collectives import SingleProcess
from litgrpo.types import TokenLogprobs, TokenRows, TrainingBatch
from tests.support.by_hand import batch_of, change_columns
from tests.support.comms import in_turns

ALONE = SingleProcess()
NAN = math.nan


def batch(num_rows=12, width=9, prompts=4, seed=0):
    """Random completions of prompts of unequal lengths; log-probabilities of the policy."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) < torch.randint(2, width, (num_rows, 1), generator=generator)
    prompt_mask = torch.arange(3) >= torch.arange(prompts)[:, None] % 3
    of = torch.arange(prompts).repeat_interleave(num_rows // prompts)

    def normal(scale):
        return (torch.randn(num_rows, width, generator=generator) * scale).masked_fill(~mask, NAN)

    now = -normal(1.5).abs()
    ids = torch.randint(0, 50, (num_rows, width), generator=generator)
    advantages = torch.randn(num_rows, 1, generator=generator).expand(num_rows, width)
    rows = TrainingBatch(
        TokenRows(
            prompt_ids=torch.arange(prompts)[:, None].expand(prompts, 3).contiguous(),
            prompt_mask=prompt_mask,
            prompt_of=of,
            completion_ids=ids,
            completion_mask=mask,
        ),
        loss_mask=mask,
        sampler_logprobs=now + normal(0.4),
        advantages=advantages.masked_fill(~mask, NAN),
        loss_weights=mask / mask.sum(),
        old_logprobs=now + normal(0.3),
    )
    return TokenLogprobs(now, torch.zeros_like(now)), rows


SURROGATES = {
    "clip_cov": ClipCov(frac=0.1, min_cov=0.2, max_cov=3.0),
    "kl_cov": KLCov(frac=0.1),
    "m2po": M2PO(max_second_moment=0.03),
    "m2po, clipped": M2PO(max_second_moment=0.03, surrogate=Clipped()),
}


def selection(surrogate: Surrogate, new, rows, comm=ALONE) -> torch.Tensor:
    selected = Objective(surrogate=surrogate).prepare_step(rows, new, comm).selected
    assert selected is not None
    return selected


# --- by hand, and against loops from the papers and their authors' code ---


def tokens(logprobs, advantages, old=None):
    """Rows of one token each."""
    now = torch.tensor(logprobs)[:, None]
    mask = torch.ones_like(now, dtype=torch.bool)
    rows = batch_of(
        mask,
        completion_ids=torch.arange(len(now))[:, None],
        sampler_logprobs=now,
        advantages=torch.tensor(advantages)[:, None],
        loss_weights=torch.full_like(now, 1 / len(now)),
        old_logprobs=None if old is None else torch.tensor(old)[:, None],
    )
    return TokenLogprobs(now, torch.zeros_like(now)), rows


def test_kl_cov_takes_the_token_of_largest_covariance_by_hand():
    # Means: l -2, A 0. Terms: 1 * 1, 1 * -1, -2 * 2, 0 * -2 -> the first is the largest.
    new, rows = tokens([-1.0, -1.0, -4.0, -2.0], [1.0, -1.0, 2.0, -2.0], old=[-1.5, -1, -4, -2])
    surrogate = KLCov(frac=0.25, coef=2.0, surrogate=PolicyGradient())

    assert selection(surrogate, new, rows).flatten().tolist() == [True, False, False, False]
    # Sum of -A l is 1 - 1 + 8 - 4; the penalty is 2 * |-1 + 1.5|.
    loss = Objective(surrogate=surrogate).loss(new, rows).loss
    assert loss.item() == pytest.approx((4 + 1) / 4)


def test_the_penalty_of_kl_cov_has_no_gradient_from_rounding():
    new, rows = tokens([-1.0, -1.0, -4.0], [1.0, -1.0, 2.0], old=[-1.00001, -0.99999, -4.00001])
    now = new.logprobs.requires_grad_()
    surrogate = KLCov(frac=1.0, coef=9.0, surrogate=PolicyGradient())

    Objective(surrogate=surrogate).loss(TokenLogprobs(now, new.entropy), rows).loss.backward()

    torch.testing.assert_close(now.grad, -rows.advantages / 3)


def test_clip_cov_drops_only_tokens_between_the_limits_by_hand():
    # The terms are 1, -1, -4 and 0, as above.
    new, rows = tokens([-1.0, -1.0, -4.0, -2.0], [1.0, -1.0, 2.0, -2.0])
    surrogate = ClipCov(frac=1.0, min_cov=-2.0, max_cov=0.5, surrogate=PolicyGradient())

    assert selection(surrogate, new, rows).flatten().tolist() == [False, True, False, True]
    # Without the second and the fourth, the sum of -A l is 1 + 8.
    assert Objective(surrogate=surrogate).loss(new, rows).loss.item() == pytest.approx(9 / 4)


def test_m2po_drops_the_largest_until_the_mean_is_below_the_limit_by_hand():
    # s: 0.3, 0.5, -0.1, -0.9, 0.7; the last has a negative advantage and rose: no clip affects it.
    # s^2: 0.09, 0.25, 0.01, 0.81: means of the smallest 0.01, 0.05, 0.117, 0.29.
    new, rows = tokens([-1.0] * 5, [1.0, 1.0, -1.0, -1.0, -1.0], old=[-1.3, -1.5, -0.9, -0.1, -1.7])

    def drop(limit):
        return selection(M2PO(max_second_moment=limit), new, rows).flatten().tolist()

    assert drop(0.3) == [False] * 5
    assert drop(0.12) == [False, False, False, True, False]
    assert drop(0.06) == [False, True, False, True, False]
    assert drop(0.0) == [True, True, True, True, False]


@pytest.mark.parametrize("rounding", [1e-7, -1e-7, 9e-5])
def test_m2po_counts_no_token_that_moved_by_rounding(rounding):
    # s^2: 0.09 and 0.25 of the tokens that moved, whose mean is 0.17; with zeros it would be 0.068.
    old = [-1.3, -1.5, *[-1.0 - rounding] * 3]
    new, rows = tokens([-1.0] * 5, [1.0] * 5, old=old)

    dropped = selection(M2PO(max_second_moment=0.1), new, rows).flatten().tolist()
    assert dropped == [False, True, False, False, False]
    assert not selection(M2PO(max_second_moment=0.2), new, rows).any()
    only_rounding = replace(rows, old_logprobs=new.logprobs - rounding)
    assert not selection(M2PO(max_second_moment=0.0), new, only_rounding).any()


def reference_selection(name, new, rows):
    """Selected tokens as {(row, column)}, by loops."""
    real = list(map(tuple, rows.loss_mask.nonzero().tolist()))
    l_mean = sum(new.logprobs[i].item() for i in real) / len(real)
    a_mean = sum(rows.advantages[i].item() for i in real) / len(real)
    cov = {
        i: (new.logprobs[i] - l_mean).item() * (rows.advantages[i] - a_mean).item() for i in real
    }
    s = {i: (new.logprobs[i] - rows.old_logprobs[i]).item() for i in real}
    if name == "kl_cov":
        return set(sorted(real, key=cov.get)[-max(1, int(0.1 * len(real))) :])
    if name == "clip_cov":  # all eligible tokens, of which a few are drawn
        return {i for i in real if 0.2 < cov[i] < 3.0}
    left = sorted((i for i in real if s[i] * rows.advantages[i] > 0), key=lambda i: s[i] ** 2)
    dropped = set()
    while left and sum(s[i] ** 2 for i in left) / len(left) > 0.03:
        dropped.add(left.pop())
    return dropped


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "m2po"])
def test_a_selection_against_loops(name, seed):
    new, rows = batch(seed=seed)
    expected = reference_selection(name, new, rows)
    found = set(map(tuple, selection(SURROGATES[name], new, rows).nonzero().tolist()))

    if name == "clip_cov":
        assert found < expected
        assert len(found) == int(0.1 * rows.loss_mask.sum())
    else:
        assert found == expected
    assert found


def test_clip_cov_does_not_select_tokens_that_the_surrogate_clips():
    new, rows = batch()
    every = ClipCov(frac=1.0, min_cov=-9.0, max_cov=9.0, surrogate=Clipped(0.1, 0.1))
    low, high = Clipped(0.1, 0.1).find_clipped(Objective()._inputs(new, rows))

    assert (low | high).any()
    assert torch.equal(selection(every, new, rows), rows.loss_mask & ~(low | high))


# --- invariants ---


@pytest.mark.parametrize("name", SURROGATES)
def test_a_selection_does_not_depend_on_the_order_of_rows_or_on_padding(name):
    new, rows = batch()
    expected = selection(SURROGATES[name], new, rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))

    moved = rows.select(order)
    permuted = TokenLogprobs(new.logprobs[order], new.entropy[order])
    width = moved.loss_mask.shape[1]
    permuted = TokenLogprobs(permuted.logprobs[:, :width], permuted.entropy[:, :width])
    assert torch.equal(selection(SURROGATES[name], permuted, moved), expected[order, :width])

    def wider(values):
        return torch.nn.functional.pad(values, (0, 3), value=7)

    def pad(name, values):
        padded = wider(values)
        if name in ("completion_mask", "loss_mask", "loss_weights"):
            padded[:, -3:] = 0
        return padded

    more = change_columns(rows, pad)
    tokens = replace(
        more.tokens,
        prompt_ids=torch.nn.functional.pad(rows.tokens.prompt_ids, (2, 0), value=9),
        prompt_mask=torch.nn.functional.pad(rows.tokens.prompt_mask, (2, 0)),
    )
    more = replace(more, tokens=tokens)
    found = selection(
        SURROGATES[name], TokenLogprobs(wider(new.logprobs), wider(new.entropy)), more
    )
    assert torch.equal(found[:, :-3], expected)
    assert not found[:, -3:].any()


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("first", [3, 6])
def test_two_processes_select_what_one_does(name, first):
    new, rows = batch()
    expected = selection(SURROGATES[name], new, rows)
    parts = torch.arange(len(rows)).split([first, len(rows) - first])

    def process(part):
        own = rows.select(part)
        width = own.loss_mask.shape[1]
        given = TokenLogprobs(new.logprobs[part, :width], new.entropy[part, :width])
        return lambda comm: selection(SURROGATES[name], given, own, comm)

    for part, found in zip(parts, in_turns(*map(process, parts)), strict=True):
        assert torch.equal(found, expected[part, : found.shape[1]])
    assert expected.any()


def test_equal_values_are_chosen_by_their_keys_up_to_the_number():
    values = torch.tensor([[1.0, 0.0, 1.0], [NAN, 1.0, 1.0]])
    keys = torch.tensor([[0.4, 0.9, 0.2], [0.0, 0.3, 0.1]])

    def chosen(number):
        return smallest(values, number, keys, ALONE).long().tolist()

    assert chosen(1) == [[0, 1, 0], [0, 0, 0]]
    assert chosen(3) == [[0, 1, 1], [0, 0, 1]]
    assert chosen(99) == [[1, 1, 1], [0, 1, 1]]
    assert not smallest(torch.full((1, 2), NAN), 1, keys[:1, :2], ALONE).any()


def test_keys_are_uniform_and_differ_by_prompt_prefix_and_position():
    _, rows = batch(num_rows=400, width=50, prompts=4)
    keys, tokens = token_keys(rows.tokens)[rows.loss_mask], rows.tokens

    prefixes = {
        (int(tokens.prompt_of[n]), *tokens.completion_ids[n, : t + 1].tolist())
        for n, t in rows.loss_mask.nonzero().tolist()
    }
    assert keys.unique().numel() == pytest.approx(len(prefixes), abs=20)  # keys have 24 bits
    assert keys.mean() == pytest.approx(0.5, abs=0.02)
    assert keys.square().mean() == pytest.approx(1 / 3, abs=0.02)
    same = replace(
        tokens,
        completion_ids=torch.full_like(tokens.completion_ids, 5),
        completion_mask=torch.ones_like(tokens.completion_mask),
    )
    assert len(token_keys(same).unique()) == 4 * 50


def test_a_key_does_not_depend_on_where_the_completion_begins():
    _, rows = batch(num_rows=4, prompts=4)
    tokens = rows.tokens
    expected = token_keys(tokens)

    # The first two completion tokens become the end of the prompt.
    later = replace(
        tokens,
        prompt_ids=torch.cat([tokens.prompt_ids, tokens.completion_ids[:, :2]], 1),
        prompt_mask=torch.cat([tokens.prompt_mask, tokens.completion_mask[:, :2]], 1),
        **{name: value[:, 2:] for name, value in tokens.row_fields().items()},
    )

    mask = later.completion_mask
    assert torch.equal(token_keys(later)[mask], expected[:, 2:][mask])


def test_the_loss_needs_the_selection_of_the_whole_step():
    objective = Objective(surrogate=KLCov(frac=0.1))
    new, rows = batch()
    now = torch.where(rows.loss_mask, new.logprobs, 0.0).requires_grad_()
    step = objective.prepare_step(rows, new)

    whole = objective.loss(TokenLogprobs(now, new.entropy), rows).loss
    expected = torch.autograd.grad(whole, now)[0]
    total = torch.zeros(())
    for part in torch.arange(len(rows)).split(5):
        micro = step.select(part)
        width = micro.loss_mask.shape[1]
        given = TokenLogprobs(now[part, :width], new.entropy[part, :width])
        total = total + objective.loss(given, micro).loss
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(torch.autograd.grad(total, now)[0], expected)


# --- settings ---


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: ClipCov(frac=0.0), "frac"),
        (lambda: ClipCov(min_cov=5.0, max_cov=5.0), "min_cov"),
        (lambda: KLCov(frac=1.5), "frac"),
        (lambda: KLCov(coef=-1.0), "coef"),
        (lambda: M2PO(max_second_moment=-0.1), "max_second_moment"),
        (lambda: M2PO(surrogate=KLCov()), "surrogate of M2PO is KLCov"),
        (
            lambda: Objective(importance_sampling_level="sequence", surrogate=M2PO(0.1, DPPO())),
            "importance_sampling_level",
        ),
    ],
)
def test_a_bad_value_names_the_setting(build, names):
    with pytest.raises(ValueError, match=names):
        build()
