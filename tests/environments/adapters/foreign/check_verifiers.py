"""A taskset of verifiers, played by its `null` harness, which uv starts as a process."""

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from litgrpo.data import VerifiersTasks
from litgrpo.environments import Verifiers
from litgrpo.environments.base import EnvironmentFailure
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.episodes import RolloutKey
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from tests.support.agent_rollouts import (
    GROUP,
    ScriptedEngine,
    agent_episodes,
    chat_policy,
    template_format,
)
from tests.support.chat_templates import QWEN
from tests.support.models import prompt_batch

pytest.importorskip("verifiers.v1")
HERE = Path(__file__).parent
TASKSET = {"id": "word-sums"}
SEAT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
ENV = {"taskset": TASKSET, "agent": SEAT}


@pytest.fixture(autouse=True)
def found_taskset(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def play(rows, script, env=ENV):
    policy = chat_policy(QWEN)
    settings = {"turn_format": "template", "max_turn_tokens": 128, "timeout_s": 300}
    agent = pickle.loads(pickle.dumps(Verifiers(env=env)))
    episodes = agent_episodes(agent, template_format(policy), **settings)
    prompts = prompt_batch(*[row["prompt"] for row in rows])
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = replace(prompts, columns=columns)
    uniforms = draw_uniforms(0, "train", 0, prompts.index, GROUP, 256)
    request = RolloutRequest(policy, prompts, GROUP, uniforms, Sampling())
    engine = ScriptedEngine(script, policy.eos_ids[0])
    try:
        return policy, episodes.play(engine, request, RolloutKey(0, "train", 0, 0))
    finally:
        episodes.close()


def test_tasks_become_rows():
    rows = VerifiersTasks(TASKSET, select={"skip": 1, "limit": 2}).rows()
    assert [row["prompt"] for row in rows] == ["q1?", "q2?"]
    assert '"answer":"1 and one"' in rows[0]["task_data"]


@pytest.mark.skipif(not shutil.which("uv"), reason="uv is not installed")
def test_the_harness_of_verifiers_is_the_agent_and_its_score_the_reward():
    rows = VerifiersTasks(TASKSET, select={"limit": 2}).rows()
    policy, rollout = play(rows, lambda prompt: "It is 1 and one.<end>")
    assert [each.failed for each in rollout.episodes] == [""] * 2 * GROUP
    assert rollout.completions == ["It is 1 and one."] * 2 * GROUP
    assert rollout.turn_rewards.nansum(1).tolist() == [0.0] * GROUP + [1.0] * GROUP
    ids = rollout.completion_ids[0][rollout.loss_mask[0]]
    assert policy.tokenizer.decode(ids).startswith("It is 1 and one.")
    assert torch.equal(rollout.segments, torch.zeros_like(rollout.segments))


def test_rows_of_other_data_and_wrong_settings_are_refused():
    with pytest.raises(EnvironmentFailure, match="no column 'task_data'"):
        play([{"prompt": "q0?"}], lambda prompt: "x<end>")
    for env, why in (
        ({"taskset": {"id": "no-such"}}, "no-such"),
        ({"taskset": {"id": "word-sums", "lenght": 3}}, "lenght"),
        ({}, "must have the id of an installed taskset"),
    ):
        with pytest.raises(ValueError, match=why):
            Verifiers(env=env)
    with pytest.raises(ValueError, match="limt"):
        VerifiersTasks(TASKSET, select={"limt": 1}).rows()
