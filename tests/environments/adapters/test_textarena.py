"""TextArena by a stand-in with its signatures."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from litgrpo.environments.adapters.textarena import TextArena, without_echo


class Game:
    """Says higher until [3]; the second invalid move ends it. Observations accumulate."""

    def __init__(self, players):
        self.players = players

    def reset(self, num_players, seed):
        assert num_players == self.players, f"The number of players has to be {self.players}"
        info = {0: {"invalid_move": False}}
        self.state = SimpleNamespace(error_count=0, game_info=info)
        self.said = f"\n[GAME] seed {seed}"

    def get_observation(self):
        return 0, self.said

    def step(self, action):
        self.said += f"\n[Player] [{action.strip('[]')}]"
        if "x" in action:
            over = self.state.error_count == 1
            self.state.game_info[0]["invalid_move"] = over
            self.state.error_count = 1
            self.said += "\n[GAME] invalid"
            return over, {}
        self.state.error_count = 0
        self.said += "\n[GAME] higher"
        return action == "[3]", {}

    def close(self):
        return {0: 1.0}, {}


@pytest.fixture(autouse=True)
def arena(monkeypatch):
    module = ModuleType("textarena")
    games = {"Guess-v0": 1, "Chess-v0": 2}
    module.make = lambda name, **kwargs: Game(games[name], **kwargs)
    monkeypatch.setitem(sys.modules, "textarena", module)


def test_only_what_is_new_is_heard_without_the_policys_own_words():
    game = TextArena("Guess-v0")
    assert game.reset({"prompt": "Play."}, seed=5) == "\n\n[GAME] seed 5"
    heard = game.step("1")
    assert (heard.observation, heard.reward, heard.done) == ("[GAME] higher", 0.0, False)
    heard = game.step("[3]")
    assert (heard.observation, heard.reward, heard.done) == ("", 1.0, True)


def test_invalid_moves_are_failed_calls():
    game = TextArena("Guess-v0")
    game.reset({}, seed=5)
    assert game.step("x").calls == {"action": (1, 1)}
    assert game.step("1").calls == {"action": (1, 0)}
    game.step("x")
    heard = game.step("x")
    assert (heard.calls, heard.done) == ({"action": (1, 1)}, True)


def test_an_echo_is_left_out_only_as_a_whole_line():
    assert without_echo("\n[P] [up]\n[GAME] ok", "up") == "\n[GAME] ok"
    assert without_echo("\n[P] [up]", "[up]") == ""
    assert without_echo("\n[GAME] upper", "up") == "\n[GAME] upper"


@pytest.mark.parametrize(
    ("name", "why"),
    [("Chess-v0", "for one player cannot be played: .*has to be 2"), ("No-v0", "KeyError")],
)
def test_games_of_several_players_and_unknown_ones_are_refused(name, why):
    with pytest.raises(ValueError, match=why):
        TextArena(name)
