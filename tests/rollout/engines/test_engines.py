from dataclasses import replace

import pytest
import torch

from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.static import StaticEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.types import PromptBatch
from tests.support.engines import (
    GROUP,
    LENGTH,
    TEXTS,
    assert_same,
    spread_lengths,
    steps_counted,
    trim_unused,
    uniforms_for,
)
from tests.support.models import prompt_batch, tiny_policy
from tests.support.reference_engine import ReferenceEngine

SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "plain": Sampling(temperature=0.7),
    "top_k": Sampling(top_k=20),
    "top_p": Sampling(temperature=0.8, top_p=0.8),
    "min_p": Sampling(min_p=0.05),
}


@pytest.fixture(params=[LocalEngine(), StaticEngine(prompt_buckets=8)], ids=["local", "static"])
def engine(request):
    """Engines whose tokens must equal the reference engine's."""
    return request.param


@pytest.mark.parametrize("name", SAMPLINGS)
def test_an_engine_says_what_the_reference_engine_says(architecture, engine, name):
    policy, prompts = spread_lengths(tiny_policy(architecture)), prompt_batch(*TEXTS)
    requests = RolloutRequest(policy, prompts, GROUP, uniforms_for(prompts), SAMPLINGS[name])
    fast, plain = engine.generate(requests), ReferenceEngine().generate(requests)
    assert_same(fast, plain)
    if plain.candidate_ids is not None:
        pairs = (trim_unused(each).candidate_ids.flatten(0, 1).tolist() for each in (fast, plain))
        assert all(set(one) | {-1} == set(other) | {-1} for one, other in zip(*pairs, strict=True))
    assert len(set(fast.lengths.tolist())) > 1


def test_greedy_completions_equal_those_of_generate(architecture, engine):
    policy, prompts = tiny_policy(architecture), prompt_batch(*TEXTS)
    rollout = engine.generate(
        RolloutRequest(policy, prompts, 1, uniforms_for(prompts, 1), Sampling(temperature=0))
    )
    rollout = trim_unused(rollout)
    expected = policy.model.generate(
        input_ids=prompts.prompt_ids,
        attention_mask=prompts.prompt_mask.long(),
        max_new_tokens=LENGTH,
        do_sample=False,
        pad_token_id=0,
    )[:, -rollout.completion_ids.shape[1] :]
    assert torch.equal(rollout.completion_ids, expected)


def test_completions_do_not_depend_on_the_batch_split(architecture):
    policy, prompts = spread_lengths(tiny_policy(architecture)), prompt_batch(*TEXTS)
    requests = RolloutRequest(policy, prompts, GROUP, uniforms_for(prompts), Sampling())
    whole = LocalEngine().generate(requests)
    for max_rows in (1, 4, 6):
        assert_same(LocalEngine(max_rows=max_rows).generate(requests), whole)


@pytest.mark.parametrize("fused", [True, False])
def test_groups_that_wait_fill_the_places_of_finished_rows(architecture, fused):
    """More groups than places, each with its own beginning: long and short prompts, no order."""
    policy = tiny_policy(architecture)
    policy.eos_ids = tuple(range(2, 60))
    texts = [("what is it? " * 3)[: 1 + 7 * number % 31] for number in range(12)]
    prompts = prompt_batch(*texts)
    requests = RolloutRequest(policy, prompts, 2, uniforms_for(prompts, 2, 20), Sampling())
    plain = ReferenceEngine().generate(requests)
    assert len(set(plain.lengths.tolist())) > 5
    with steps_counted(policy) as rows:
        waves = LocalEngine(max_rows=4, compaction_frac=2.0, fused_decode=fused).generate(requests)
    assert max(rows) <= 4
    assert len(rows) < 6 * int(plain.lengths.max())  # six waves, one after the other
    assert_same(waves, plain)
    for sync_every_tokens in (2, 5):
        engine = LocalEngine(max_rows=6, sync_every_tokens=sync_every_tokens, fused_decode=fused)
        assert_same(engine.generate(requests), plain)


def test_looking_for_finished_rows_less_often_changes_nothing(architecture, engine):
    policy, prompts = spread_lengths(tiny_policy(architecture)), prompt_batch(*TEXTS)
    requests = RolloutRequest(policy, prompts, GROUP, uniforms_for(prompts), Sampling())
    whole = engine.generate(requests)
    for sync_every_tokens in (3, 100):
        assert_same(replace(engine, sync_every_tokens=sync_every_tokens).generate(requests), whole)


def test_lower_precision_is_near_and_says_so(architecture):
    policy, prompts = tiny_policy(architecture), prompt_batch(*TEXTS)
    requests = RolloutRequest(policy, prompts, GROUP, uniforms_for(prompts), Sampling())
    for fused in (True, False):
        engine = LocalEngine(dtype="bfloat16", fused_decode=fused)
        assert not engine.exact_logprobs
        rollout = engine.generate(requests)
        with torch.no_grad():
            exact = policy.logprobs(rollout.tokens).logprobs
        gap = (rollout.sampler_logprobs - exact).abs()
        assert 1e-4 < gap.mean() < 0.1
    assert LocalEngine().exact_logprobs


