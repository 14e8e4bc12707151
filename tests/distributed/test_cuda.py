"""The static engine's step, recorded and replayed: here by a recorder that needs no device."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from litgrpo.distributed.cuda import MOST_KEPT, Replayed
from litgrpo.distributed.device import Backend
from litgrpo.rollout.engines import static as static_engine
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.static import StaticEngine
from litgrpo.rollout.sampling import Sampling
from tests.support.engines import GROUP, TEXTS, assert_same, spread_lengths, uniforms_for
from tests.support.models import prompt_batch, tiny_policy
from tests.support.static import ENGINE, said

GPU = torch.device("cuda")
ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


def record(run):
    """Imitate a CUDA graph, whose replays read the same inputs and write the same results."""
    run()  # a first run, whose writes must not matter
    results = run()

    def again():
        for result, new in zip(tree_leaves(results), tree_leaves(run()), strict=True):
            result.copy_(new)

    return again, results


@pytest.fixture
def replayed(monkeypatch):
    """Let the static engine replay, as on a device that can record."""
    step = Replayed(static_engine._decode_step, record)

    class Recording(Backend):
        def compile(self, function, *, replay=False):
            return step if replay else function

    monkeypatch.setattr(static_engine, "backend", Recording)
    return step


def test_replayed_steps_say_what_the_local_engine_says_also_with_new_weights(
    architecture, replayed
):
    policy = spread_lengths(tiny_policy(architecture))
    for _ in range(3):
        assert_same(said(policy, ENGINE), said(policy, LocalEngine()))
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(1.01)  # in place, as an optimizer does
    assert len(replayed.kept[policy]) == 1


def test_other_prompts_settings_or_weights_elsewhere_are_other_recordings(replayed):
    policy = spread_lengths(tiny_policy("qwen2"))
    cases = [(["A", "bc"], Sampling()), (["A"], Sampling()), (["A"], Sampling(top_k=3))]
    for number, (texts, sampling) in enumerate(cases, start=1):
        assert_same(
            said(policy, ENGINE, sampling, texts), said(policy, LocalEngine(), sampling, texts)
        )
        assert len(replayed.kept[policy]) == number
    for weight in policy.parameters():
        weight.data = weight.data.clone()
    assert_same(said(policy, ENGINE), said(policy, LocalEngine()))
    with torch.autocast("cpu", torch.bfloat16):
        said(policy, ENGINE)
    assert len(replayed.kept[policy]) == MOST_KEPT
    assert_same(said(policy, ENGINE), said(policy, LocalEngine()))


def test_a_rollout_stays_as_it_is_while_the_next_one_is_sampled(replayed):
    policy = spread_lengths(tiny_policy("qwen2"))
    first, numbers = prompt_batch(*TEXTS), uniforms_for(prompt_batch(*TEXTS))
    rollout = ENGINE.generate(RolloutRequest(policy, first, GROUP, numbers, Sampling(top_k=20)))
    kept = [each.clone() for each in (rollout.completion_ids, rollout.sampler_logprobs)]
    candidate_ids = rollout.candidate_ids.clone()
    other = ENGINE.generate(RolloutRequest(policy, first, GROUP, 1 - numbers, Sampling(top_k=20)))
    assert len(replayed.kept[policy]) == 1
    assert not torch.equal(other.completion_ids[:, :1], rollout.completion_ids[:, :1])
    assert torch.equal(rollout.completion_ids, kept[0])
    assert torch.equal(rollout.sampler_logprobs, kept[1])
    assert torch.equal(rollout.candidate_ids, candidate_ids)


def test_only_the_newest_recordings_are_kept_and_none_of_a_module_that_is_gone():
    def forgetful(run):
        return (lambda: None), run()  # as a graph, which knows addresses and no objects

    step, module = Replayed(lambda module, x: x + 1, forgetful), nn.Linear(1, 1)
    for size in range(1, MOST_KEPT + 3):
        assert step(module, torch.ones(size)).tolist() == [2.0] * size
    assert len(step.kept[module]) == MOST_KEPT
    del module
    assert not step.kept


def test_nothing_is_recorded_where_it_is_switched_off(replayed):
    said(tiny_policy("qwen2"), StaticEngine(prompt_buckets=8, cuda_graphs=False))
    assert not replayed.kept


@ON_A_GPU
@pytest.mark.parametrize("engine", [ENGINE, LocalEngine()])
def test_a_gpu_says_what_the_processor_says(architecture, engine):
    policy, prompts = spread_lengths(tiny_policy(architecture)), prompt_batch(*TEXTS)
    expected, numbers = said(policy, LocalEngine()), uniforms_for(prompts)
    policy.to(GPU)
    for _ in range(2):  # recorded, and replayed
        found = engine.generate(RolloutRequest(policy, prompts.to(GPU), GROUP, numbers, Sampling()))
        assert torch.equal(found.completion_ids.cpu(), expected.completion_ids)
        assert torch.allclose(
            found.sampler_logprobs.cpu(), expected.sampler_logprobs, rtol=0, atol=1e-4
        )
