"""Tests of the engine interface: its defaults and the capabilities that engines state."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from jsonargparse import ArgumentParser

from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.static import StaticEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.servers.vllm import ColocatedEngine, ServerEngine
from tests.support.models import prompt_batch, tiny_policy

ADDRESS = "http://127.0.0.1:8000"


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
    assert engine.samples_in == "trainer"
    assert not engine.allows
    assert engine.max_rows is None
    assert engine.addresses == ()
    assert len(engine.generate(requests).completion_ids) == requests.num_rows == 6


def test_generate_must_be_defined():
    with pytest.raises(TypeError, match="abstract"):
        RolloutEngine()


def test_requests_are_immutable():
    with pytest.raises(FrozenInstanceError):
        requests_for().group_size = 1


@pytest.mark.parametrize(
    ("engine", "place", "exact", "max_rows", "allowed"),
    [
        (LocalEngine(), "trainer", True, None, {"episodes"}),
        (LocalEngine(max_rows=6), "trainer", True, 6, {"episodes"}),
        (LocalEngine(dtype="bfloat16"), "trainer", False, None, {"episodes"}),
        (StaticEngine(), "trainer", True, None, {"static shapes"}),
        (ColocatedEngine(), "colocated", False, None, {"episodes"}),
        (ServerEngine([ADDRESS]), "servers", False, None, {"episodes", "in-flight updates"}),
    ],
)
def test_engines_say_what_they_are(engine, place, exact, max_rows, allowed):
    assert engine.samples_in == place
    assert engine.exact_logprobs == exact
    assert engine.max_rows == max_rows
    assert engine.allows == allowed
    assert engine.addresses == ((ADDRESS,) if place == "servers" else ())


OTHER = "tests.support.other_server.OtherEngine"
ENGINES = [
    *(f"litgrpo.{name}" for name in ("LocalEngine", "StaticEngine", "ColocatedEngine")),
    *("litgrpo.ServerEngine", OTHER),
]


@pytest.mark.parametrize("name", ENGINES)
def test_recipes_check_the_types_of_all_options(name, capsys):
    parser = ArgumentParser()
    parser.add_subclass_arguments(RolloutEngine, "engine")
    with pytest.raises(SystemExit):
        parser.parse_args(["--engine.help", name])
    page = capsys.readouterr().out
    assert "type: " in page
    assert "Unvalidated" not in page


@pytest.mark.parametrize("name", ["ServerEngine", OTHER])
def test_options_that_an_engine_inherits_are_explained(cli, name):
    code, page, _ = cli("fit", "--model.engine.help", name)
    assert code == 0
    assert "addresses of the servers" in page
