"""Turn-level advantages: episodes worked out by hand, invariances, and the turns of a rollout."""

import math
from dataclasses import replace

import pytest
import torch

from litgrpo.algorithms.advantages import Normalized
from litgrpo.algorithms.turns import (
    GTPO,
    MTGRPO,
    GiGPO,
    ReBN,
    SimpleTIR,
    Turns,
)
from litgrpo.distributed.collectives import SingleProcess
from litgrpo.rewards.reward import Reward, environment
from litgrpo.rewards.scorer import Scorer
from litgrpo.rewards.scoring import Scoring
from litgrpo.types import RewardTable
from tests.learning.parts import gradient_of, learner_of, rollouter_of
from tests.support.algorithms import PUBLISHED
from tests.support.comms import in_turns
from tests.support.models import prompt_batch, tiny_policy
from tests.support.playing import Echo, episodes_of
from tests.support.raises import raises_for
from tests.support.turns import episode, rollout, table

ALL = [GiGPO(), MTGRPO(), GTPO(), ReBN(), SimpleTIR()]
HALF = math.sqrt(0.5)


def turns_of(rewards, states=None, void=None, answers=None):
    """Episodes as lists of their turns' rewards, [B][G][turns]; one token for each turn."""
    longest = max(len(row) for group in rewards for row in group)
    shape = (len(rewards), len(rewards[0]), longest)
    exist, earned = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.float64)
    known = torch.full(shape, -1)
    for b, group in enumerate(rewards):
        for g, row in enumerate(group):
            exist[b, g, : len(row)] = True
            earned[b, g, : len(row)] = torch.tensor(row, dtype=torch.float64)
            if states is not None:
                known[b, g, : len(row)] = torch.tensor(states[b][g])
    number = torch.arange(longest).expand(shape).masked_fill(~exist, -1).flatten(0, 1)
    void = torch.zeros(shape[:2], dtype=torch.bool) if void is None else torch.tensor(void)
    return Turns(number, exist, earned, known, void, answers or [None] * len(number))


def per_token(chosen, turns, valid=None, comm=None):
    total = turns.rewards.sum(2)
    valid = torch.ones_like(total, dtype=torch.bool) if valid is None else torch.tensor(valid)
    table = RewardTable({}, {}, total, valid)
    mask = turns.number >= 0
    values = chosen.per_token(table, mask, comm or SingleProcess(), turns)
    return torch.where(mask, values, 0.0)


def check(chosen, turns, expected, **kwargs):
    found = per_token(chosen, turns, **kwargs)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_gigpo_adds_a_comparison_of_turns_in_equal_states():
    # Episodes earn 0 + 4 and 2 + 0: 4 and 2, mean 3, without a scale +1 and -1.
    # gamma 1/2: returns 0 + 4 / 2 = 2 and 4; 2 + 0 / 2 = 2 and 0.
    # State 0: 2 and 2, both 0. State 1: 4 and 0, mean 2: +2 and -2; half of it is +1 and -1.
    turns = turns_of([[[0.0, 4.0], [2.0, 0.0]]], [[[0, 1], [0, 1]]])
    chosen = GiGPO(gamma=0.5, turn_weight=0.5, scale="none")
    check(chosen, turns, [[1.0, 2.0], [-1.0, -2.0]])


def test_gigpo_in_standard_deviations():
    # Episodes 4 and 2 have deviation sqrt(2): +-sqrt(1/2). State 0 has equal returns; in state 1
    # 4 and 0 are +-sqrt(1/2), too.
    turns = turns_of([[[0.0, 4.0], [2.0, 0.0]]], [[[0, 1], [0, 1]]])
    check(GiGPO(gamma=0.5, eps=0.0), turns, [[HALF, 2 * HALF], [-HALF, -2 * HALF]])


def test_gigpo_compares_a_state_that_one_episode_meets_twice():
    # Returns (gamma 1) of the first episode: 3, 3, 2; of the second: 1. Three turns in state 5:
    # 3, 2 and 1, mean 2.
    turns = turns_of([[[0.0, 1.0, 2.0], [1.0]]], [[[-1, 5, 5], [5]]])
    chosen = GiGPO(gamma=1.0, scale="none")
    check(chosen, turns, [[1.0, 1.0 + 1.0, 1.0 + 0.0], [-1.0 - 1.0, 0.0, 0.0]])


