"""The real client of the OpenAI API, and a library for agents on top of it."""

import pytest

from litgrpo.environments.agent import Agent
from tests.support.agent_rollouts import (
    GROUP,
    ScriptedEngine,
    agent_episodes,
    chat_policy,
    play_agents,
    template_format,
)
from tests.support.chat_templates import QWEN

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call><end>'


def script(prompt):
    return "It is 42.<end>" if "<tool_response>\n42" in prompt else CALL


def play_with_tools(*agents):
    """Tool calls of a scripted policy with a chat template."""
    policy = chat_policy(QWEN)
    given = {"turn_format": "template", "max_turn_tokens": 128}
    agent = Agent("tests.support.openai_agents.solve")
    episodes = agent_episodes(agent, template_format(policy), **given)
    engine = ScriptedEngine(script, policy.eos_ids[0])
    try:
        return play_agents(episodes, *agents, policy=policy, length=512, engine=engine)
    finally:
        episodes.close()


def check_tool_episodes(rollout, agents):
    assert [each.failed for each in rollout.episodes] == [""] * GROUP * agents
    assert rollout.completions == ["It is 42."] * GROUP * agents
    assert not rollout.segments.any()  # what the client sends back continues the first call
    assert (rollout.turns.amax(1) == 1).all()
    assert [each.calls for each in rollout.episodes] == [{"multiply": (1, 0)}] * GROUP * agents
    for row, episode in enumerate(rollout.episodes):
        roles = [message["role"] for message in episode.messages]
        assert roles == ["assistant", "tool", "assistant"]
        assert rollout.turns[row].unique_consecutive()[:3].tolist() == [0, -1, 1]


def test_tools_and_streams_of_the_client_are_one_segment():
    check_tool_episodes(play_with_tools("with_tools", "with_streams"), 2)


def test_parallel_calls_choices_and_errors_of_the_async_client():
    rollout = play_with_tools("in_parallel")
    assert [each.failed for each in rollout.episodes] == ["", ""]
    assert rollout.turn_rewards[:, -1].tolist() == [1.0, 1.0]
    assert (rollout.turns.amax(1) == 3).all()
    assert rollout.completions == ["done", "done"]


def test_a_library_for_agents_is_one_segment():
    pytest.importorskip("agents", reason="openai-agents is not installed")
    check_tool_episodes(play_with_tools("with_library"), 1)
