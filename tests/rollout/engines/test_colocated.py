"""VLLM in the same process, by a stand-in for its class; tests/vllm runs the real one on a CPU."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from litgrpo.models.loading import load_policy
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.vllm import ColocatedEngine
from tests.rollout.engines.vllm_stand_in import StandIn
from tests.support.engines import ragged
from tests.support.models import tiny_policy
from tests.support.server import requests_for
from tests.support.turns_support import ending, played, requests_of


class LLM:
    """Samples as the server's stand-in does."""

    def __init__(self, model, **given):
        self.given, self.did = given, []
        self.behind = SimpleNamespace(policy=load_policy(model).eval(), version="", mode="")
        self.behind.alter = None

    def generate(self, prompts, params, *, use_tqdm):
        self.did.append("generate")
        return [self.one(p["prompt_token_ids"], q) for p, q in zip(prompts, params, strict=True)]

    def one(self, ids, params):
        found = StandIn.sampled(self.behind, {"token_ids": ids, "sampling_params": params})
        (choice,) = found["choices"]
        logprobs = [
            {each["token_id"]: SimpleNamespace(logprob=each["logprob"])}
            for each in choice["logprobs"]["content"]
        ]
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=choice["token_ids"], logprobs=logprobs)]
        )

    def collective_rpc(self, method, kwargs):
        self.did.append(method)
        self.behind.policy = load_policy(kwargs["weights_path"]).eval()

    def reset_prefix_cache(self):
        self.did.append("reset")

    def wake_up(self):
        self.did.append("wake")

    def sleep(self, level):
        self.did.append("sleep")


@pytest.fixture
def vllm(monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, dict
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "")


def gap(policy, rollout):
    off = policy.logprobs(rollout.tokens).logprobs - rollout.sampler_logprobs
    return float(off.detach().abs().masked_fill(~rollout.loss_mask, 0).max())


def test_it_samples_with_the_weights_of_the_last_publish_and_sleeps_between(vllm):
    policy, engine = ragged(tiny_policy("qwen2")), ColocatedEngine()
    engine.sync_weights(policy, 0)
    assert gap(policy, engine.generate(requests_for(policy))) < 1e-5
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(1.5)
    assert gap(policy, engine.generate(requests_for(policy))) > 1e-2
    engine.sync_weights(policy, 1)
    assert gap(policy, engine.generate(requests_for(policy))) < 1e-5
    sampled, read = ["wake", "generate", "sleep"], ["wake", "reload_weights", "reset", "sleep"]
    assert engine.llm.did == sampled * 2 + read + sampled
    assert engine.llm.given["logprobs_mode"] == "processed_logprobs"
    assert not engine.exact_logprobs


def test_rows_that_have_heard_are_sampled_together(vllm):
    policy, engine = ending(tiny_policy("qwen2")), ColocatedEngine(enable_sleep_mode=False)
    engine.sync_weights(policy, 0)
    asked = requests_of(policy)
    found = played(engine, asked)
    assert int(found.turns.max()) == int(played(LocalEngine(), asked).turns.max())
    assert gap(policy, found) < 1e-5
    assert engine.llm.did == ["generate"] * (int(found.turns.max()) + 1)


def test_without_vllm_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "")
    policy, engine = tiny_policy("qwen2"), ColocatedEngine()
    engine.sync_weights(policy, 0)
    with pytest.raises(ValueError, match="ColocatedEngine needs vLLM in this environment"):
        engine.generate(requests_for(policy))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"max_model_len": 0}, "is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        ColocatedEngine(**settings)
