import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from litgrpo.rollout.sampling import LARGE, Sampling, draw_tokens, draw_uniforms
from tests.support.filter_reference import filter_logits
from tests.support.raises import raises_for

PROBS = torch.tensor([[0.1, 0.4, 0.3, 0.2]])


def drawn(uniform, sampling=None):
    uniforms = torch.tensor([uniform], dtype=torch.float64)
    return draw_tokens(PROBS.log(), uniforms, sampling or Sampling())


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.05, 0), (0.11, 1), (0.49, 1), (0.51, 2), (0.79, 2), (1, 3)]
)
def test_the_first_token_whose_cumulative_probability_exceeds_u_is_drawn(uniform, token):
    tokens, logprobs, _ = drawn(uniform)
    assert tokens.item() == token
    torch.testing.assert_close(logprobs, PROBS[:, token].log())


def test_greedy_takes_the_most_likely_token_whatever_u():
    assert drawn(0.99, Sampling(temperature=0))[0].item() == 1


def test_temperature_divides_the_logits():
    # Squared probabilities, renormalized: .01 .16 .09 .04 of .30.
    expected = torch.tensor([[0.01, 0.16, 0.09, 0.04]]) / 0.30
    got = filter_logits(PROBS.log(), Sampling(temperature=0.5)).softmax(-1)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), [1, 2]),
        (Sampling(top_p=0.39), [1]),
        (Sampling(top_p=0.41), [1, 2]),  # the token that crosses is kept
        (Sampling(min_p=0.5), [1, 2, 3]),
        (Sampling(top_k=3, top_p=0.5), [1, 2]),  # .4/.9 < .5, so the second crosses
        (Sampling(top_k=99), [0, 1, 2, 3]),
    ],
)
def test_filters_keep_the_tokens_worked_out_by_hand(sampling, kept):
    logits = PROBS.log() + 1e-6 * torch.tensor([0.0, 0.0, 0.0, 1.0])
    assert (
        filter_logits(logits, sampling).isfinite().squeeze(0).nonzero().squeeze(1).tolist() == kept
    )
    candidate_ids = draw_tokens(logits, torch.zeros(1, dtype=torch.float64), sampling).candidate_ids
    assert sorted(candidate_ids.squeeze(0).tolist()) == kept


@pytest.mark.parametrize("static_shapes", [False, True])
def test_a_number_just_below_one_never_draws_an_impossible_token(static_shapes):
    logits = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]])
    for uniform in (1.0, 1 - 2.0**-53):
        uniforms = torch.tensor([uniform], dtype=torch.float64)
        found = draw_tokens(logits, uniforms, Sampling(), static_shapes=static_shapes)
        assert found.tokens.item() == 1


@given(
    st.lists(st.integers(-6, 6), min_size=2, max_size=9),
    st.integers(0, 10),
    st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.99, 1.0]),
    st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.99]),
    st.booleans(),
)
def test_filters_keep_the_tokens_of_their_definitions(logits, top_k, top_p, min_p, static_shapes):
    # Scores differ by their position: any of those that tie for the last place may be kept.
    scores = torch.tensor([[number + place / 16 for place, number in enumerate(logits)]])
    kept = sorted(range(len(logits)), key=lambda token: -scores[0, token])
    if top_k:
        kept = kept[:top_k]
    weight = {token: math.exp(float(scores[0, token])) for token in kept}
    more_likely, total, nucleus = 0.0, sum(weight.values()), []
    for token in kept:
        if more_likely / total < top_p - 1e-6:
            nucleus.append(token)
        more_likely += weight[token]
    expected = [each for each in nucleus if weight[each] >= min_p * weight[nucleus[0]]]

    sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
    uniforms = torch.zeros(1, dtype=torch.float64)
    found = draw_tokens(scores, uniforms, sampling, static_shapes=static_shapes)
    candidates = range(len(logits)) if found.candidate_ids is None else found.candidate_ids[0]
    assert sorted(int(each) for each in candidates if each >= 0) == sorted(expected)
    assert found.tokens.item() == min(expected)


static_or_not = pytest.mark.parametrize("static_shapes", [False, True], ids=["free", "static"])


