"""The static engine on torch_xla's processor back-end: same tokens, compiled once, few reads."""

import pytest
import torch

from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.static import StaticEngine
from litgrpo.rollout.sampling import Sampling, draw_tokens, draw_uniforms
from tests.support.models import prompt_batch, tiny_policy
from tests.support.reference_engine import ReferenceEngine
from tests.xla.own_process import own_process

TEXTS = ("a", "what is 3+4?", "hello", "xy")
GROUP, LENGTH, LOOK_EVERY = 3, 32, 8
ENGINE = StaticEngine(prompt_buckets=16, sync_every_tokens=LOOK_EVERY)


def pair(architecture: str) -> tuple[Policy, Policy]:
    """The same random policy on the host and on the device; some rows end early."""
    import torch_xla

    policies = tiny_policy(architecture), tiny_policy(architecture)
    for policy in policies:
        policy.eos_ids = tuple(range(2, 10))
    policies[1].model.to(torch_xla.device())
    torch_xla.sync()
    return policies


def rollout(policy, engine, sampling, texts=TEXTS, iteration=0):
    prompts = prompt_batch(*texts)
    uniforms = draw_uniforms(7, "train", iteration, prompts.index, GROUP, LENGTH)
    return engine.generate(RolloutRequest(policy, prompts, GROUP, uniforms, sampling))


def assert_agree(plain, static):
    """Same tokens, but for at most one in a thousand after a tie at rounding."""
    used = plain.completion_ids.shape[1]
    same = (plain.completion_ids == static.completion_ids[:, :used]).long().cumprod(1).bool()
    mask = plain.completion_mask
    assert (same & mask).sum() >= 0.999 * mask.sum()
    gap = (plain.sampler_logprobs - static.sampler_logprobs[:, :used]).abs()
    assert gap[same].max() < 1e-4
    whole = same.all(1)
    assert torch.equal(plain.lengths[whole], static.lengths[whole])
    assert torch.equal(plain.truncated[whole], static.truncated[whole])
    assert static.completion_ids.shape == (len(TEXTS) * GROUP, LENGTH)
    if plain.candidate_ids is not None:
        pairs = zip(plain.candidate_ids[whole], static.candidate_ids[whole, :used], strict=True)
        for one, other in pairs:
            for some, others in zip(one.tolist(), other.tolist(), strict=True):
                assert set(some) | {-1} == set(others) | {-1}


def count(metric: str) -> int:
    """Return the number of events of a torch-xla metric so far."""
    from torch_xla.debug import metrics

    found = metrics.metric_data(metric)
    return 0 if found is None else found[0]


@pytest.mark.parametrize("architecture", ["gemma2", "qwen2", "gpt2", "t5"])
@own_process()
def test_the_device_generates_the_tokens_of_the_reference_engine_on_the_host(architecture):
    host, device = pair(architecture)
    for sampling in (Sampling(temperature=0.7), Sampling(top_k=20, top_p=0.9)):
        static = rollout(device, ENGINE, sampling)
        assert_agree(rollout(host, ReferenceEngine(), sampling), static)
        for tensor in (static.completion_ids, static.sampler_logprobs, static.prompts.prompt_ids):
            assert tensor.device.type == "cpu"


@pytest.mark.parametrize("architecture", ["gemma2", "t5"])
@own_process()
def test_twenty_rollouts_compile_nothing_and_rarely_read_from_the_device(architecture):
    import torch_xla
    from torch_xla.debug import metrics

    policies = pair(architecture)
    host, device = policies
    rollout(device, ENGINE, Sampling())
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for number in range(20):
        texts = [("what is it? " * 2)[: (3 * number + 5 * row) % 15] for row in range(len(TEXTS))]
        for policy in policies:  # as an optimizer does
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(0.99)
        torch_xla.sync()
        compilations, reads = count("CompileTime"), count("TransferFromDeviceTime")
        metrics.clear_counters()
        static = rollout(device, ENGINE, Sampling(), texts, number)
        assert count("CompileTime") == compilations
        assert count("TransferFromDeviceTime") - reads <= -(-LENGTH // LOOK_EVERY) + 2
        fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
        assert set(fallbacks) <= {"aten::_local_scalar_dense"}  # the looks
        if number % 5 == 4:
            assert_agree(rollout(host, ReferenceEngine(), Sampling(), texts, number), static)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@own_process()
def test_draws_from_a_large_vocabulary_are_those_of_the_host():
    import torch_xla
    from torch_xla.debug import metrics

    logits = torch.randn(64, 50_257, generator=torch.Generator().manual_seed(0)) * 2
    uniforms = draw_uniforms(0, "train", 0, torch.arange(1), 1, 64)[0]
    device = torch_xla.device()
    for sampling in (Sampling(), Sampling(top_k=64, top_p=0.9, min_p=0.01)):
        plain = draw_tokens(logits, uniforms, sampling)
        there = logits.to(device), uniforms.to(device)
        metrics.clear_counters()
        static = draw_tokens(*there, sampling, static_shapes=True)
        assert torch.equal(static.tokens.cpu(), plain.tokens)
        torch.testing.assert_close(static.logprobs.cpu(), plain.logprobs, atol=1e-5, rtol=1e-5)
        assert not [name for name in metrics.counter_names() if name.startswith("aten::")]
