"""Shared by tests of rollout.engines.engines."""

from contextlib import contextmanager
from dataclasses import replace

import torch

from litgrpo.rollout.sampling import draw_uniforms

TEXTS = ("a", "what is 3+4?", "hello", "xy")


GROUP, LENGTH = 3, 12


def spread_lengths(policy):
    """Many end tokens, so that completions have different lengths."""
    policy.eos_ids = tuple(range(2, 40))
    return policy


def uniforms_for(prompts, group_size=GROUP, length=LENGTH):
    return draw_uniforms(11, "train", 0, prompts.index, group_size, length)


def trim_unused(rollout):
    """Cut the columns without tokens, which static shapes keep."""
    columns = slice(0, int(rollout.lengths.max()))
    names = ("completion_ids", "completion_mask", "sampler_logprobs")
    parts = {name: getattr(rollout, name)[:, columns] for name in names}
    candidate_ids = None if rollout.candidate_ids is None else rollout.candidate_ids[:, columns]
    return replace(rollout, **parts, candidate_ids=candidate_ids)


def assert_same(one, other, tolerance=1e-5):
    one, other = trim_unused(one), trim_unused(other)
    assert torch.equal(one.completion_ids, other.completion_ids)
    assert torch.equal(one.completion_mask, other.completion_mask)
    assert torch.equal(one.truncated, other.truncated)
    logprobs = one.sampler_logprobs, other.sampler_logprobs
    torch.testing.assert_close(*logprobs, atol=tolerance, rtol=tolerance)


@contextmanager
def steps_counted(policy):
    """The number of rows of each decoding step."""
    rows, step = [], policy.decode_step

    def count_step(tokens, state):
        rows.append(len(tokens))
        return step(tokens, state)

    policy.decode_step = count_step
    yield rows
    del policy.decode_step