@static_or_not
@pytest.mark.parametrize("size", [50, 700, 5000])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=30),
        Sampling(top_p=0.9),  # of flat distributions this keeps most of the vocabulary
        Sampling(temperature=0.3, top_p=0.5),
        Sampling(min_p=0.01),
        Sampling(temperature=0.7, top_k=60, top_p=0.8, min_p=0.02),
        Sampling(temperature=2.0),
    ],
)
def test_draws_equal_those_from_the_whole_filtered_vocabulary(sampling, size, static_shapes):
    logits = torch.randn(20, size, generator=torch.Generator().manual_seed(size)) * 2
    logits[0] = torch.linspace(-61, -60, size)  # but for one token, which is sure
    logits[0, size // 2] = 60.0
    uniforms = draw_uniforms(0, "train", 0, torch.arange(1), 1, 20)[0]
    tokens, logprobs, candidate_ids = draw_tokens(
        logits, uniforms, sampling, static_shapes=static_shapes
    )
    scores = logits.double() / sampling.temperature
    kept = torch.ones_like(scores, dtype=torch.bool)
    if candidate_ids is not None:
        ids = candidate_ids.long()
        kept = torch.zeros_like(kept).scatter_add(1, ids.clamp(min=0), ids >= 0)
    for shift, agrees in ((-1e-5, torch.ge), (1e-5, torch.le)):  # but for tokens at the very bound
        bounds = {"top_p": min(1, sampling.top_p + shift), "min_p": sampling.min_p * (1 - shift)}
        assert agrees(
            kept, filter_logits(logits.double(), replace(sampling, **bounds)).isfinite()
        ).all()
    plain = scores.masked_fill(~kept, -torch.inf)
    cumulative = plain.softmax(-1).cumsum(-1)
    expected = (cumulative > uniforms[:, None] * cumulative[:, -1:]).long().argmax(-1)
    assert torch.equal(tokens, expected)
    exact = plain.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), exact, atol=2e-6, rtol=1e-6)


def test_filtered_tokens_are_never_drawn_and_logprobs_are_over_the_kept_set():
    for uniform in (0.0, 0.3, 0.999999, 1.0):
        tokens, logprobs, candidate_ids = drawn(uniform, Sampling(top_k=2))
        assert candidate_ids.tolist() == [[1, 2]]
        assert tokens.item() in (1, 2)
        torch.testing.assert_close(logprobs.exp(), PROBS[0, tokens] / 0.7)


def test_the_tokens_that_could_be_drawn_are_remembered_row_by_row():
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.01, 0.96, 0.02, 0.01]]).log()
    uniforms = torch.zeros(2, dtype=torch.float64)
    candidate_ids = draw_tokens(logits, uniforms, Sampling(top_p=0.8)).candidate_ids
    assert candidate_ids.dtype == torch.int32
    assert candidate_ids.tolist() == [[3, 2, 1], [1, -1, -1]]
    assert draw_tokens(logits, uniforms, Sampling()).candidate_ids is None


def chi_square(tokens, probs):
    counts = torch.bincount(tokens, minlength=len(probs))
    expected = len(tokens) * probs
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_follow_the_distribution():
    uniforms = draw_uniforms(0, "train", 0, torch.arange(1), 1, 40000)[0]
    tokens = draw_tokens(PROBS.log().expand(40000, -1), uniforms, Sampling()).tokens
    assert chi_square(tokens, PROBS[0]) < 16.3  # 99.9 % with 3 degrees of freedom


def test_draws_from_a_large_vocabulary_follow_the_distribution():
    # 151936 is Qwen's; the classes are of unequal size and cut through the blocks of the sum.
    logits = torch.randn(151_936, generator=torch.Generator().manual_seed(0)) * 2
    uniforms = draw_uniforms(0, "train", 0, torch.arange(1), 1, 2000)[0]
    tokens = torch.cat(
        [
            draw_tokens(logits.expand(500, -1), part, Sampling()).tokens
            for part in uniforms.split(500)
        ]
    )
    edges = torch.tensor([1, 40, 128, 129, 5000, 60_003, 100_000, 151_900, 151_935])
    classes = torch.bucketize(torch.arange(len(logits)), edges, right=True)
    shares = torch.zeros(len(edges) + 1, dtype=torch.float64)
    shares.index_add_(0, classes, logits.double().softmax(-1))
    heavy = shares * len(tokens) > 5
    rest = torch.cat([shares[heavy], shares[~heavy].sum()[None]])
    number = torch.where(heavy, heavy.cumsum(0) - 1, len(rest) - 1)
    assert len(rest) == 5
    assert chi_square(number[classes[tokens]], rest) < 18.5  # 99.9 % with 4 degrees of freedom


