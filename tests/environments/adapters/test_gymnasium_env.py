"""Games with gymnasium's signature; stand-ins of the same signature."""

import copy
from types import SimpleNamespace

import pytest

from litgrpo.environments.adapters.gymnasium_env import TextEnv


class Discrete(SimpleNamespace):
    pass


class Box(SimpleNamespace):
    pass


class Line:
    """Walk from the seed's place to 3; leaving the line is a ValueError."""

    def __init__(self, length=4):
        self.length = length
        self.action_space = Discrete(start=0, n=2)
        self.observation_space = Discrete(shape=(), start=0, n=length)
        self.closed = False

    def reset(self, seed):
        self.place = seed % 3
        return self.place, {}

    def step(self, action):
        assert isinstance(action, int)
        self.place += (-1, 1)[action]
        if self.place < 0:
            raise ValueError("left the line")
        return self.place, float(self.place == 3), self.place == 3, False, {"suffix": "Next."}

    def close(self):
        self.closed = True


class Echo:
    """A game of texts without spaces, as those of GEM."""

    def reset(self, seed):
        return f"seed {seed}", {}

    def step(self, action):
        return action, 0.5, False, action == "stop", {}


class Waves(Line):
    """Continuous actions."""

    def __init__(self):
        super().__init__()
        self.action_space = Box(shape=(1,))


class Pixels(Line):
    """Observations that are images."""

    def __init__(self):
        super().__init__()
        self.observation_space = Box(shape=(96, 96, 3))


def line(**settings):
    return TextEnv(factory=Line, action_names=["back", "on"], **settings)


def test_the_last_name_or_number_of_a_turn_is_the_action():
    game = line()
    assert game.reset({"prompt": "Walk."}, seed=1) == "\n\n1\nActions: back, on."
    heard = game.step("<think>back</think>Not back: ON!")
    assert (heard.observation, heard.reward, heard.done) == ("2\nNext.", 0.0, False)
    assert game.step("0").observation == "1\nNext."
    assert game.step("1.").observation == "2\nNext."
    heard = game.step("on")
    assert (heard.reward, heard.done, heard.calls) == (1.0, True, {"action": (1, 0)})


@pytest.mark.parametrize("said", ["", "2", "-1", "1.5", "backwards", "<think>on</think>"])
def test_a_turn_without_an_action_is_a_failed_call(said):
    game = line()
    game.reset({}, seed=1)
    heard = game.step(said)
    assert heard.calls == {"action": (1, 1)}
    assert heard.observation == "That is no action. Actions: back, on."
    assert not heard.done


def test_an_illegal_move_is_a_failed_call():
    game = line(invalid_message="no")
    game.reset({}, seed=0)
    heard = game.step("back")
    assert (heard.observation, heard.calls) == ("no", {"action": (1, 1)})


def test_equal_observations_are_equal_states_of_a_group():
    states = []
    for moves in (["on"], ["on", "back", "on"]):
        game = line()
        game.reset({}, seed=0)
        states.append([game.step(move).state for move in moves][-1])
    assert states[0] == states[1]


def test_a_pattern_finds_the_action():
    game = line(action_pattern="<move>(.*?)</move>")
    game.reset({}, seed=0)
    assert game.step("back <move>on</move>").observation.startswith("1")
    assert game.step("on").calls == {"action": (1, 1)}


def test_games_of_texts_get_the_text_and_truncation_ends_them():
    game = TextEnv(factory=Echo)
    assert game.reset({}, seed=2**40 + 5) == "seed 5"
    assert game.step("hello").observation == "hello"
    assert game.step("stop").done


def test_a_describer_writes_what_is_seen():
    game = TextEnv(
        factory=Pixels, format_observation=lambda place, game: f"{place} of {game.length}"
    )
    assert game.reset({}, seed=1) == "1 of 4\nActions: the numbers 0, 1."


def test_each_copy_has_a_game_of_its_own_that_is_closed():
    pattern = line()
    first = copy.deepcopy(pattern)
    first.reset({}, seed=0)
    first.step("on")
    second = copy.deepcopy(first)
    second.reset({}, seed=0)
    assert second.step("on").observation == "1\nNext."
    played = first._game
    first.close()
    first.close()
    assert played.closed


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "either env_id: FrozenLake-v1, or factory"),
        ({"env_id": "a", "factory": Line}, "either env_id: FrozenLake-v1, or factory"),
        ({"factory": Waves}, "Waves has actions of type Box"),
        ({"factory": Pixels}, "Pixels has image observations; set format_observation"),
        ({"factory": Line, "kwargs": {"nope": 1}}, "cannot be played: TypeError"),
        ({"factory": "nowhere.Game"}, "No module named 'nowhere'"),
        (
            {"factory": Line, "action_names": ["a", "A"]},
            "Line has 2 actions, each with its own name",
        ),
        ({"factory": Line, "action_names": ["two words", "b"]}, "a name must be one word"),
        ({"factory": Line, "action_pattern": "("}, "not a regular expression"),
        ({"factory": Line, "action_pattern": "a"}, "put the action in"),
    ],
)
def test_what_cannot_be_played_by_texts_is_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        TextEnv(**settings)
