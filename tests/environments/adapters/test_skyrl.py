"""SkyRL-Gym by a stand-in with its signatures."""

import pytest

from litgrpo.environments.adapters.skyrl import SkyRL


class Sum:
    def __init__(self, extras):
        self.truth, self.most = extras["reward_spec"]["ground_truth"], extras.get("max_turns", 9)
        self.turns = 0

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "Begin."}], {}

    def step(self, action):
        self.turns += 1
        right, role = action == self.truth, "tool" if action == "call" else "user"
        done = right or self.turns == self.most
        said = [] if done else [{"role": role, "content": "Again."}]
        return {"observations": said, "reward": float(right), "done": done, "metadata": {}}


class Rewrites(Sum):
    def init(self, prompt):
        return [{"role": "system", "content": "Be good."}, *prompt], {}


ROW = {"prompt": "2+2", "answer": "4"}
EXTRAS = {"reward_spec.ground_truth": "answer"}


def test_columns_are_extras_and_messages_of_the_user_are_a_text():
    game = SkyRL(factory=Sum, extras_from_columns=EXTRAS, extras={"max_turns": 3})
    assert game.reset(ROW, 0) == "\n\nBegin."
    heard = game.step("5")
    assert (heard.observation, heard.reward, heard.done) == ("Again.", 0.0, False)
    assert game.step("call").observation == [{"role": "tool", "content": "Again."}]
    assert game.step("4").reward == 1.0
    assert ROW == {"prompt": "2+2", "answer": "4"}


def test_the_same_words_lead_to_the_same_state():
    states = []
    for moves in (["1", "2"], ["1", "2"], ["1", "3"]):
        game = SkyRL(factory=Sum, extras_from_columns=EXTRAS)
        game.reset(ROW, 0)
        states.append([game.step(move).state for move in moves][-1])
    assert states[0] == states[1] != states[2]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "either env_id: gsm8k_multi_turn, or factory"),
        ({"factory": "nowhere.Game"}, "No module named 'nowhere'"),
        ({"factory": 3}, "must be a class or a function"),
    ],
)
def test_what_is_none_is_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        SkyRL(**settings)


@pytest.mark.parametrize(
    ("make", "extras", "why"),
    [
        (Sum, {"reward_spec.ground_truth": "gold"}, "no column 'gold'; they have: prompt, answer"),
        (Sum, {}, "cannot be played: KeyError"),
        (Rewrites, EXTRAS, "init changed the prompt"),
    ],
)
def test_rows_that_do_not_fit_are_refused(make, extras, why):
    with pytest.raises(ValueError, match=why):
        SkyRL(factory=make, extras_from_columns=extras).reset(ROW, 0)
