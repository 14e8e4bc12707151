"""The parts of a run in small, and that the run itself does not change."""

from dataclasses import replace

import torch

from litgrpo.checks.dry_run import (
    COMPLETION_LEN,
    GROUP,
    PROMPT_LEN,
    DryRun,
    few_prompts,
    modes_kept,
    padded,
    restore_end_tokens,
    some_ends,
)
from tests.support.models import prompt_batch
from tests.support.training import module


def dry_run():
    grpo = module(group_size=6, max_completion_length=40)
    grpo.configure_model()
    return grpo, DryRun.of(grpo.rollouter, grpo.learner)


def test_a_dry_run_is_small_and_leaves_the_run_as_it_was():
    grpo, dry = dry_run()
    with restore_end_tokens(grpo.policy):
        dry.learner.policy.eos_ids = (7,)
        rollout = dry.sample(prompt_batch("a", "hello"))
    assert rollout.completion_ids.shape[1] <= COMPLETION_LEN
    assert rollout.group_size == GROUP
    assert (grpo.learner.group_size, grpo.rollouter.max_completion_length) == (6, 40)
    assert grpo.policy.eos_ids != (7,)
    assert grpo.rollouter.generated_tokens == 0
    ours, theirs = grpo.policy.parameters(), dry.learner.policy.parameters()
    assert all(one is other for one, other in zip(ours, theirs, strict=True))


def test_rows_that_were_rewarded_as_another_prompts_are_counted():
    _, dry = dry_run()
    rollout = dry.sample(prompt_batch("a", "hello"))
    training_batch = dry.build_batch(rollout)
    assert dry.probe.misplaced(rollout, training_batch) == 0
    swapped = replace(training_batch, prompt_of=training_batch.prompt_of.flip(0))
    assert dry.probe.misplaced(rollout, swapped) == 2 * GROUP


def test_prompts_are_few_short_and_padded_with_a_real_token():
    batch = few_prompts(prompt_batch("x" * (PROMPT_LEN + 9), "b", "c", "d"))
    assert batch.prompt_ids.shape == (3, PROMPT_LEN)
    wider = padded(batch)
    assert wider.prompt_ids.shape[1] > PROMPT_LEN
    assert torch.equal(wider.prompt_mask.sum(1), batch.prompt_mask.sum(1))
    assert (wider.prompt_ids[~wider.prompt_mask] == batch.prompt_ids[0, -1]).all()


def test_some_sampled_tokens_become_end_tokens():
    grpo, dry = dry_run()
    rollout = dry.sample(prompt_batch("a", "hello"))
    ends = some_ends(dry.learner.policy, rollout)
    assert set(grpo.policy.eos_ids) <= set(ends)
    assert int(rollout.completion_ids[0, rollout.lengths[0] // 3]) in ends


def test_modes_are_put_back():
    policy = dry_run()[0].policy.train()
    policy.model.eval()
    with modes_kept(policy, None):
        policy.train()
    assert policy.training
    assert not policy.model.training