def test_draws_from_a_large_vocabulary_invert_the_sum_of_its_probabilities():
    # The sum of 256000 rounded probabilities differs from 1 by more than an entry of the tail.
    logits = torch.randn(64, 256_000, generator=torch.Generator().manual_seed(0)) * 3
    uniforms = draw_uniforms(0, "train", 0, torch.arange(64), 1, 1)[:, 0]
    cumulative = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    expected = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    tokens = draw_tokens(logits, uniforms, Sampling()).tokens
    assert (tokens == expected.squeeze(1)).sum() >= 62  # entries that u nearly ends in may differ


@static_or_not
@pytest.mark.parametrize("size", [LARGE, 50_257, 256_000])
def test_large_vocabularies_keep_their_tails(size, static_shapes):
    logits = torch.zeros(4, size)
    middle = [0, size // 3, size - 2, size - 1]
    uniforms = torch.tensor([(token + 0.5) / size for token in middle], dtype=torch.float64)
    assert (
        draw_tokens(logits, uniforms, Sampling(), static_shapes=static_shapes).tokens.tolist()
        == middle
    )
    rare = torch.full((3, size), -1e4)
    rare[:, [3, size // 2, size - 1]] = torch.tensor([0.0, 2.0, -14.0])
    total = rare[0].double().logsumexp(-1)
    edges = torch.tensor([0.0, 1 / total.exp() + 1e-9, 1 - 1e-9], dtype=torch.float64)
    tokens = draw_tokens(rare, edges, Sampling(), static_shapes=static_shapes).tokens
    assert tokens.tolist() == [3, size // 2, size - 1]
    assert (
        draw_tokens(
            rare, torch.ones(3, dtype=torch.float64), Sampling(), static_shapes=static_shapes
        ).tokens[0]
        == size - 1
    )


def test_a_stream_depends_on_its_key_alone():
    both = draw_uniforms(1, "train", 5, torch.tensor([3, 9]), 2, 6)
    alone = draw_uniforms(1, "train", 5, torch.tensor([9]), 2, 6)
    assert torch.equal(both[2:], alone)
    longer = draw_uniforms(1, "train", 5, torch.tensor([9]), 3, 10)
    assert torch.equal(longer[:2, :6], alone)


def test_evaluations_draw_the_same_after_every_iteration():
    one, two = (draw_uniforms(1, "val", n, torch.tensor([3]), 2, 6) for n in (0, 5))
    assert (one == two).all()


@pytest.mark.parametrize(
    "change", [dict(seed=2), dict(purpose="val"), dict(iteration=6), dict(attempt=1)]
)
def test_streams_of_different_keys_differ(change):
    key = dict(seed=1, purpose="train", iteration=5, attempt=0)
    index = torch.tensor([3])
    arguments = dict(index=index, group_size=2, length=6)
    one, other = draw_uniforms(**key, **arguments), draw_uniforms(**(key | change), **arguments)
    assert not (one == other).any()
    assert not (one[0] == one[1]).any()


def test_no_completion_of_two_attempts_draws_the_same():
    index = torch.tensor([3, 4])
    attempts = [draw_uniforms(1, "train", 5, index, 4, 6, attempt=number) for number in range(4)]
    rows = {tuple(row) for each in attempts for row in each.tolist()}
    assert len(rows) == 4 * 2 * 4


def test_the_smallest_settings_are_accepted():
    assert Sampling(max_candidates=1, top_k=1).max_candidates == 1


@pytest.mark.parametrize(
    "wrong", [dict(temperature=-1.0), dict(top_p=0.0), dict(top_k=-2), dict(min_p=1.0)]
)
def test_settings_out_of_range_are_refused(wrong):
    name = next(iter(wrong))
    with pytest.raises(ValueError, match=f"sampling.{name} is .*; it must be"):
        Sampling(**wrong)


@static_or_not
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0), Sampling(top_k=2)])
def test_logits_that_are_no_numbers_give_a_token_whose_logprob_tells(sampling, static_shapes):
    logits = torch.tensor([[0.0, torch.nan, 1.0], [torch.inf, 0.0, 0.0], [0.0, 1.0, 0.0]])
    uniforms = torch.tensor([0.0, 0.5, 0.99])
    drawn = draw_tokens(logits, uniforms, sampling, static_shapes=static_shapes)
    assert bool(((drawn.tokens >= 0) & (drawn.tokens < 3)).all())
    assert drawn.logprobs.isfinite().tolist() == [False, False, True]


def test_the_candidate_set_of_filters_is_bounded():
    assert Sampling().with_candidates() == Sampling()
    limited = Sampling(top_p=0.9).with_candidates()
    assert limited.top_k == Sampling().max_candidates
    with raises_for("sampling.top_k", "sampling.max_candidates"):
        Sampling(top_k=10_000).with_candidates()
