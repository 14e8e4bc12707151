"""Scripted policies act as named, in the tool-call format of the environment."""

import pytest

from litgrpo.audit.policies import Game, call_texts, list_policies, text_of
from litgrpo.environments import Tools
from litgrpo.environments.examples import NumberGame
from litgrpo.environments.tool_calls import HermesFormat, TagFormat, format_of


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
def test_calls_fit_the_schema_in_every_format(calls):
    environment = Tools([add], call_format=calls)
    environment.reset({}, 0)
    result = environment.step(call_texts(environment))
    assert result.calls["add"] == (1, 0)
    assert "1" in text_of(result.observation)
    assert format_of(calls)


def test_policies_need_tools_samples_or_answers():
    names = [
        policy.name for policy in list_policies(NumberGame(), has_samples=False, has_answers=False)
    ]
    assert {"gives empty turns", "copies the observation", "strange characters"} < {*names}
    assert not {"calls without end", "repeats a first turn", "gives the reference answer"} & {
        *names
    }
    every = list_policies(Tools([add]), has_samples=True, has_answers=True)
    game = Game("What?", sample=["7", "8"], answer="9", observations=["low", "high"])
    turns = {policy.name: policy.respond(game) for policy in every}
    assert turns["repeats a first turn"] == "7"
    assert turns["gives the reference answer"] == "9 <answer>9</answer>"
    assert turns["copies the observation"] == "high"
    assert "²" in turns["strange characters"]
