"""Policies that play no game say what their names say, in the format that an environment reads."""

import pytest

from litgrpo.environments import Tools
from litgrpo.environments.examples import NumberGame
from litgrpo.environments.tool_calls import HermesFormat, TagFormat, format_of
from litgrpo.tools.audit.policies import Game, call_texts, scripted, text_of


def add(a: int, names: list[str], how: str = "up") -> int:
    """Add.

    Args:
        a: a number
        names: some texts
        how: (choices: ["up", "down"])
    """
    return a + len(names)


@pytest.mark.parametrize(
    "calls", ["hermes", "tags", "python", HermesFormat("use"), TagFormat("calc", "out")]
)
def test_a_call_without_sense_fits_the_schema_in_every_format(calls):
    environment = Tools([add], call_format=calls)
    environment.reset({}, 0)
    heard = environment.step(call_texts(environment))
    assert heard.calls["add"] == (1, 0)
    assert "1" in text_of(heard.observation)
    assert format_of(calls)


def test_policies_are_those_that_there_is_something_to_say_for():
    names = [policy.name for policy in scripted(NumberGame(), sampled=False, answers=False)]
    assert {"says nothing", "copies what it hears", "deep JSON"} < {*names}
    assert not {"calls without end", "repeats a first turn", "says the answer"} & {*names}
    every = scripted(Tools([add]), sampled=True, answers=True)
    game = Game("What?", sample=["7", "8"], answer="9", heard=["low", "high"])
    said = {policy.name: policy.says(game) for policy in every}
    assert said["repeats a first turn"] == "7"
    assert said["says the answer"] == "9 <answer>9</answer>"
    assert said["copies what it hears"] == "high"
    assert len(said["a million digits"]) == 1_000_000
