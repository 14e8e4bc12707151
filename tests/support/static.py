"""Shared by tests of rollout.engines.static."""

from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.static import StaticEngine
from litgrpo.rollout.sampling import Sampling
from tests.support.engines import GROUP, TEXTS, uniforms_for
from tests.support.models import prompt_batch

ENGINE = StaticEngine(prompt_buckets=8, sync_every_tokens=4)


def said(policy, engine, sampling=None, texts=TEXTS):
    prompts, sampling = prompt_batch(*texts), sampling or Sampling()
    return engine.generate(RolloutRequest(policy, prompts, GROUP, uniforms_for(prompts), sampling))