@pytest.mark.parametrize("setting", ["max_rows", "sync_every_tokens"])
def test_engine_settings_out_of_range_are_refused(setting):
    with pytest.raises(ValueError, match=f"engine.{setting} is 0; it must be at least 1"):
        LocalEngine(**{setting: 0})


def test_completions_do_not_depend_on_padding(architecture, engine):
    policy, prompts = spread_lengths(tiny_policy(architecture)), prompt_batch(*TEXTS)
    wide = prompt_batch(*TEXTS, length=20)
    uniforms = uniforms_for(prompts)
    whole = engine.generate(RolloutRequest(policy, prompts, GROUP, uniforms, Sampling()))
    padded = engine.generate(RolloutRequest(policy, wide, GROUP, uniforms, Sampling()))
    assert_same(padded, whole)


def test_completions_do_not_depend_on_when_rows_leave(architecture):
    policy, prompts = spread_lengths(tiny_policy(architecture)), prompt_batch(*TEXTS)
    uniforms = uniforms_for(prompts)
    whole = LocalEngine().generate(RolloutRequest(policy, prompts, GROUP, uniforms, Sampling()))
    for compaction_frac in (1e-9, 2.0):
        engine = LocalEngine(compaction_frac=compaction_frac)
        assert_same(
            engine.generate(RolloutRequest(policy, prompts, GROUP, uniforms, Sampling())), whole
        )


def test_a_prompt_alone_says_the_same_as_in_company(architecture, engine):
    policy, prompts = tiny_policy(architecture), prompt_batch(*TEXTS)
    whole = engine.generate(
        RolloutRequest(policy, prompts, 2, uniforms_for(prompts, 2), Sampling())
    )
    alone = prompt_batch(TEXTS[1])
    alone = PromptBatch(alone.prompt_ids, alone.prompt_mask, alone.prompts, {}, torch.tensor([1]))
    single = engine.generate(RolloutRequest(policy, alone, 2, uniforms_for(alone, 2), Sampling()))
    single = trim_unused(single).completion_ids
    assert torch.equal(single, whole.completion_ids[2:4, : single.shape[1]])


def test_sampler_logprobs_equal_the_learning_steps_logprobs(architecture, engine):
    policy, prompts = spread_lengths(tiny_policy(architecture)), prompt_batch(*TEXTS)
    sampling = Sampling(temperature=0.7)
    rollout = engine.generate(
        RolloutRequest(policy, prompts, GROUP, uniforms_for(prompts), sampling)
    )
    learned = policy.logprobs(rollout.tokens, temperature=0.7)
    torch.testing.assert_close(learned.logprobs, rollout.sampler_logprobs, atol=1e-5, rtol=1e-5)


def test_every_token_is_among_those_that_could_be_drawn_and_the_learner_agrees(
    architecture, engine
):
    policy, prompts = spread_lengths(tiny_policy(architecture)), prompt_batch(*TEXTS)
    sampling = Sampling(temperature=0.7, top_k=6, top_p=0.8)
    rollout = engine.generate(
        RolloutRequest(policy, prompts, GROUP, uniforms_for(prompts), sampling)
    )
    mask = rollout.completion_mask
    among = (rollout.candidate_ids == rollout.completion_ids[..., None]).sum(-1)
    assert torch.equal(among == 1, mask)
    sizes = (rollout.candidate_ids >= 0).sum(-1)
    assert sizes[mask].min() >= 1
    assert sizes.max() <= 6
    assert not sizes[~mask].any()
    learned = policy.logprobs(rollout.tokens, temperature=0.7)
    torch.testing.assert_close(learned.logprobs, rollout.sampler_logprobs, atol=1e-5, rtol=1e-5)
    assert bool((learned.entropy <= sizes.clamp(min=1).log() + 1e-5).all())


def test_the_mask_ends_with_the_end_token_once(engine):
    policy, prompts = spread_lengths(tiny_policy("qwen2")), prompt_batch(*TEXTS)
    rollout = engine.generate(
        RolloutRequest(policy, prompts, GROUP, uniforms_for(prompts), Sampling())
    )
    ends = torch.isin(rollout.completion_ids, torch.tensor(policy.eos_ids))
    ends &= rollout.completion_mask
    assert torch.equal(ends.sum(1), (~rollout.truncated).long())
    last = rollout.completion_ids.gather(1, rollout.lengths[:, None] - 1).squeeze(1)
    assert bool(torch.isin(last[~rollout.truncated], torch.tensor(policy.eos_ids)).all())
    assert not rollout.completion_mask[:, 1:][~rollout.completion_mask[:, :-1]].any()
