"""Guarantees of the local engine beyond those of every engine (test_engines.py)."""

from dataclasses import replace

import pytest
import torch

from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import CompletionBuffer, LocalEngine
from litgrpo.rollout.sampling import Drawn, Sampling
from litgrpo.tensors import compact_rows
from tests.support.engines import (
    GROUP,
    LENGTH,
    TEXTS,
    assert_same,
    spread_lengths,
    steps_counted,
    uniforms_for,
)
from tests.support.models import prompt_batch, tiny_policy
from tests.support.reference_engine import write_column

PLAIN = LocalEngine(fused_decode=False)  # the check of the fused step would count as steps


def requests_for(policy, **settings):
    prompts = prompt_batch(*TEXTS)
    return RolloutRequest(policy, prompts, GROUP, uniforms_for(prompts), Sampling(), **settings)


@pytest.mark.parametrize(
    ("own", "asked", "places"), [(None, 6, 6), (6, None, 6), (9, 3, 3), (3, 9, 3), (None, 1, 3)]
)
def test_the_lower_of_both_limits_holds_in_whole_groups(own, asked, places):
    policy = spread_lengths(tiny_policy("qwen2"))
    whole = LocalEngine().generate(requests_for(policy))
    with steps_counted(policy) as rows:
        found = LocalEngine(max_rows=own).generate(requests_for(policy, max_rows=asked))
    assert max(rows) <= places
    assert_same(found, whole)


def test_no_step_is_taken_after_the_last_token():
    policy = tiny_policy("qwen2")
    policy.eos_ids = ()  # nothing ends before the limit
    with steps_counted(policy) as rows:
        rollout = LocalEngine(fused_decode=False).generate(requests_for(policy))
    assert rows == [len(TEXTS) * GROUP] * (LENGTH - 1)
    assert rollout.truncated.all()
    assert rollout.completion_mask.all()


def test_no_step_is_taken_if_completions_end_with_their_first_token():
    policy = tiny_policy("qwen2")
    policy.eos_ids = tuple(range(policy.vocab_size))
    prompts = prompt_batch(*TEXTS)
    # Checks every 100 tokens must not decode short completions to their limit.
    for length, engine in ((12, PLAIN), (7, replace(PLAIN, sync_every_tokens=100))):
        uniforms = uniforms_for(prompts, length=length)
        request = RolloutRequest(policy, prompts, GROUP, uniforms, Sampling())
        with steps_counted(policy) as rows:
            rollout = engine.generate(request)
        assert rows == []
        assert (rollout.lengths == 1).all()


@pytest.mark.parametrize("length", [5, 11, 12])
def test_the_length_limit_ends_decoding_between_two_checks(length):
    policy = tiny_policy("qwen2")
    policy.eos_ids = ()
    prompts = prompt_batch(*TEXTS)
    uniforms = uniforms_for(prompts, length=length)
    request = RolloutRequest(policy, prompts, GROUP, uniforms, Sampling())
    with steps_counted(policy) as rows:
        replace(PLAIN, sync_every_tokens=2).generate(request)
    assert len(rows) == length - 1


def test_log_probabilities_of_lower_precision_are_not_those_of_the_policy():
    assert LocalEngine().exact_logprobs
    assert not LocalEngine(dtype="bfloat16").exact_logprobs


def test_no_gradient_is_kept():
    rollout = LocalEngine().generate(requests_for(tiny_policy("qwen2")))
    assert not rollout.sampler_logprobs.requires_grad


def test_rows_that_ended_are_replaced_by_the_last_ones():
    active = torch.tensor([True, False, True, False, True, True])
    assert compact_rows(active, 4).tolist() == [0, 4, 2, 5]
    assert compact_rows(torch.ones(3, dtype=torch.bool), 3).tolist() == [0, 1, 2]


END, PAD = 2, 0
IS_END = torch.arange(10) == END


def drawn(*tokens, candidates=None):
    candidates = None if candidates is None else torch.tensor(candidates).int()
    return Drawn(torch.tensor(tokens), -torch.tensor(tokens).double(), candidates)


def empty():
    return CompletionBuffer.empty(torch.Size([2, 4]), PAD, torch.device("cpu"))


def by_columns():
    """Row 0 says 5, 2; row 1 says 7, 8, 9."""
    buffer, rows = empty(), torch.arange(2)
    steps = [drawn(5, 7), drawn(END, 8), drawn(6, 9)]
    for column, each in enumerate(steps):
        write_column(buffer, column, rows, each, torch.tensor([END]))
    return buffer


def at_once():
    """The same, as an engine writes it after the last step."""
    buffer = empty()
    places = [torch.tensor([0, 4]), torch.tensor([1, 5]), torch.tensor([1, 6])]
    active = [torch.tensor([True, True])] * 2 + [torch.tensor([False, True])]
    steps = [drawn(5, 7), drawn(END, 8), drawn(6, 9)]
    buffer.write_steps(zip(places, active, steps, strict=True), IS_END)
    return buffer


def test_both_ways_of_writing_give_the_same_rollout():
    for buffer in (by_columns(), at_once()):
        rollout = buffer.rollout(prompt_batch("a"), group_size=2)
        assert rollout.completion_ids.tolist() == [[5, 2, 0], [7, 8, 9]]
        assert rollout.completion_mask.tolist() == [[True, True, False], [True, True, True]]
        assert rollout.sampler_logprobs.tolist() == [[-5, -2, 0], [-7, -8, -9]]
        assert rollout.truncated.tolist() == [False, True]
        assert rollout.candidate_ids is None


def test_columns_that_no_row_uses_are_cut_off_but_one_stays():
    rollout = empty().rollout(prompt_batch("a"), group_size=2)
    assert rollout.completion_ids.shape == (2, 1)
    assert not rollout.completion_mask.any()


def test_candidates_are_written_to_the_columns_of_their_tokens():
    buffer = empty()
    places = [torch.tensor([0, 4]), torch.tensor([1, 5]), torch.tensor([1, 6])]
    active = [torch.tensor([True, True])] * 2 + [torch.tensor([False, True])]
    steps = [
        drawn(5, 7, candidates=[[5], [7]]),
        drawn(END, 8, candidates=[[END, 4], [8, 3]]),
        drawn(6, 9, candidates=[[6], [9]]),
    ]
    buffer.write_steps(zip(places, active, steps, strict=True), IS_END)
    rollout = buffer.rollout(prompt_batch("a"), group_size=2)
    assert rollout.candidate_ids.tolist() == [
        [[5, -1], [END, 4], [-1, -1]],
        [[7, -1], [8, 3], [9, -1]],
    ]


def test_candidates_of_different_widths_are_filled_up():
    buffer, rows = empty(), torch.arange(2)
    ends = torch.tensor([END])
    write_column(buffer, 0, rows, drawn(END, 7, candidates=[[END], [7]]), ends)
    write_column(buffer, 1, rows, drawn(6, 8, candidates=[[6, 5], [8, 9]]), ends)
    candidates = buffer.rollout(prompt_batch("a"), group_size=2).candidate_ids
    assert candidates.tolist() == [[[END, -1], [-1, -1]], [[7, -1], [8, 9]]]
