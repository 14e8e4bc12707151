"""Advantages: hand-worked groups, equal rewards, rows with zero advantage."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from litgrpo.algorithms.advantages import (
    GDPO,
    GFPO,
    Normalized,
    OptimalTokenBaseline,
    PassAtK,
    ReMax,
    TaskAdvantages,
    Whitened,
    check_centered,
)
from litgrpo.algorithms.objective import Objective
from litgrpo.distributed.collectives import SingleProcess
from litgrpo.types import ROUNDING, RewardTable
from tests.support.comms import in_turns
from tests.support.raises import raises_for

NAN, INF = float("nan"), float("inf")
HALF = math.sqrt(0.5)


def table(rewards, valid=None, **parts):
    total = torch.tensor(rewards, dtype=torch.float64)
    parts = {name: torch.tensor(part, dtype=torch.float64) for name, part in parts.items()}
    valid = torch.ones_like(total, dtype=torch.bool) if valid is None else torch.tensor(valid)
    return RewardTable(parts, dict.fromkeys(parts, 1.0), total, valid)


def advantages(chosen, rewards, lengths=None):
    lengths = torch.ones_like(rewards.total).long() if lengths is None else torch.tensor(lengths)
    return chosen(rewards, lengths, SingleProcess())


def check(chosen, rewards, expected, **kwargs):
    found = advantages(chosen, table(rewards), **kwargs)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_group_normalized_of_a_pair():
    check(Normalized(eps=0.0), [[0.0, 1.0]], [[-HALF, HALF]])


def test_group_centered():
    check(Normalized(scale="none"), [[0.0, 0.0, 3.0]], [[-1.0, -1.0, 2.0]])


def test_leave_one_out():
    check(Normalized("others", "none"), [[0.0, 0.0, 3.0]], [[-1.5, -1.5, 3.0]])


def test_remax_subtracts_the_reward_of_the_greedy_completion():
    rewards = replace(
        table([[1.0, 0.0], [2.0, 0.5], [1.0, NAN]]), greedy=torch.tensor([1.0, NAN, 0])
    )

    # Without a valid greedy reward there is no baseline, and no advantage.
    expected = torch.tensor([[0.0, -1.0], [0.0, 0.0], [1.0, 0.0]]).double()
    torch.testing.assert_close(advantages(ReMax(), rewards), expected)


def token_baselines(rewards, lengths, norms):
    """[G, C] advantages of a group by the loop of the paper, NaN off completions."""
    size, longest = len(rewards), max(lengths)
    found = torch.full((size, longest), NAN, dtype=torch.float64)
    for t in range(longest):
        active = [i for i in range(size) if lengths[i] > t]
        weights = {i: sum(norms[i][: t + 1]) for i in active}
        baseline = sum(weights[i] * rewards[i] for i in active) / sum(weights.values())
        for i in active:
            found[i, t] = rewards[i] - baseline
    return found


def per_token(rewards, mask, norms):
    mask, norms = torch.as_tensor(mask), torch.as_tensor(norms, dtype=torch.float64)
    return OptimalTokenBaseline().per_token(rewards, mask, SingleProcess(), score_norms=norms)


def test_the_optimal_token_baseline_weights_completions_by_the_scores_of_their_tokens_so_far():
    # W = 1, 3 and 3, 3: the baseline of the first token is 3/4, of the second 1/2.
    found = per_token(table([[0.0, 1.0]]), [[True] * 2] * 2, [[1.0, 2.0], [3.0, 0.0]])
    assert found.tolist() == [[-0.75, -0.5], [0.25, 0.5]]
    # Without a second token in the other completion there is nothing to compare with.
    found = per_token(table([[0.0, 1.0]]), [[True, False], [True] * 2], [[1.0, 0.0], [3.0, 5.0]])
    assert found.tolist() == [[-0.75, 0.0], [0.25, 0.0]]


@pytest.mark.parametrize("seed", range(5))
def test_the_optimal_token_baseline_is_that_of_a_loop_over_generated_tokens(seed):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (4,), generator=random).tolist()
    norms = torch.rand(4, 6, generator=random, dtype=torch.float64)
    rewards = torch.rand(4, generator=random, dtype=torch.float64)
    expected = token_baselines(rewards.tolist(), lengths, norms.tolist())
    # Observations of an environment lie between generated tokens.
    mask = torch.zeros(4, 10, dtype=torch.bool)
    spread = torch.zeros(4, 10, dtype=torch.float64)
    for row, length in enumerate(lengths):
        places = torch.randperm(10, generator=random)[:length].sort().values
        mask[row, places], spread[row, places] = True, norms[row, :length]
    both = table([rewards.tolist(), [0.5] * 4])
    found = per_token(both, mask.repeat(2, 1), spread.repeat(2, 1))
    assert not found[~mask.repeat(2, 1)].any()
    assert not found[4:].any()  # a group of equal rewards
    for row in range(4):
        torch.testing.assert_close(found[row][mask[row]], expected[row][: lengths[row]])


def test_a_completion_without_a_valid_reward_has_no_part_in_the_optimal_token_baseline():
    rewards = table([[0.0, 1.0, NAN]], valid=[[True, True, False]])
    found = per_token(rewards, [[True]] * 3, [[1.0], [3.0], [9.0]])
    assert found.tolist() == [[-0.75], [0.25], [0.0]]
    certain = per_token(table([[0.0, 1.0]]), [[True]] * 2, [[0.0], [0.0]])  # p = 1: no gradient
    assert certain.tolist() == [[-0.5], [0.5]]
    alone = per_token(table([[0.0, 1.0]]), [[True, False], [True] * 2], [[0.0] * 2] * 2)
    assert alone.tolist() == [[-0.5, 0.0], [0.5, 0.0]]


def test_the_optimal_token_baseline_cannot_be_part_of_other_advantages():
    assert OptimalTokenBaseline().needs_score_norms
    with raises_for("OptimalTokenBaseline", "model.objective.advantages"):
        advantages(Whitened(OptimalTokenBaseline()), table([[0.0, 1.0]]))
    with raises_for("OptimalTokenBaseline", "math", "TaskAdvantages"):
        Objective(TaskAdvantages({"math": OptimalTokenBaseline()}))


@pytest.mark.parametrize("wrapped", [ReMax(), GFPO(advantages=ReMax()), Whitened(ReMax())])
def test_estimators_of_a_greedy_baseline_say_that_they_need_it(wrapped):
    assert wrapped.needs_greedy
    assert not Normalized().needs_greedy


def test_relative_to_the_mean():
    check(Normalized(scale="mean"), [[1.0, 3.0], [-1.0, -3.0]], [[-0.5, 0.5], [0.5, -0.5]])


def test_group_mean_and_batch_deviation():
    # deviation of 0, 2, 4, 6 is sqrt(20 / 3)
    unit = 1 / math.sqrt(20 / 3)
    check(Normalized(scale="batch", eps=0.0), [[0.0, 2.0], [4.0, 6.0]], [[-unit, unit]] * 2)


def test_reinforce_without_and_with_an_average_baseline():
    check(Normalized("none", "none"), [[1.0, 1.0], [3.0, 3.0]], [[1.0, 1.0], [3.0, 3.0]])
    check(Normalized("batch", "none"), [[1.0, 1.0], [3.0, 3.0]], [[-1.0, -1.0], [1.0, 1.0]])


def test_reinforce_plus_plus_normalizes_over_the_batch():
    unit = 1 / math.sqrt(4 / 3)
    check(Normalized("batch", "batch", 0.0), [[1.0, 1.0], [3.0, 3.0]], [[-unit] * 2, [unit] * 2])


def test_gdpo_weighs_reward_functions_alike_whatever_their_spread():
    rewards = table(
        [[0.0, 101.0], [1.0, 100.0]], a=[[0.0, 1.0], [1.0, 0.0]], b=[[0.0, 100.0], [0.0, 100.0]]
    )
    # With h the half: a gives (-h, h), (h, -h), b (-h, h) twice; their sums are -2h, 2h, 0, 0.
    found = advantages(GDPO(eps=0.0), rewards)

    unit = 2 * HALF / math.sqrt(4 / 3)
    expected = torch.tensor([[-unit, unit], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(found, expected)


def test_gdpo_adds_eps_to_the_deviation_of_each_reward_function_and_of_the_batch():
    # Distances -1/2 and 1/2 over h + 1, and those over their own deviation + 1.
    normalized = 0.5 / (HALF + 1)
    expected = normalized / (2 * normalized * HALF + 1)
    found = advantages(GDPO(eps=1.0), table([[0.0, 1.0]], a=[[0.0, 1.0]]))

    torch.testing.assert_close(found, torch.tensor([[-expected, expected]]).double())


def test_gfpo_counts_an_empty_completion_as_one_token():
    chosen = GFPO(0.5, "reward_per_token", advantages=Normalized(scale="none"))
    check(chosen, [[0.0, 1.0]], [[0.0, 0.5]], lengths=[[0, 1]])


def test_gfpo_never_keeps_a_completion_without_a_valid_reward():
    chosen = GFPO(0.3, "shortest", advantages=Normalized(scale="none"))
    rewards = table([[9.0, 1.0, 3.0]], [[False, True, True]])

    assert advantages(chosen, rewards, [[1, 2, 3]]).tolist() == [[0.0, -1.0, 0.0]]


@pytest.mark.parametrize("eps", [0.0, 1e-300, 1e-4])
@pytest.mark.parametrize("baseline", ["group", "others", "length_weighted", "batch", "none"])
@pytest.mark.parametrize("scale", ["group", "batch", "mean"])
@pytest.mark.parametrize(
    "rewards",
    [[[1.0], [3.0]], [[1.0, 1.0], [3.0, 3.0]], [[2.0, 2.0], [2.0, 2.0]], [[-1.0, 1.0], [0.0, 0.0]]],
)
def test_a_scale_of_zero_gives_zero_advantages(baseline, scale, eps, rewards):
    found = advantages(Normalized(baseline, scale, eps), table(rewards))

    without_variance = {
        "group": [len(set(group)) == 1 for group in rewards],
        "batch": [len({each for group in rewards for each in group}) == 1] * 2,
        "mean": [eps == 0 and sum(group) == 0 for group in rewards],
    }
    zero = torch.tensor(without_variance[scale])
    assert (found[zero] == 0).all()
    # A mean of 0 is raised to eps, which may be as small as its user likes.
    if scale != "mean" or eps != 1e-300:
        assert found.abs().max() <= 2 / 1e-4


def test_a_standard_deviation_of_the_group_needs_a_group():
    assert Normalized("batch", "group").needs_group
    assert not Normalized("batch", "batch").needs_group


def test_top_share_keeps_the_best_half_and_what_ties_with_it():
    centered = Normalized(scale="none")
    check(GFPO(advantages=centered), [[0.0, 1.0, 2.0, 5.0]], [[0.0, 0.0, 0.0, 3.0]])
    check(GFPO(0.25, advantages=centered), [[1.0, 1.0, 0.0, 0.0]], [[0.5, 0.5, 0.0, 0.0]])


def test_gfpo_computes_advantages_among_the_shortest():
    chosen = GFPO(0.5, "shortest", normalize_kept_only=True, advantages=Normalized(scale="none"))
    check(chosen, [[9.0, 1.0, 3.0, 9.0]], [[0.0, -1.0, 1.0, 0.0]], lengths=[[9, 2, 3, 8]])


def test_gfpo_by_reward_per_token():
    chosen = GFPO(0.5, "reward_per_token", advantages=Normalized(scale="none"))
    check(chosen, [[4.0, 2.0, 4.0, 2.0]], [[1.0, 0.0, 0.0, -1.0]], lengths=[[2, 9, 9, 1]])


def test_max_rl_divides_by_the_mean_of_the_group():
    check(Normalized(scale="mean"), [[0.0, 0.0, 0.0, 1.0]], [[-1.0, -1.0, -1.0, 3.0]])
    check(Normalized(scale="mean"), [[0.0, 0.0, 0.0, 0.0]], [[0.0, 0.0, 0.0, 0.0]])


def test_opo_weighs_the_rewards_of_the_baseline_by_length():
    # (1 * 0 + 3 * 1) / 4 = 0.75
    check(Normalized("length_weighted", "none"), [[0.0, 1.0]], [[-0.75, 0.25]], lengths=[[1, 3]])


def test_opo_leaves_invalid_rewards_out_of_the_baseline():
    rewards = table([[0.0, 1.0, 9.0]], valid=[[True, True, False]])
    found = advantages(Normalized("length_weighted", "none"), rewards, [[1, 3, 100]])
    torch.testing.assert_close(found, torch.tensor([[-0.75, 0.25, 0.0]]).double())
    empty = advantages(Normalized("length_weighted", "none"), table([[0.0, 1.0]]), [[0, 0]])
    assert empty.isfinite().all()


def test_pass_at_k_gives_the_lead_of_the_best():
    check(PassAtK(), [[1.0, 4.0, 2.0], [3.0, 3.0, 0.0]], [[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    check(PassAtK("group", 0.0), [[0.0, 2.0]], [[0.0, 2 / math.sqrt(2)]])
    one_valid = table([[1.0, 4.0]], valid=[[True, False]])
    assert (advantages(PassAtK(), one_valid) == 0).all()


def test_pass_at_k_is_the_leave_one_out_advantage_of_the_maximum():
    rewards = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()
    expected = [
        [max(row) - max(row[:i] + row[i + 1 :]) for i in range(len(row))]
        for row in rewards.tolist()
    ]
    check(PassAtK(), rewards.tolist(), expected)


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_the_tokens():
    rewards, lengths = [[0.0, 1.0], [3.0, 1.0]], [[1, 4], [2, 3]]
    tokens = []
    for row, counts in zip(rewards, lengths, strict=True):
        for reward, count in zip(row, counts, strict=True):
            tokens += [reward - sum(row) / 2] * count
    mean = sum(tokens) / len(tokens)
    std = math.sqrt(sum((a - mean) ** 2 for a in tokens) / (len(tokens) - 1))
    expected = [[(r - sum(row) / 2 - mean) / std for r in row] for row in rewards]
    check(Whitened(eps=0.0), rewards, expected, lengths=lengths)


def test_completions_without_a_reward_do_not_count_in_whitened_advantages():
    valid = [[True, True, True, False]]
    with_one = table([[0.0, 1.0, 5.0, 0.0]], valid)
    found = advantages(Whitened(eps=0.0), with_one, [[2, 1, 3, 7]])
    without = advantages(Whitened(eps=0.0), table([[0.0, 1.0, 5.0]]), [[2, 1, 3]])
    torch.testing.assert_close(found[:, :3], without)
    assert found[0, 3] == 0


def test_advantages_are_clipped_before_they_are_discounted():
    mask = torch.tensor([[True, True], [True, False]])
    objective = Objective(advantages=Normalized("none", "none"), gamma=0.5, advantage_clip=2.0)

    found = objective.token_advantages(table([[8.0, -3.0]]), mask)

    assert found.tolist() == [[1.0, 2.0], [-2.0, 0.0]]
    with raises_for("advantage_clip"):
        Objective(advantage_clip=0.0)


def test_share_must_be_a_share():
    with raises_for("keep_frac", "0"):
        GFPO(0)


EVERY = [
    *(
        Normalized(baseline, scale)
        for baseline, scale in itertools.product(
            ("group", "others", "length_weighted", "batch", "none"),
            ("group", "batch", "mean", "none"),
        )
    ),
    PassAtK(),
    PassAtK("group"),
    Whitened(),
    GDPO(),
    GFPO(),
    GFPO(rank_by="shortest", normalize_kept_only=True),
]
ZERO_IF_EQUAL = [chosen for chosen in EVERY if "baseline='none'" not in repr(chosen)]


@pytest.mark.parametrize("chosen", ZERO_IF_EQUAL, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equal_rewards_with_floating_point_noise_give_exactly_zero(chosen, dtype):
    generator = torch.Generator().manual_seed(0)
    precision = torch.finfo(dtype).eps
    for size, exponent in itertools.product((2, 3, 8, 33, 64), range(-8, 9, 2)):
        offset = 10.0**exponent
        noise = (torch.rand(3, size, generator=generator) * 2 - 1) * precision
        for sign in (1.0, -1.0):
            rewards = (sign * offset * (1 + noise)).to(dtype).double()
            noisy = table(rewards.tolist(), r=rewards.tolist())
            assert (advantages(chosen, noisy) == 0).all(), (size, offset)


def test_rewards_that_differ_by_more_than_noise_do_teach():
    found = advantages(Normalized(), table([[1.0, 1.0 + 2 * ROUNDING]]))

    assert found[0, 0] < 0 < found[0, 1]


@pytest.mark.parametrize("chosen", EVERY, ids=repr)
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e300, 1e20])
def test_a_row_that_teaches_nothing_gets_zero_and_moves_no_other(chosen, bad):
    lengths = [[2, 3, 4], [5, 6, 7]]
    rewards, valid = [[1.0, 3.0, 0.0], [2.0, 2.5, 1.0]], [[True, True, False], [True] * 3]
    masked = advantages(chosen, table(rewards, valid, r=rewards), lengths)
    rewards[0][2] = bad
    found = advantages(chosen, table(rewards, r=rewards), lengths)

    assert found.isfinite().all()
    assert found[0, 2] == 0
    torch.testing.assert_close(found, masked, rtol=0, atol=0)


@pytest.mark.parametrize("scale", ["none", "batch"])
def test_the_only_valid_reward_of_a_batch_equals_the_mean_of_the_batch(scale):
    rewards = table([[1.0, 2.0], [3.0, 4.0]], [[False, False], [True, False]])
    assert (advantages(Normalized("batch", scale), rewards) == 0).all()


def test_an_all_invalid_group_and_a_single_valid_row_get_zero():
    valid = [[False, False], [True, False]]
    for chosen in EVERY[:4]:
        assert (advantages(chosen, table([[1.0, 2.0], [3.0, 4.0]], valid)) == 0).all()


@pytest.mark.parametrize("chosen", EVERY, ids=repr)
def test_order_of_rows_and_groups_does_not_matter(chosen):
    rewards = torch.tensor([[1.0, 3.0, 0.0, 0.2], [2.0, 2.5, 1.0, 7.0]]).double()
    lengths = torch.tensor([[2, 3, 4, 9], [5, 6, 7, 1]])
    order, groups = torch.tensor([2, 0, 3, 1]), torch.tensor([1, 0])
    before = advantages(chosen, table(rewards.tolist(), r=rewards.tolist()), lengths.tolist())
    moved, lengths = rewards[groups][:, order], lengths[groups][:, order]
    after = advantages(chosen, table(moved.tolist(), r=moved.tolist()), lengths.tolist())

    torch.testing.assert_close(after, before[groups][:, order])


def test_two_processes_see_the_statistics_of_the_whole_batch():
    rewards = [[1.0, 3.0], [2.0, 7.0]]
    halves = [table([row], r=[row]) for row in rewards]
    for chosen in (Normalized("batch", "batch"), Normalized(scale="batch"), GDPO(), Whitened()):
        whole = advantages(chosen, table(rewards, r=rewards))
        found = in_turns(*(partial(chosen, half, torch.ones(1, 2)) for half in halves))
        torch.testing.assert_close(torch.cat(found), whole)


def test_gamma_discounts_by_the_distance_to_the_last_token():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    objective = Objective(advantages=Normalized("none", "none"), gamma=0.5)

    found = objective.token_advantages(table([[8.0, 2.0]]), mask)

    assert found.dtype == torch.float32
    assert found.tolist() == [[2.0, 4.0, 8.0], [2.0, 0.0, 0.0]]


def test_gamma_counts_the_tokens_of_the_policy_alone():
    mask = torch.tensor([[True, False, False, True, True], [True, True, False, False, False]])
    objective = Objective(advantages=Normalized("none", "none"), gamma=0.5)

    found = objective.token_advantages(table([[8.0, 2.0]]), mask)

    assert found.tolist() == [[2.0, 0.0, 0.0, 4.0, 8.0], [1.0, 2.0, 0.0, 0.0, 0.0]]


def test_the_shortest_completion_is_the_one_with_the_fewest_tokens_of_the_policy():
    # The first row is longer, but its environment said most of it.
    mask = torch.tensor([[1, 0, 0, 0, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]).bool()
    objective = Objective(
        advantages=GFPO(0.3, rank_by="shortest", advantages=Normalized(scale="none"))
    )

    found = objective.token_advantages(table([[5.0, 2.0, 0.0]]), mask)

    assert (found != 0).any(1).tolist() == [True, False, False]


def test_advantages_that_do_not_sum_to_zero_in_a_group_raise_an_error():
    check_centered(torch.tensor([[1.0, -1.0], [0.0, 0.0]]), Normalized())
    with pytest.raises(
        RuntimeError, match=r"The advantages of prompt 1 of this batch average 0\.5"
    ):
        check_centered(torch.tensor([[1.0, -1.0], [1.0, 0.0]]), Normalized())


@pytest.mark.parametrize(
    ("estimator", "gamma"),
    [(Normalized(baseline="batch"), 1.0), (GFPO(), 1.0), (Normalized(), 0.9)],
)
def test_advantages_that_need_not_be_centered_raise_no_error(estimator, gamma):
    check_centered(torch.tensor([[1.0, 0.0]]), estimator, gamma)


@st.composite
def batches(draw):
    """[B, G] whole rewards, which sums and powers of two leave exact, with some of them invalid."""
    shape = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    number = shape[0] * shape[1]
    rewards = draw(st.lists(st.integers(-4, 4), min_size=number, max_size=number))
    valid = draw(st.lists(st.sampled_from([True, True, False]), min_size=number, max_size=number))
    return torch.tensor(rewards).view(shape).double(), torch.tensor(valid).view(shape)


def of(chosen, rewards, valid):
    return advantages(chosen, table(rewards.tolist(), valid.tolist(), r=rewards.tolist()))


RELATIVE = [
    Normalized(baseline, scale, 0.0)
    for baseline, scale in itertools.product(
        ("group", "others", "length_weighted"), ("group", "batch", "none")
    )
] + [Normalized("batch", "batch", 0.0), Normalized("batch", "none"), GDPO(0.0)]
RELATIVE += [PassAtK(), PassAtK("group", 0.0), Whitened(eps=0.0)]
RELATIVE.append(GFPO(advantages=Normalized(eps=0.0)))


@given(batches(), st.integers(-50, 50))
def test_a_constant_added_to_all_rewards_changes_no_advantage(batch, constant):
    rewards, valid = batch
    for chosen in RELATIVE:
        shifted = of(chosen, rewards + constant, valid)
        torch.testing.assert_close(shifted, of(chosen, rewards, valid), rtol=1e-9, atol=1e-9)


@given(batches(), st.sampled_from([-60, -40, -3, 5, 60]))
def test_a_unit_of_reward_cancels_if_advantages_have_a_scale(batch, exponent):
    rewards, valid = batch
    for chosen in RELATIVE:
        found = of(chosen, rewards * 2.0**exponent, valid)
        unit = 2.0**exponent if getattr(chosen, "scale", "group") == "none" else 1.0
        torch.testing.assert_close(found / unit, of(chosen, rewards, valid), rtol=1e-9, atol=1e-9)


@given(batches(), st.randoms(use_true_random=False))
def test_advantages_follow_their_completions_in_any_order(batch, random):
    rewards, valid = batch
    rows, columns = list(range(rewards.shape[0])), list(range(rewards.shape[1]))
    random.shuffle(rows)
    random.shuffle(columns)
    for chosen in [*RELATIVE, Normalized("none", "mean")]:
        expected = of(chosen, rewards, valid)[rows][:, columns]
        found = of(chosen, rewards[rows][:, columns], valid[rows][:, columns])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@given(batches())
def test_advantages_with_a_group_baseline_sum_to_zero_in_each_group(batch):
    rewards, valid = batch
    for chosen in [each for each in RELATIVE if "baseline='batch'" not in repr(each)]:
        if not isinstance(chosen, GFPO | PassAtK | Whitened):
            found = of(chosen, rewards, valid)
            torch.testing.assert_close(found.sum(1), torch.zeros(len(found)).double())
            assert (found[~valid] == 0).all()
