"""Shared by tests of multi-turn decoding."""

import torch

from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.episodes import RolloutKey
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from tests.support.models import prompt_batch
from tests.support.playing import Echo, episodes_of

TEXTS, GROUP, LENGTH = ("a", "hello there", "what is it?"), 3, 96


KEY = RolloutKey(0, "train", 0, 0)


def ending(policy):
    """Its turns end early, here and there."""
    policy.eos_ids = tuple(range(2, 259, 9))
    return policy


def requests_of(policy, sampling=None, length=LENGTH, **settings):
    prompts = prompt_batch(*TEXTS)
    uniforms = draw_uniforms(3, "train", 0, prompts.index, GROUP, length)
    return RolloutRequest(policy, prompts, GROUP, uniforms, sampling or Sampling(), **settings)


def play_turns(engine, requests, pool=None, **settings):
    return episodes_of(pool or Echo(), **settings).play(engine, requests, KEY)


def assert_same(found, expected):
    for name in ("completion_ids", "completion_mask", "loss_mask", "turns", "truncated"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    gap = (found.sampler_logprobs - expected.sampler_logprobs).abs()
    assert gap.max() < 1e-4
    if expected.candidate_ids is not None:
        both = (each.candidate_ids.sort(2).values for each in (found, expected))
        assert torch.equal(*both)
    assert torch.equal(found.turn_rewards.nan_to_num(-1), expected.turn_rewards.nan_to_num(-1))
    states = [[each.turn_states for each in rollout.episodes] for rollout in (found, expected)]
    assert states[0] == states[1]
    assert [each.messages for each in found.episodes] == [
        each.messages for each in expected.episodes
    ]
    assert [each.spans for each in found.episodes] == [each.spans for each in expected.episodes]
    assert found.completions == expected.completions
