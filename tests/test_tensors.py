"""Masked arithmetic and log-probabilities: by hand, from plain formulas, against TRL."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from litgrpo.tensors import (
    apply_softcap,
    compact_rows,
    head_chunk,
    length_buckets,
    positions,
    predicting,
    query_scale,
    row_mean,
    safe_exp,
    token_logprobs,
    widen,
    within,
)
from tests.oracle.reference import ARRAYS, CASES


def test_narrow_floats_are_widened_and_wide_ones_stay():
    for narrow in (torch.float16, torch.bfloat16, torch.float32):
        assert widen(torch.ones(1, dtype=narrow)).dtype == torch.float32
    assert widen(torch.ones(1, dtype=torch.float64)).dtype == torch.float64


def test_the_exponential_is_itself_up_to_the_limit_and_its_tangent_beyond():
    x = torch.tensor([-1.0, 0.0, 2.0, 3.0, 4.5], dtype=torch.float64, requires_grad=True)
    values = safe_exp(x, limit=3.0)
    values.sum().backward()
    e = math.e
    assert values.tolist() == pytest.approx([1 / e, 1, e**2, e**3, 2.5 * e**3])
    assert x.grad.tolist() == pytest.approx([1 / e, 1, e**2, e**3, e**3])


def test_the_exponential_of_anything_is_finite_and_so_is_its_gradient():
    x = torch.tensor([-1e30, 1e3, 1e20], requires_grad=True)
    values = safe_exp(x)
    values.sum().backward()
    assert values.isfinite().all()
    assert x.grad.isfinite().all()
    assert x.grad[2] > 0


def test_a_row_mean_counts_marked_values_only_and_is_zero_without_any():
    values = torch.tensor([[1.0, 5.0, 9.0], [4.0, 4.0, 4.0]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert row_mean(values, mask).tolist() == [[3.0], [0.0]]


def test_positions_count_real_tokens_from_zero():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0]]).bool()
    assert positions(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 1, 1]]


def test_the_token_before_each_target_predicts_it():
    hidden = torch.arange(8.0).view(2, 4, 1)
    targets = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]]).bool()
    assert predicting(hidden, targets).flatten().tolist() == [1, 2, 4, 6]


def test_log_probabilities_and_entropy_by_hand():
    # Logits log 1, log 2, log 5 are probabilities 1/8, 2/8, 5/8.
    hidden = torch.tensor([[1.0, 2.0, 5.0]]).log().repeat(2, 1)
    logprobs, entropy = token_logprobs(hidden, torch.tensor([2, 0]), lambda hidden: hidden)
    expected = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    assert logprobs.tolist() == pytest.approx([math.log(5 / 8), math.log(1 / 8)])
    assert entropy.tolist() == pytest.approx([expected, expected])


def test_temperature_divides_the_logits():
    hidden = torch.tensor([[0.0, math.log(3.0)]])
    targets = torch.tensor([1])
    hot, _ = token_logprobs(hidden, targets, lambda hidden: hidden, temperature=2.0)
    cold, _ = token_logprobs(hidden, targets, lambda hidden: hidden, temperature=0.5)
    assert hot.exp().item() == pytest.approx(3**0.5 / (1 + 3**0.5))
    assert cold.exp().item() == pytest.approx(9 / 10)


def test_entropy_is_not_rounded_under_autocast():
    hidden = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)) * 4
    given = hidden, torch.zeros(4, dtype=torch.long), lambda hidden: hidden
    expected = token_logprobs(*given)[1]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(token_logprobs(*given)[1], expected)


def test_equal_logits_have_the_entropy_of_the_vocabulary():
    _, entropy = token_logprobs(torch.zeros(3, 7), torch.tensor([0, 1, 2]), lambda hidden: hidden)
    assert entropy.tolist() == pytest.approx([math.log(7)] * 3)


def test_an_impossible_token_spoils_nothing_in_log_space():
    hidden = torch.tensor([[0.0, -1e4]])
    logprobs, entropy = token_logprobs(hidden, torch.tensor([1]), lambda hidden: hidden)
    assert (logprobs.item(), entropy.item()) == (-1e4, 0.0)


def soft_capped(weight):
    return lambda hidden: 5.0 * torch.tanh(hidden @ weight.T / 5.0)


def plain(hidden, targets, head, temperature):
    """All logits at once, by torch's own functions."""
    logprobs = (head(hidden) / temperature).log_softmax(-1)
    entropy = torch.distributions.Categorical(logits=logprobs).entropy()
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("chunk_size", [1, 3, 10, 11, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_change_neither_values_nor_gradients(chunk_size, temperature):
    torch.manual_seed(0)
    targets, results = torch.randint(0, 13, (10,)), []
    start, up = torch.randn(10, 4, dtype=torch.float64), torch.randn(2, 10, dtype=torch.float64)
    matrix = torch.randn(13, 4, dtype=torch.float64)
    for chunked in (True, False):
        hidden, weight = start.clone().requires_grad_(), matrix.clone().requires_grad_()
        if chunked:
            options = dict(temperature=temperature, chunk_size=chunk_size, entropy_grad=True)
            pair = token_logprobs(hidden, targets, soft_capped(weight), **options)
        else:
            pair = plain(hidden, targets, soft_capped(weight), temperature)
        (torch.stack(pair) * up).sum().backward()
        results.append([*pair, hidden.grad, weight.grad])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def test_the_entropy_has_a_gradient_only_when_asked():
    for asked in (True, False):
        hidden = torch.randn(5, 3, requires_grad=True)
        options = dict(entropy_grad=asked, chunk_size=2)
        _, entropy = token_logprobs(hidden, torch.zeros(5).long(), lambda x: 2 * x, **options)
        assert entropy.requires_grad == asked


def test_without_gradient_nothing_is_kept_for_a_backward_pass():
    weight = torch.randn(7, 4, requires_grad=True)
    with torch.no_grad():
        logprobs, entropy = token_logprobs(
            torch.randn(5, 4), torch.zeros(5).long(), soft_capped(weight), entropy_grad=True
        )
    assert not logprobs.requires_grad
    assert not entropy.requires_grad


def test_half_precision_logits_give_float32_log_probabilities():
    hidden = torch.randn(4, 6).bfloat16()
    logprobs, entropy = token_logprobs(hidden, torch.zeros(4).long(), lambda hidden: hidden)
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(logprobs, hidden.float().log_softmax(-1)[:, 0])


@pytest.mark.parametrize("chunk_size", [3, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_of_lower_precision_get_the_gradient_of_the_wide_ones_rounded(dtype, chunk_size):
    torch.manual_seed(0)
    start, targets, up = torch.randn(10, 13), torch.randint(0, 13, (10,)), torch.randn(10)
    results = []
    for head in (torch.clone, lambda x: x.float()):  # converted within, or before
        hidden = start.to(dtype).requires_grad_()
        logprobs, entropy = token_logprobs(hidden, targets, head, chunk_size=chunk_size)
        (logprobs * up).sum().backward()
        assert hidden.grad.dtype == dtype
        results.append([logprobs, entropy, hidden.grad])
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_in_the_backward_pass_no_entropy_is_computed():
    class Products(TorchDispatchMode):
        """Counts the products of an entropy."""

        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten.bmm.default
            return func(*args, **(kwargs or {}))

    hidden, targets = torch.randn(10, 13, requires_grad=True), torch.zeros(10).long()
    with Products() as forward:
        logprobs, _ = token_logprobs(hidden, targets, torch.clone, chunk_size=4)
    with Products() as backward:
        logprobs.sum().backward()
    assert (forward.count, backward.count) == (3, 0)


LENGTHS = torch.tensor([3, 9, 1, 9, 4, 4, 30, 0, 2])


@pytest.mark.parametrize("max_rows", [None, 1, 2, 4, 100])
@pytest.mark.parametrize("max_tokens", [None, 1, 8, 18, 30, 1000])
def test_buckets_hold_every_row_once_and_keep_the_limits(max_rows, max_tokens):
    buckets = length_buckets(LENGTHS, max_rows=max_rows, max_tokens=max_tokens)
    assert sorted(torch.cat(buckets).tolist()) == list(range(len(LENGTHS)))
    for rows in buckets:
        padded = len(rows) * int(LENGTHS[rows].max())
        assert len(rows) <= (max_rows or len(LENGTHS))
        assert max_tokens is None or padded <= max_tokens or len(rows) == 1


def test_without_limits_there_is_one_bucket_and_it_starts_with_the_longest_row():
    (rows,) = length_buckets(LENGTHS)
    assert LENGTHS[rows].tolist() == [30, 9, 9, 4, 4, 3, 2, 1, 0]
    assert length_buckets(torch.tensor([], dtype=torch.long)) == []


def test_rows_of_equal_length_keep_their_order():
    assert torch.cat(length_buckets(torch.full((6,), 5), max_rows=4)).tolist() == list(range(6))


def test_few_logits_are_one_chunk_and_many_are_cut():
    assert head_chunk(8192, 8192) == 8192
    assert head_chunk(8192, 256_000) == 131
    assert head_chunk(0, 10) == head_chunk(2, 2**40) == 1


def name_of(case) -> str:
    cap = case["final_logit_softcapping"]
    parts = ["bias"] * case["bias"] + ["entropy"] * case["entropy_grad"]
    return "-".join([f"t{case['temperature']}", f"cap{cap}", *parts])


@pytest.mark.parametrize("chunk_size", [4, 1024])
@pytest.mark.parametrize("case", CASES["head"]["cases"], ids=name_of)
def test_heads_equal_those_of_trl(case, chunk_size):
    # Copies: the arrays are shared by all cases, and gradients are accumulated in the tensors.
    given = {name: torch.from_numpy(ARRAYS[f"C/{name}"].copy()) for name in HEAD_INPUTS}
    names = ("logp", "entropy", "grad_hidden", "grad_weight")
    expected = {name: ARRAYS[case[name]] for name in names}
    hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()

    def head(hidden):
        logits = hidden @ weight.T + case["bias"] * given["bias"]
        cap = case["final_logit_softcapping"]
        return logits if cap is None else cap * torch.tanh(logits / cap)

    logprobs, entropy = token_logprobs(
        hidden,
        given["targets"],
        head,
        temperature=case["temperature"],
        chunk_size=chunk_size,
        entropy_grad=case["entropy_grad"],
    )
    value = (given["up_logp"] * logprobs).sum()
    if case["entropy_grad"]:
        value = value + (given["up_entropy"] * entropy).sum()
    value.backward()
    computed = dict(zip(expected, (logprobs, entropy, hidden.grad, weight.grad), strict=True))
    for name, values in expected.items():
        # TRL's arrays are float32, these are computed in float64.
        np.testing.assert_allclose(
            computed[name].detach(), values, rtol=1e-5, atol=1e-6, err_msg=name
        )


HEAD_INPUTS = ("hidden", "weight", "bias", "targets", "up_logp", "up_entropy")


def test_logprobs_over_a_support_are_those_of_the_renormalized_distribution():
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]).log().requires_grad_()
    candidate_ids = torch.tensor([[3, 1, -1], [0, 1, 2]], dtype=torch.int32)
    targets = torch.tensor([1, 0])
    for chunk_size in (1, 2):
        logprobs, entropy = token_logprobs(
            logits,
            targets,
            torch.clone,
            candidate_ids=candidate_ids,
            chunk_size=chunk_size,
            entropy_grad=True,
        )
        probs = [[0.2 / 0.6, 0.4 / 0.6], [0.4 / 0.9, 0.3 / 0.9, 0.2 / 0.9]]
        assert logprobs.exp().tolist() == pytest.approx([probs[0][0], probs[1][0]])
        expected = [-sum(p * math.log(p) for p in row) for row in probs]
        assert entropy.tolist() == pytest.approx(expected)
        logits.grad = None
        (logprobs.sum() + entropy.sum()).backward()
        assert logits.grad.isfinite().all()
        # A score has mean 0 over the set that it is normalized over, and does not see the others.
        assert logits.grad[0, [0, 2]].tolist() == [0, 0]
        assert logits.grad.sum(1).tolist() == pytest.approx([0, 0], abs=1e-6)


@st.composite
def candidate_sets(draw):
    """Logits [k, V], candidates [k, S] with -1 behind them, and a target among the candidates."""
    size = draw(st.integers(2, 6))
    number = st.floats(-30, 30, width=32)
    logits, candidates, targets = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        logits.append(draw(st.lists(number, min_size=size, max_size=size)))
        ids = draw(st.permutations(range(size)))[: draw(st.integers(1, size))]
        candidates.append(ids + [-1] * (size - len(ids)))
        targets.append(draw(st.sampled_from(ids)))
    return torch.tensor(logits).double(), torch.tensor(candidates), torch.tensor(targets)


@given(candidate_sets(), st.sampled_from([1e-3, 1.0, 3.0, 65536.0]), st.sampled_from([1, 100]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_candidate_set_is_a_distribution_over_its_tokens_at_any_scale_of_the_loss(
    dtype, case, scale, chunk_size
):
    logits, candidates, targets = case
    wanted = torch.zeros_like(logits)
    expected = []
    for row, (ids, target) in enumerate(zip(candidates, targets, strict=True)):
        own = ids[ids >= 0]
        alone = logits[row, own].clone().requires_grad_()
        logprob = alone.log_softmax(0)
        pair = torch.stack([logprob[own == target][0], -(logprob.exp() * logprob).sum()])
        (scale * pair.sum()).backward()
        wanted[row, own] = alone.grad
        expected.append(pair.detach())

    hidden = logits.to(dtype).requires_grad_()
    found = torch.stack(
        token_logprobs(
            hidden,
            targets,
            torch.clone,
            candidate_ids=candidates.int(),
            chunk_size=chunk_size,
            entropy_grad=True,
        )
    )
    (scale * found.sum()).backward()

    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    torch.testing.assert_close(found.T.double(), torch.stack(expected), **tolerance)
    torch.testing.assert_close(hidden.grad.double() / scale, wanted / scale, **tolerance)


@pytest.mark.parametrize("candidate_ids", [None, torch.tensor([[0, 1]] * 5)])
def test_an_entropy_without_gradient_has_none_over_candidates(candidate_ids):
    hidden = torch.randn(5, 3, requires_grad=True)
    logprobs, entropy = token_logprobs(
        hidden, torch.zeros(5).long(), torch.clone, candidate_ids=candidate_ids
    )
    assert logprobs.requires_grad
    assert not entropy.requires_grad


@pytest.mark.parametrize(("chunk_size", "calls"), [(5, 1), (100, 1), (4, 4)])
def test_the_logits_of_a_single_chunk_are_computed_once(chunk_size, calls):
    hidden, computed = torch.randn(5, 3, requires_grad=True), []

    def head(part):
        computed.append(len(part))
        return part * 2

    logprobs, _ = token_logprobs(hidden, torch.zeros(5).long(), head, chunk_size=chunk_size)
    logprobs.sum().backward()
    assert len(computed) == calls


def test_a_token_attends_to_itself_and_to_those_before_it_in_the_window():
    back = torch.tensor([-1, 0, 1, 2, 3])
    assert within(back, None).tolist() == [False, True, True, True, True]
    assert within(back, 2).tolist() == [False, True, True, False, False]


def test_the_last_active_rows_fill_the_places_of_ended_ones():
    active = torch.tensor([True, False, True, True, False, True])
    assert compact_rows(active, 4).tolist() == [0, 5, 2, 3]


def test_a_soft_cap_bounds_scores_and_none_leaves_them_alone():
    query, keys = torch.tensor([[3.0, -40.0]]), torch.tensor([[2.0, 1.0], [1.0, 0.0]])
    for cap in (None, 5.0):
        scores = apply_softcap((query * query_scale(0.5, cap)) @ keys.T, cap)
        plain = query @ keys.T * 0.5
        expected = plain if cap is None else cap * torch.tanh(plain / cap)
        torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize("with_candidates", [False, True])
def test_score_norms_are_those_of_the_gradient_by_the_logits(with_candidates):
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 8, generator=random, dtype=torch.float64)
    weight = torch.randn(8, 11, generator=random, dtype=torch.float64)
    targets = torch.tensor([0, 3, 10, 3, 7])
    candidates = None
    if with_candidates:
        others = torch.tensor([[1, 2], [4, -1], [9, 8], [5, -1], [-1, -1]])
        candidates = torch.cat([targets[:, None], others], 1)
    expected = []
    for row, target in enumerate(targets):
        logits = (hidden[row] @ weight / 0.7).requires_grad_()
        kept = logits if candidates is None else logits[candidates[row][candidates[row] >= 0]]
        (logits[target] - kept.logsumexp(0)).backward()
        expected.append(logits.grad.square().sum())
    for chunk_size in (2, 5):
        found = token_logprobs(
            hidden,
            targets,
            lambda x: x @ weight,
            candidate_ids=candidates,
            temperature=0.7,
            chunk_size=chunk_size,
            score_norms=True,
        )
        torch.testing.assert_close(found[2], torch.stack(expected))
