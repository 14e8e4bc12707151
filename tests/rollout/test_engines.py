import pytest
import torch

from litgrpo.rollout.eager_engine import EagerEngine
from litgrpo.rollout.reference_engine import ReferenceEngine
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from litgrpo.types import PromptBatch
from tests.conftest import prompt_batch, tiny_policy

TEXTS = ("a", "what is 3+4?", "hello", "xy")
GROUP, LENGTH = 3, 12
SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "plain": Sampling(temperature=0.7),
    "top_k": Sampling(top_k=20),
    "top_p": Sampling(temperature=0.8, top_p=0.8),
    "min_p": Sampling(min_p=0.05),
}


def ragged(policy):
    """Many end tokens, so that completions have different lengths."""
    policy.eos_ids = tuple(range(2, 40))
    return policy


def uniforms_for(prompts, group_size=GROUP, length=LENGTH):
    return draw_uniforms(11, "train", 0, prompts.index, group_size, length)


def assert_same(one, other):
    assert torch.equal(one.completion_ids, other.completion_ids)
    assert torch.equal(one.completion_mask, other.completion_mask)
    assert torch.equal(one.truncated, other.truncated)
    torch.testing.assert_close(one.sampler_logprobs, other.sampler_logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_eager_engine_says_what_the_reference_engine_says(architecture, name):
    policy, prompts = ragged(tiny_policy(architecture)), prompt_batch(*TEXTS)
    arguments = (policy, prompts, GROUP, uniforms_for(prompts), SAMPLINGS[name])
    fast, plain = EagerEngine().generate(*arguments), ReferenceEngine().generate(*arguments)
    assert_same(fast, plain)
    assert len(set(fast.lengths.tolist())) > 1


def test_greedy_completions_equal_those_of_generate(architecture):
    policy, prompts = tiny_policy(architecture), prompt_batch(*TEXTS)
    rollout = EagerEngine().generate(
        policy, prompts, 1, uniforms_for(prompts, 1), Sampling(temperature=0)
    )
    expected = policy.model.generate(
        input_ids=prompts.prompt_ids,
        attention_mask=prompts.prompt_mask.long(),
        max_new_tokens=LENGTH,
        do_sample=False,
        pad_token_id=0,
    )[:, prompts.prompt_ids.shape[1] :]
    assert torch.equal(rollout.completion_ids, expected)


def test_completions_do_not_depend_on_the_batch_split(architecture):
    policy, prompts = ragged(tiny_policy(architecture)), prompt_batch(*TEXTS)
    arguments = (policy, prompts, GROUP, uniforms_for(prompts), Sampling())
    whole = EagerEngine().generate(*arguments)
    for max_rows in (1, 4, 6):
        assert_same(EagerEngine(max_rows=max_rows).generate(*arguments), whole)


def test_completions_do_not_depend_on_padding_or_on_when_rows_leave(architecture):
    policy, prompts = ragged(tiny_policy(architecture)), prompt_batch(*TEXTS)
    wide = prompt_batch(*TEXTS, length=20)
    uniforms = uniforms_for(prompts)
    whole = EagerEngine().generate(policy, prompts, GROUP, uniforms, Sampling())
    padded = EagerEngine().generate(policy, wide, GROUP, uniforms, Sampling())
    assert_same(padded, whole)
    for drop_frac in (1e-9, 2.0):
        engine = EagerEngine(drop_frac=drop_frac)
        assert_same(engine.generate(policy, prompts, GROUP, uniforms, Sampling()), whole)


def test_a_prompt_alone_says_the_same_as_in_company(architecture):
    policy, prompts = tiny_policy(architecture), prompt_batch(*TEXTS)
    whole = EagerEngine().generate(policy, prompts, 2, uniforms_for(prompts, 2), Sampling())
    alone = prompt_batch(TEXTS[1])
    alone = PromptBatch(alone.prompt_ids, alone.prompt_mask, alone.prompts, {}, torch.tensor([1]))
    single = EagerEngine().generate(policy, alone, 2, uniforms_for(alone, 2), Sampling())
    assert torch.equal(single.completion_ids, whole.completion_ids[2:4, : single.lengths.max()])


def test_sampler_logprobs_equal_the_learning_steps_logprobs(architecture):
    policy, prompts = ragged(tiny_policy(architecture)), prompt_batch(*TEXTS)
    sampling = Sampling(temperature=0.7)
    rollout = EagerEngine().generate(policy, prompts, GROUP, uniforms_for(prompts), sampling)
    learned = policy.logprobs(
        prompts.prompt_ids,
        prompts.prompt_mask,
        torch.arange(len(prompts)).repeat_interleave(GROUP),
        rollout.completion_ids,
        rollout.completion_mask,
        temperature=0.7,
    )
    torch.testing.assert_close(learned.logprobs, rollout.sampler_logprobs, atol=1e-5, rtol=1e-5)


def test_every_token_is_among_those_that_could_be_drawn_and_the_learner_agrees(architecture):
    policy, prompts = ragged(tiny_policy(architecture)), prompt_batch(*TEXTS)
    sampling = Sampling(temperature=0.7, top_k=6, top_p=0.8)
    rollout = EagerEngine().generate(policy, prompts, GROUP, uniforms_for(prompts), sampling)
    mask = rollout.completion_mask
    among = (rollout.support == rollout.completion_ids[..., None]).sum(-1)
    assert torch.equal(among == 1, mask)
    sizes = (rollout.support >= 0).sum(-1)
    assert sizes[mask].min() >= 1
    assert sizes.max() <= 6
    assert not sizes[~mask].any()
    learned = policy.logprobs(
        prompts.prompt_ids,
        prompts.prompt_mask,
        torch.arange(len(prompts)).repeat_interleave(GROUP),
        rollout.completion_ids,
        mask,
        support=rollout.support,
        temperature=0.7,
    )
    torch.testing.assert_close(learned.logprobs, rollout.sampler_logprobs, atol=1e-5, rtol=1e-5)
    assert bool((learned.entropy <= sizes.clamp(min=1).log() + 1e-5).all())


def test_the_mask_ends_with_the_end_token_once():
    policy, prompts = ragged(tiny_policy("qwen2")), prompt_batch(*TEXTS)
    rollout = EagerEngine().generate(policy, prompts, GROUP, uniforms_for(prompts), Sampling())
    ends = torch.isin(rollout.completion_ids, torch.tensor(policy.eos_ids))
    ends &= rollout.completion_mask
    assert torch.equal(ends.sum(1), (~rollout.truncated).long())
    last = rollout.completion_ids.gather(1, rollout.lengths[:, None] - 1).squeeze(1)
    assert bool(torch.isin(last[~rollout.truncated], torch.tensor(policy.eos_ids)).all())
    assert not rollout.completion_mask[:, 1:][~rollout.completion_mask[:, :-1]].any()