def test_gigpo_of_states_that_come_once_is_the_episodes_advantage():
    turns = turns_of([[[1.0, 4.0], [2.0, 0.0], [7.0]]], [[[0, 1], [2, 3], [-1]]])
    whole = per_token(Normalized(), turns)
    torch.testing.assert_close(per_token(GiGPO(), turns), whole)


def test_gigpo_never_compares_states_of_two_groups():
    groups = [[[1.0], [3.0]], [[5.0], [9.0]]]
    turns = turns_of(groups, [[[0], [0]], [[0], [0]]])
    # in each group +-d of the episode and the same of the turn
    check(GiGPO(scale="none"), turns, [[-2.0], [2.0], [-4.0], [4.0]])


def test_mt_grpo_adds_what_turns_before_the_last_earned():
    # Outcomes (last turns) 1 and 0: +-h, h = sqrt(1/2). First turns 0 and 2: -h and +h.
    turns = turns_of([[[0.0, 1.0], [2.0, 0.0]]])
    check(MTGRPO(eps=0.0), turns, [[0.0, HALF], [0.0, -HALF]])
    check(MTGRPO(turn_weight=3.0, eps=0.0), turns, [[-2 * HALF, HALF], [2 * HALF, -HALF]])


def test_mt_grpo_sums_from_a_turn_to_the_one_before_the_last():
    # Outcomes 1, 0, 2: z = 0, -1, 1. Turn 0 is before the last in rows 0 and 1: 4 and 6, -h and h.
    # Turn 1 is so in row 0 only, which has nothing to be compared with: 0.
    turns = turns_of([[[4.0, 3.0, 1.0], [6.0, 0.0], [2.0]]])
    check(MTGRPO(eps=0.0), turns, [[-HALF, 0.0, 0.0], [-1 + HALF, -1.0, 0.0], [1.0, 0.0, 0.0]])


def test_gtpo_normalizes_returns_over_the_turns_of_the_group():
    # gamma 1/2: returns 0 + 4 / 2 = 2 and 4; 6. Mean 4, squares 4 + 0 + 4 over 2: deviation 2.
    turns = turns_of([[[0.0, 4.0], [6.0]]])
    check(GTPO(gamma=0.5, eps=0.0), turns, [[-1.0, 0.0], [1.0, 0.0]])


def test_rebn_normalizes_returns_over_the_turns_of_the_batch():
    # gamma 1/2: returns 2, 4 | 6 | 8 | 0; mean 4, squares 4 + 0 + 4 + 16 + 16 = 40 over 4.
    turns = turns_of([[[0.0, 4.0], [6.0]], [[8.0], [0.0]]])
    unit = 1 / math.sqrt(10)
    expected = [[-2 * unit, 0.0], [2 * unit, 0.0], [4 * unit, 0.0], [-4 * unit, 0.0]]
    check(ReBN(gamma=0.5, eps=0.0), turns, expected)


def test_rebn_of_two_processes_is_that_of_one():
    groups = [[[0.0, 4.0], [6.0, 1.0]], [[8.0, 3.0], [0.0, 2.0]]]
    together = per_token(ReBN(), turns_of(groups))
    one, other = (
        lambda comm, group=group: per_token(ReBN(), turns_of([group]), comm=comm)
        for group in groups
    )
    torch.testing.assert_close(torch.cat(in_turns(one, other)), together)


def test_an_episode_with_a_void_turn_is_not_learned_and_stays_in_the_baseline():
    # Mean of 0, 0 and 3 is 1, of which the void row is a part.
    turns = turns_of([[[0.0], [0.0], [1.0, 2.0]]], void=[[True, False, False]])
    chosen = SimpleTIR(advantages=Normalized(scale="none"))
    check(chosen, turns, [[0.0, 0.0], [-1.0, 0.0], [2.0, 2.0]])


