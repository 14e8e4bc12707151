"""What a rollout process does, in this process; others are in test_processes.py."""

import numpy as np
import torch

from litgrpo.rollout.engines.base import Requests
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.rollout_worker import POLICY, Failed, Share, sample
from litgrpo.rollout.sampling import Sampling
from tests.support.engines import GROUP, TEXTS, uniforms_for
from tests.support.models import prompt_batch, tiny_policy


def share_of(prompts, uniforms, **settings):
    arrays = {"prompt_ids": prompts.prompt_ids, "prompt_mask": prompts.prompt_mask}
    arrays = {name: each.numpy() for name, each in (arrays | {"uniforms": uniforms}).items()}
    given = {
        "eos_ids": tiny_policy("qwen2").eos_ids,
        "max_rows": None,
        "stops": (),
        "autocast": None,
        "matmul": "highest",
    }
    return Share(LocalEngine(), arrays, GROUP, Sampling(), **given | settings)


def test_a_share_is_sampled_with_the_policy_that_came_first():
    policy, prompts = tiny_policy("qwen2").eval(), prompt_batch(*TEXTS)
    uniforms, loaded = uniforms_for(prompts), {}
    expected = LocalEngine().generate(Requests(policy, prompts, GROUP, uniforms, Sampling()))
    for first in (policy, None):
        found = sample(loaded, share_of(prompts, uniforms, policy=first), print)
        assert np.array_equal(found["completion_ids"], expected.completion_ids)
        assert "candidate_ids" not in found


def test_the_trainers_precision_goes_with_the_share():
    policy, prompts = tiny_policy("qwen2").eval(), prompt_batch(*TEXTS)
    uniforms, loaded = uniforms_for(prompts), {POLICY: policy}
    found = sample(loaded, share_of(prompts, uniforms, autocast=torch.bfloat16), print)
    asked = Requests(policy, prompts, GROUP, uniforms, Sampling())
    with torch.autocast("cpu", torch.bfloat16):
        expected = LocalEngine().generate(asked)
    assert np.array_equal(found["sampler_logprobs"], expected.sampler_logprobs)


def test_errors_are_told_and_short_memory_by_name():
    prompts = prompt_batch(*TEXTS)
    share = share_of(prompts, uniforms_for(prompts))

    class Short:
        def generate(self, requests):
            raise MemoryError("there is none")

    found = sample(
        {POLICY: tiny_policy("qwen2")}, Share(**vars(share) | {"engine": Short()}), print
    )
    assert isinstance(found, Failed)
    assert found.out_of_memory
    assert "there is none" in str(found.error)
