"""Turns of any length and content are observations or failed calls, never an error."""

import pytest

from litgrpo.environments import Tools
from litgrpo.environments.adapters.skyrl import SkyRL
from litgrpo.environments.base import StepResult
from litgrpo.environments.examples import NumberGame, calculate
from tests.environments.adapters.test_gymnasium_env import line
from tests.environments.adapters.test_openenv import echo
from tests.environments.adapters.test_skyrl import EXTRAS, Sum

LONG = 1_000_000
TURNS = {
    "nothing": "",
    "a million characters": "1 and (" * (LONG // 7),
    "a million digits": "7" * LONG,
    "strange characters": "\x00\u202e\ud800\U0001f600\u0661\u00b2\uff17\n\r\x1b[2J" * 20,
    "deep JSON": '<tool_call>{"name": "f", "arguments": ' + "[" * 5_000,
    "a deep call": "<call>calculate" + "(" * 5_000,
}
GAMES = {
    "gymnasium": line,
    "OpenEnv": echo,
    "OpenEnv with JSON": lambda: echo(observation_field=None, action_field=""),
    "SkyRL-Gym": lambda: SkyRL(factory=Sum, extras_from_columns=EXTRAS),
    "number game": NumberGame,
    **{
        f"tools, {name}": lambda name=name: Tools([calculate], call_format=name)
        for name in ("hermes", "tags", "python")
    },
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("name", GAMES)
def test_no_turn_breaks_an_environment(name, turn):
    if (name, turn) == ("OpenEnv", "nothing"):
        pytest.skip("the stand-in rejects an empty message")
    game = GAMES[name]()
    game.reset({"prompt": "Play.", "answer": "4"}, seed=1)
    assert isinstance(game.step(TURNS[turn]), StepResult)
