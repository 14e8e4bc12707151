"""The agent of a recipe: its settings, results, and commands."""

import sys

import pytest

from litgrpo.algorithms.objective import Objective
from litgrpo.environments.agent import (
    MAX_OUTPUT,
    Agent,
    AgentRequest,
    AgentResult,
    read_output,
    run_agent,
)
from litgrpo.environments.agent_examples import run_calculator
from litgrpo.environments.base import FailedEpisode
from litgrpo.rollout.episodes import EpisodeSettings
from tests.support.training import module

REQUEST = AgentRequest({"prompt": "6*7?", "answer": 42}, 3, "http://127.0.0.1:1/v1", "key")
INLINE = {"turn_format": "inline"}


def run(agent, request=REQUEST):
    return run_agent(agent, request, None)


def test_what_an_agent_returns_becomes_reward_and_completion():
    assert AgentResult.read(None) == AgentResult()
    assert AgentResult.read("42") == AgentResult(None, "42")
    assert AgentResult.read(True) == AgentResult(1.0)
    assert AgentResult.read({"completion": "42"}) == AgentResult(None, "42")
    assert AgentResult.read("x" * MAX_OUTPUT).completion == "x" * MAX_OUTPUT
    for large in ("x" * (MAX_OUTPUT + 1), {"completion": "x" * (MAX_OUTPUT + 1), "reward": 1}):
        with pytest.raises(ValueError, match="more than 1,000,000 characters"):
            AgentResult.read(large)
    for bad in (
        float("nan"),
        float("inf"),
        [1.0],
        {"score": 1},
        {"completion": 42},
        {"reward": "x"},
    ):
        with pytest.raises((ValueError, TypeError)):
            AgentResult.read(bad)
    assert read_output(' {"reward": 1, "completion": "42"}\n') == AgentResult(1.0, "42")
    assert read_output("{42}\n") == AgentResult(None, "{42}")
    assert read_output("") == AgentResult(None, "")


def test_functions_get_row_address_and_key_and_equal_random_numbers():
    import os
    import random

    def give(row, base_url, api_key):
        assert (os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]) == (base_url, api_key)
        return f"{row['prompt']} {base_url} {api_key} {random.random()}"

    async def later(row, base_url, api_key):
        return give(row, base_url, api_key)

    one = run(Agent(give))
    assert one.completion.startswith("6*7? http://127.0.0.1:1/v1 key 0.")
    assert run(Agent(later)) == one
    assert run(Agent(give), REQUEST._replace(seed=4)) != one


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import json, sys; print(json.load(sys.stdin)['answer'])", AgentResult(None, "42")),
        ("import os; print(os.environ['OPENAI_API_KEY'])", AgentResult(None, "key")),
        ("print('{\"reward\": 0.5}')", AgentResult(0.5)),
        ("raise SystemExit(3)", FailedEpisode("exited with 3")),
        ("import os; os.kill(os.getpid(), 9)", FailedEpisode("died of signal 9")),
        ("print('x' * 2_000_000)", FailedEpisode("printed more than 1,000,000 bytes")),
    ],
)
def test_commands_read_the_row_and_print_their_answer(code, expected):
    found = run(Agent(command=[sys.executable, "-c", code]))
    if isinstance(expected, FailedEpisode):
        assert isinstance(found, FailedEpisode)
        assert expected.reason in found.reason
    else:
        assert found == expected


def test_a_command_that_cannot_be_started_fails_its_row():
    assert "no-such-program" in run(Agent(command=["no-such-program"])).reason


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "either function .* or command"),
        ({"function": "json.dumps", "command": ["x"]}, "either function .* or command"),
        ({"function": "json.nothing"}, "function 'json.nothing'"),
        ({"function": "json.__doc__"}, "must be a function"),
        ({"function": "json.dumps", "call_format": "xml"}, "call_format is 'xml'"),
        ({"function": "json.dumps", "max_prompt_tokens": 0}, "max_prompt_tokens is 0"),
    ],
)
def test_settings_that_are_not_allowed_raise(arguments, said):
    with pytest.raises(ValueError, match=said):
        Agent(**arguments)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"episode": EpisodeSettings(**INLINE, on_timeout="reply")}, "episode.on_timeout"),
        ({"episode": EpisodeSettings(**INLINE, max_observation_tokens=9)}, "observation_tokens"),
        ({"episode": EpisodeSettings(**INLINE, num_workers=0)}, "num_workers is 0"),
        ({"objective": Objective(observation_nll_coef=0.1)}, "observation_nll_coef is 0.1"),
    ],
)
def test_settings_without_an_effect_on_agents_raise(settings, said):
    with pytest.raises(ValueError, match=said):
        module(environment=Agent("tests.support.agents.once"), **settings)


def test_an_encoder_decoder_model_raises():
    episode = EpisodeSettings(**INLINE)
    grpo = module("t5", environment=Agent("tests.support.agents.once"), episode=episode)
    with pytest.raises(ValueError, match="decoder-only"):
        grpo.configure_model()


def test_the_calculator_of_the_example_agent_survives_any_arguments():
    assert run_calculator({"expression": "6*7"}) == "42"
    assert run_calculator({}) == "error"
