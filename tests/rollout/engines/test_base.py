"""Tests of the engine interface: its defaults and the capabilities that engines state."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.static import StaticEngine
from litgrpo.rollout.sampling import Sampling
from tests.support.models import prompt_batch, tiny_policy


class MinimalEngine(RolloutEngine):
    """The least that an engine must define."""

    def generate(self, requests):
        return LocalEngine().generate(requests)


def requests_for(num_prompts=2, group_size=3, length=4):
    prompts = prompt_batch(*"ab"[:num_prompts])
    uniforms = torch.zeros(num_prompts * group_size, length, dtype=torch.float64)
    return RolloutRequest(tiny_policy("qwen2"), prompts, group_size, uniforms, Sampling())


def test_an_engine_only_has_to_define_generate():
    engine, requests = MinimalEngine(), requests_for()
    engine.sync_weights(requests.policy, 0)
    assert engine.exact_logprobs
    assert not engine.static_shapes
    assert engine.max_rows is None
    assert not engine.supports_episodes
    assert len(engine.generate(requests).completion_ids) == requests.num_rows == 6


def test_generate_must_be_defined():
    with pytest.raises(TypeError, match="abstract"):
        RolloutEngine()


def test_requests_are_immutable():
    with pytest.raises(FrozenInstanceError):
        requests_for().group_size = 1


@pytest.mark.parametrize(
    ("engine", "exact", "static_shapes", "max_rows", "episodes"),
    [
        (LocalEngine(), True, False, None, True),
        (LocalEngine(max_rows=6), True, False, 6, True),
        (LocalEngine(dtype="bfloat16"), False, False, None, True),
        (StaticEngine(), True, True, None, False),
    ],
)
def test_engines_state_their_capabilities(engine, exact, static_shapes, max_rows, episodes):
    assert engine.exact_logprobs == exact
    assert engine.static_shapes == static_shapes
    assert engine.max_rows == max_rows
    assert engine.supports_episodes == episodes
