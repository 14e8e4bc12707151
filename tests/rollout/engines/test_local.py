"""What the local engine promises beyond what every engine does (test_engines.py)."""

import pytest
import torch

from litgrpo.rollout.engines.interface import Requests
from litgrpo.rollout.engines.local import LocalEngine, _compacted
from litgrpo.rollout.sampling import Sampling
from tests.conftest import prompt_batch, tiny_policy
from tests.rollout.engines.test_engines import (
    GROUP,
    LENGTH,
    TEXTS,
    assert_same,
    ragged,
    steps_counted,
    uniforms_for,
)


def requests_for(policy, **settings):
    prompts = prompt_batch(*TEXTS)
    return Requests(policy, prompts, GROUP, uniforms_for(prompts), Sampling(), **settings)


@pytest.mark.parametrize(
    ("own", "asked", "places"), [(None, 6, 6), (6, None, 6), (9, 3, 3), (3, 9, 3), (None, 1, 3)]
)
def test_the_lower_of_both_limits_holds_in_whole_groups(own, asked, places):
    policy = ragged(tiny_policy("qwen2"))
    whole = LocalEngine().generate(requests_for(policy))
    with steps_counted(policy) as rows:
        found = LocalEngine(max_rows=own).generate(requests_for(policy, max_rows=asked))
    assert max(rows) <= places
    assert_same(found, whole)


def test_no_step_is_taken_after_the_last_token():
    policy = tiny_policy("qwen2")
    policy.eos_ids = ()  # nothing ends before the limit
    with steps_counted(policy) as rows:
        rollout = LocalEngine(fused=False).generate(requests_for(policy))
    assert rows == [len(TEXTS) * GROUP] * (LENGTH - 1)
    assert rollout.truncated.all()
    assert rollout.completion_mask.all()


def test_no_gradient_is_kept():
    rollout = LocalEngine().generate(requests_for(tiny_policy("qwen2")))
    assert not rollout.sampler_logprobs.requires_grad


def test_rows_that_ended_are_replaced_by_the_last_ones():
    active = torch.tensor([True, False, True, False, True, True])
    assert _compacted(active, 4).tolist() == [0, 4, 2, 5]
    assert _compacted(torch.ones(3, dtype=torch.bool), 3).tolist() == [0, 1, 2]
