"""Shared by tests of rollout.engines.server."""

from dataclasses import replace

from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.sampling import Sampling
from tests.support.engines import GROUP, TEXTS, uniforms_for
from tests.support.models import prompt_batch


def requests_for(policy, sampling=None, **settings):
    prompts = prompt_batch(*TEXTS)
    asked = RolloutRequest(policy, prompts, GROUP, uniforms_for(prompts), sampling or Sampling())
    return replace(asked, **settings)
