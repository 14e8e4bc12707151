"""The small version of a run leaves the run unchanged."""

from dataclasses import replace

import torch

from litgrpo.checks.dry_run import (
    COMPLETION_LEN,
    GROUP,
    PROMPT_LEN,
    DryRun,
    pad_prompts,
    pick_end_tokens,
    restore_end_tokens,
    restore_modes,
    select_few_prompts,
)
from tests.support.models import prompt_batch
from tests.support.training import module


def dry_run():
    grpo = module(group_size=6, max_completion_length=40)
    grpo.configure_model()
    return grpo, DryRun.from_run(grpo.rollouter, grpo.learner)


def test_a_dry_run_is_small_and_leaves_the_run_unchanged():
    grpo, dry = dry_run()
    with restore_end_tokens(grpo.policy):
        dry.learner.policy.eos_ids = (7,)
        rollout = dry.generate(prompt_batch("a", "hello"))
    assert rollout.completion_ids.shape[1] <= COMPLETION_LEN
    assert rollout.group_size == GROUP
    assert (grpo.learner.group_size, grpo.rollouter.max_completion_length) == (6, 40)
    assert grpo.policy.eos_ids != (7,)
    assert grpo.rollouter.generated_tokens == 0
    params, others = grpo.policy.parameters(), dry.learner.policy.parameters()
    assert all(one is other for one, other in zip(params, others, strict=True))


def test_rows_rewarded_for_another_prompt_are_counted():
    _, dry = dry_run()
    rollout = dry.generate(prompt_batch("a", "hello"))
    training_batch = dry.build_batch(rollout)
    assert dry.probe.count_misplaced(rollout, training_batch) == 0
    tokens = training_batch.tokens
    tokens = replace(tokens, prompt_of=tokens.prompt_of.flip(0))
    swapped = replace(training_batch, tokens=tokens)
    assert dry.probe.count_misplaced(rollout, swapped) == 2 * GROUP


def test_prompts_are_few_short_and_padded_with_a_real_token():
    batch = select_few_prompts(prompt_batch("x" * (PROMPT_LEN + 9), "b", "c", "d"))
    assert batch.prompt_ids.shape == (3, PROMPT_LEN)
    wider = pad_prompts(batch)
    assert wider.prompt_ids.shape[1] > PROMPT_LEN
    assert torch.equal(wider.prompt_mask.sum(1), batch.prompt_mask.sum(1))
    assert (wider.prompt_ids[~wider.prompt_mask] == batch.prompt_ids[0, -1]).all()


def test_some_sampled_tokens_become_end_tokens():
    grpo, dry = dry_run()
    rollout = dry.generate(prompt_batch("a", "hello"))
    ends = pick_end_tokens(dry.learner.policy, rollout)
    assert set(grpo.policy.eos_ids) <= set(ends)
    assert int(rollout.completion_ids[0, rollout.lengths[0] // 3]) in ends


def test_train_and_eval_modes_are_restored():
    policy = dry_run()[0].policy.train()
    policy.model.eval()
    with restore_modes(policy, None):
        policy.train()
    assert policy.training
    assert not policy.model.training