def test_a_last_turn_without_an_answer_is_void():
    turns = turns_of([[[1.0], [3.0], [5.0]]], answers=["#### 7", "seven", None])
    chosen = SimpleTIR(answer_pattern="####", advantages=Normalized(scale="none"))
    check(chosen, turns, [[-2.0], [0.0], [2.0]])
    turns = replace(turns, answers=["7", "  \n", None])
    check(SimpleTIR(advantages=Normalized(scale="none")), turns, [[-2.0], [0.0], [2.0]])


# --- what holds for all ---

GROUPS = [[[0.5, 2.0, 1.0], [0.0, -1.0], [3.0]], [[1.0, 0.25], [2.0], [0.0, 1.0]]]
STATES = [[[0, 1, 2], [0, 1], [0]], [[0, 1], [0], [0, 1]]]
GRPO_LIKE = [GiGPO(), MTGRPO(), GTPO(), SimpleTIR()]


@pytest.mark.parametrize("chosen", GRPO_LIKE, ids=lambda each: type(each).__name__)
def test_one_turn_is_grpo(chosen):
    rewards = torch.tensor([[1.0, 4.0, 2.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    table = RewardTable({}, {}, rewards, torch.ones_like(rewards, dtype=torch.bool))
    arguments = (table, torch.ones_like(rewards).long(), SingleProcess())
    torch.testing.assert_close(chosen(*arguments), Normalized()(*arguments))
    turns = turns_of(rewards[..., None].tolist())
    expected = Normalized()(*arguments).view(-1, 1)
    torch.testing.assert_close(per_token(chosen, turns), expected)


def test_one_turn_of_rebn_is_normalized_over_the_batch():
    turns = turns_of([[[1.0], [4.0]], [[0.0], [1.0]]])
    expected = per_token(Normalized("batch", "batch"), turns)
    torch.testing.assert_close(per_token(ReBN(), turns), expected)
    arguments = (
        RewardTable({}, {}, turns.rewards[..., 0], turns.exist[..., 0]),
        turns.exist.sum(2),
        SingleProcess(),
    )
    torch.testing.assert_close(ReBN()(*arguments).view(-1, 1), expected)


@pytest.mark.parametrize("chosen", ALL, ids=lambda each: type(each).__name__)
def test_a_unit_of_rewards_changes_nothing(chosen):
    turns = turns_of(GROUPS, STATES)
    exact = replace(chosen, advantages=Normalized(eps=0.0)) if chosen == SimpleTIR() else None
    exact = exact or replace(chosen, eps=0.0)
    scaled = replace(turns, rewards=turns.rewards * 7.0)
    torch.testing.assert_close(per_token(exact, scaled), per_token(exact, turns))


@pytest.mark.parametrize("chosen", ALL, ids=lambda each: type(each).__name__)
def test_equal_episodes_have_zero_advantage(chosen):
    turns = turns_of([[[1.0, 0.5]] * 3] * 2, [[[0, 1]] * 3] * 2)
    found = per_token(replace(chosen, gamma=1.0) if chosen == GiGPO() else chosen, turns)
    if not isinstance(chosen, GTPO | ReBN):  # whose turns are compared with each other, too
        assert not found.any()
    assert torch.equal(found[:1].expand(6, -1), found)


@pytest.mark.parametrize("chosen", ALL, ids=lambda each: type(each).__name__)
def test_episodes_that_failed_are_in_no_statistic(chosen):
    with_failed = [[*group, [1e6, -3.0]] for group in GROUPS]
    states = [[*group, [0, 1]] for group in STATES]
    found = per_token(chosen, turns_of(with_failed, states), valid=[[True] * 3 + [False]] * 2)
    found = found.view(2, 4, -1)
    assert not found[:, 3].any()
    without = per_token(chosen, turns_of(GROUPS, STATES)).view(2, 3, -1)
    torch.testing.assert_close(found[:, :3], without)


@pytest.mark.parametrize("chosen", [GiGPO(gamma=1.0), GTPO(gamma=1.0), ReBN(gamma=1.0)], ids=str)
def test_a_reward_at_the_end_reaches_the_first_turn(chosen):
    # B4: a discount that started again after observations would leave the first turns equal
    turns = turns_of([[[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]])
    found = per_token(chosen, turns)
    assert found[0, 0] > 0.1
    assert found[1, 0] < -0.1


@pytest.mark.parametrize("chosen", ALL, ids=lambda each: type(each).__name__)
def test_observations_and_padding_have_zero_advantage(chosen):
    turns = turns_of(GROUPS, STATES)
    assert not per_token(chosen, turns)[turns.number < 0].any()


@pytest.mark.parametrize("make", [GiGPO, GTPO, ReBN])
def test_a_discount_above_one_raises(make):
    with raises_for("gamma", "1.5"):
        make(gamma=1.5)


def test_an_invalid_answer_pattern_raises():
    with raises_for("answer_pattern"):
        SimpleTIR(answer_pattern="(")


# --- a rollout of episodes, learned ---


@pytest.mark.parametrize("name", ["gigpo", "mt_grpo", "gtpo", "rebn", "simpletir"])
def test_every_algorithm_config_trains_on_episodes(name):
    policy = tiny_policy("llama")
    rollouter = rollouter_of(policy, episodes=episodes_of(Echo()), max_completion_length=40)
    rollout = rollouter.generate(prompt_batch("a", "hello there"), "train")
    scorer = Scorer({"environment": Reward(environment)}, Scoring(num_workers=0))
    rewards = scorer.start(rollout).wait()
    assert rewards.total.unique().numel() > 1
    learner = learner_of(policy, PUBLISHED[name])
    logprobs = learner.old_and_reference_logprobs(rollout)
    training_batch = learner.build_batch(rollout, rewards, logprobs)
    heard = rollout.completion_mask & ~rollout.loss_mask
    assert not training_batch.advantages[heard].any()
    for row, numbers in zip(training_batch.advantages, rollout.turns, strict=True):
        for number in numbers[numbers >= 0].unique():
            assert row[numbers == number].unique().numel() == 1
    rows = zip(training_batch.advantages, rollout.turns >= 0, strict=True)
    different = max(row[spoken].unique().numel() for row, spoken in rows)
    # Echo rewards equal turns equally, so before the last turn MT-GRPO has nothing to compare
    assert (different > 1) == (name not in ("mt_grpo", "simpletir"))
    assert gradient_of(learner, training_batch).norm() > 0


# --- the turns of a rollout ---


NAN = math.nan


THREE = [[0, 0, -1, 1, -1, 2], [0, -1, 1, 1, -1, -1]]


def test_each_turn_has_its_share_of_the_environments_reward_and_the_last_one_all_else():
    # 2 * (1, 0, 3) and 0.5 for the text; 2 * (-1, 4), nothing for the text
    found = Turns.from_rollout(
        rollout(THREE, [[1.0, 0.0, 3.0], [-1.0, 4.0, NAN]]),
        table([8.5, 6.0], counted=[4.0, 3.0], weight=2.0),
    )
    assert found.rewards.tolist() == [[[2.0, 0.0, 6.5], [-2.0, 8.0, 0.0]]]
    assert found.exist.tolist() == [[[True] * 3, [True, True, False]]]


def test_a_turn_whose_reward_abstained_earned_nothing():
    found = Turns.from_rollout(rollout([[0, 1]], [[NAN, 3.0]]), table([3.0], counted=[3.0]))
    assert found.rewards.tolist() == [[[0.0, 3.0]]]


def test_without_the_environments_own_reward_all_is_the_last_turns():
    found = Turns.from_rollout(
        rollout(THREE, [[1.0, 0.0, 3.0], [-1.0, 4.0, NAN]]), table([8.0, 6.0])
    )
    assert found.rewards.tolist() == [[[0.0, 0.0, 8.0], [0.0, 6.0, 0.0]]]


def test_a_reward_that_a_gate_changed_is_the_last_turns():
    found = Turns.from_rollout(
        rollout(THREE, [[1.0, 0.0, 3.0], [-1.0, 4.0, NAN]]), table([0.0, 3.0], counted=[0.0, 3.0])
    )
    assert found.rewards.tolist() == [[[0.0, 0.0, 0.0], [-1.0, 4.0, 0.0]]]


def test_an_episode_without_generated_tokens_has_no_turn():
    found = Turns.from_rollout(
        rollout([[-1, -1], [0, -1]], [[NAN], [1.0]]), table([0.0, 1.0], [0.0, 1.0])
    )
    assert found.exist.tolist() == [[[False], [True]]]
    assert found.per_token(found.rewards).tolist() == [[0.0, 0.0], [1.0, 0.0]]


def test_the_discount_is_per_turn_and_ignores_observations():
    # R_2 = 4; R_1 = 0 + 4 / 2 = 2; R_0 = 1 + 2 / 2 = 2, however many tokens lie between
    found = Turns.from_rollout(rollout([THREE[0]], [[1.0, 0.0, 4.0]]), table([5.0], counted=[5.0]))
    assert found.returns(0.5).tolist() == [[[2.0, 2.0, 4.0]]]
    assert found.per_token(found.returns(0.5)).tolist() == [[2.0, 2.0, 0.0, 2.0, 0.0, 4.0]]
    assert found.returns(1.0)[..., 0].item() == 5.0
    assert found.returns(0.0).tolist() == found.rewards.tolist()


def test_a_turn_is_in_the_state_that_the_one_before_it_left():
    states = [["a", "b", "a"], ["b", None]]
    found = Turns.from_rollout(rollout(THREE, [[0.0] * 3] * 2, states), table([0.0, 0.0]))
    # both begin in state 0; the state after the last turn is unused
    assert found.states.tolist() == [[[0, 1, 2], [0, 2, -1]]]
    found = Turns.from_rollout(
        rollout(THREE, [[0.0] * 3] * 2, [[None, 3, None], [3, None]]), table([0, 0])
    )
    assert found.states.tolist() == [[[0, -1, 1], [0, 1, -1]]]


def test_an_environment_without_states_has_unknown_states():
    found = Turns.from_rollout(
        rollout(THREE, [[0.0] * 3] * 2, [[None] * 3, [None] * 2]), table([0.0, 0.0])
    )
    assert (found.states == -1).all()


def test_void_turns_neither_call_nor_end_the_episode():
    cases = {
        "calls, then answers": (episode([1, 1, 0], ["", "", "42"]), False, "42"),
        "calls to the last": (episode([1, 2, 1], ["", "", "x"], done=False), False, None),
        "says something between": (episode([1, 0, 1], ["", "", "x"], done=False), True, None),
        "cut off in its answer": (episode([1, 1], ["", "", "4"], done=False), True, "4"),
    }
    for name, (played, void, answer) in cases.items():
        found = Turns.from_rollout(
            rollout([THREE[0]], [[0.0] * 3], episodes=[played]), table([0.0])
        )
        assert found.void.tolist() == [[void]], name
        assert found.answers == [answer], name


def test_a_last_turn_that_earned_nothing_has_no_rounding_of_the_others():
    # 0.3 * (0.1 + 0.7 + 0.2) is not 0.3 * 0.1 + 0.3 * 0.7 + 0.3 * 0.2.
    earned = [[0.1, 0.7, 0.2, 0.0], [0.1, 0.2, 0.0, 0.0], [0.3, 0.7, 0.6, 0.0]]
    sums = [sum(row) for row in earned]
    found = Turns.from_rollout(
        rollout([[0, 1, 2, 3]] * 3, earned),
        table([0.3 * each for each in sums], counted=sums, weight=0.3),
    )
    assert found.rewards[..., 3].tolist() == [[0.0, 0.0, 0.0]]


def test_the_rounding_of_a_long_episode_is_no_reward_of_its_last_turn():
    earned = [0.1] * 100
    total = sum(earned)  # one rounding after each turn: 2e-14 away from 10
    assert total != 10.0
    found = Turns.from_rollout(
        rollout([list(range(100))], [earned], episodes=[episode([1] * 100, ["ok"])]),
        table([total], counted=[total]),
    )
    assert found.rewards[0, 0].tolist() == earned


@pytest.mark.parametrize("state", [["a"], ("a", [1])])
def test_an_unhashable_state_raises(state):
    played = rollout([[0, 1]], [[0.0, 1.0]], states=[[state, None]])
    with raises_for("StepResult.state"):
        Turns.from_rollout(played, table([1.0], counted=[1.0]))
