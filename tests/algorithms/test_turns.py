"""What the turns of a rollout earned, found and did."""

import math

import pytest

from litgrpo.algorithms.turns import Turns
from tests.support.turns import episode, rollout, table

NAN = math.nan


THREE = [[0, 0, -1, 1, -1, 2], [0, -1, 1, 1, -1, -1]]


def test_each_turn_has_its_share_of_the_environments_reward_and_the_last_one_all_else():
    # 2 * (1, 0, 3) and 0.5 for the text; 2 * (-1, 4), nothing for the text
    found = Turns.of(
        rollout(THREE, [[1.0, 0.0, 3.0], [-1.0, 4.0, NAN]]),
        table([8.5, 6.0], counted=[4.0, 3.0], weight=2.0),
    )
    assert found.rewards.tolist() == [[[2.0, 0.0, 6.5], [-2.0, 8.0, 0.0]]]
    assert found.exist.tolist() == [[[True] * 3, [True, True, False]]]


def test_a_turn_whose_reward_abstained_earned_nothing():
    found = Turns.of(rollout([[0, 1]], [[NAN, 3.0]]), table([3.0], counted=[3.0]))
    assert found.rewards.tolist() == [[[0.0, 3.0]]]


def test_without_the_environments_own_reward_all_is_the_last_turns():
    found = Turns.of(rollout(THREE, [[1.0, 0.0, 3.0], [-1.0, 4.0, NAN]]), table([8.0, 6.0]))
    assert found.rewards.tolist() == [[[0.0, 0.0, 8.0], [0.0, 6.0, 0.0]]]


def test_a_reward_that_a_gate_changed_is_the_last_turns():
    found = Turns.of(
        rollout(THREE, [[1.0, 0.0, 3.0], [-1.0, 4.0, NAN]]), table([0.0, 3.0], counted=[0.0, 3.0])
    )
    assert found.rewards.tolist() == [[[0.0, 0.0, 0.0], [-1.0, 4.0, 0.0]]]


def test_an_episode_in_which_nothing_was_said_has_no_turn():
    found = Turns.of(rollout([[-1, -1], [0, -1]], [[NAN], [1.0]]), table([0.0, 1.0], [0.0, 1.0]))
    assert found.exist.tolist() == [[[False], [True]]]
    assert found.per_token(found.rewards).tolist() == [[0.0, 0.0], [1.0, 0.0]]


def test_discounting_is_per_turn_and_goes_on_through_what_is_heard():
    # R_2 = 4; R_1 = 0 + 4 / 2 = 2; R_0 = 1 + 2 / 2 = 2, however many tokens lie between
    found = Turns.of(rollout([THREE[0]], [[1.0, 0.0, 4.0]]), table([5.0], counted=[5.0]))
    assert found.returns(0.5).tolist() == [[[2.0, 2.0, 4.0]]]
    assert found.per_token(found.returns(0.5)).tolist() == [[2.0, 2.0, 0.0, 2.0, 0.0, 4.0]]
    assert found.returns(1.0)[..., 0].item() == 5.0
    assert found.returns(0.0).tolist() == found.rewards.tolist()


def test_a_turn_is_in_the_state_that_the_one_before_it_left():
    states = [["a", "b", "a"], ["b", None]]
    found = Turns.of(rollout(THREE, [[0.0] * 3] * 2, states), table([0.0, 0.0]))
    # both begin in state 0; what the last turn leaves is nobody's
    assert found.states.tolist() == [[[0, 1, 2], [0, 2, -1]]]
    found = Turns.of(rollout(THREE, [[0.0] * 3] * 2, [[None, 3, None], [3, None]]), table([0, 0]))
    assert found.states.tolist() == [[[0, -1, 1], [0, 1, -1]]]


def test_an_environment_that_tells_no_states_has_none():
    found = Turns.of(rollout(THREE, [[0.0] * 3] * 2, [[None] * 3, [None] * 2]), table([0.0, 0.0]))
    assert (found.states == -1).all()


def test_void_turns_neither_call_nor_end_the_episode():
    cases = {
        "calls, then answers": (episode([1, 1, 0], ["", "", "42"]), False, "42"),
        "calls to the last": (episode([1, 2, 1], ["", "", "x"], done=False), False, None),
        "says something between": (episode([1, 0, 1], ["", "", "x"], done=False), True, None),
        "cut off in its answer": (episode([1, 1], ["", "", "4"], done=False), True, "4"),
    }
    for name, (played, void, answer) in cases.items():
        found = Turns.of(rollout([THREE[0]], [[0.0] * 3], episodes=[played]), table([0.0]))
        assert found.void.tolist() == [[void]], name
        assert found.answers == [answer], name


def test_a_last_turn_that_earned_nothing_has_no_rounding_of_the_others():
    # 0.3 * (0.1 + 0.7 + 0.2) is not 0.3 * 0.1 + 0.3 * 0.7 + 0.3 * 0.2.
    earned = [[0.1, 0.7, 0.2, 0.0], [0.1, 0.2, 0.0, 0.0], [0.3, 0.7, 0.6, 0.0]]
    sums = [sum(row) for row in earned]
    found = Turns.of(
        rollout([[0, 1, 2, 3]] * 3, earned),
        table([0.3 * each for each in sums], counted=sums, weight=0.3),
    )
    assert found.rewards[..., 3].tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("state", [["a"], ("a", [1])])
def test_a_state_that_cannot_be_compared_is_refused(state):
    played = rollout([[0, 1]], [[0.0, 1.0]], states=[[state, None]])
    with pytest.raises(
        ValueError, match=r"StepResult\.state\) cannot be compared .*'list'.* a tuple"
    ):
        Turns.of(played, table([1.0], counted=[1.0]))
