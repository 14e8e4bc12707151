from dataclasses import replace

import torch

from litgrpo.distributed.memory import RowLimit
from litgrpo.learning import micro_batches
from litgrpo.learning.micro_batches import BatchLimits, EvenBatches, RaggedBatches
from litgrpo.learning.steppers import PlainStepper
from litgrpo.types import TokenLogprobs
from tests.learning.parts import learner_of, rewards_of, rollouter_of
from tests.support.models import prompt_batch, tiny_policy


class Most:
    """Another rank has this many micro-batches."""

    world_size = 2

    def __init__(self, number):
        self.number = number

    def max(self, value):
        return value.clamp(min=self.number)


def batches(monkeypatch, number):
    """Return even batches of a policy that counts as sharded."""
    monkeypatch.setattr(micro_batches, "is_gathered", lambda _: False)
    policy = tiny_policy("qwen2")
    learner = learner_of(policy)
    rollout = rollouter_of(policy).generate(prompt_batch("a", "hello"), "train")
    logprobs = learner.old_and_reference_logprobs(rollout)
    return (
        EvenBatches(policy, Most(number)),
        learner,
        learner.build_batch(rollout, rewards_of(rollout), logprobs),
    )


def test_rows_without_weight_fill_up_to_the_largest_number(monkeypatch):
    even, _, training_batch = batches(monkeypatch, 5)
    found = list(even.split(training_batch, None, BatchLimits(max_rows=4)))
    assert [micro.is_last for micro in found] == [False] * 4 + [True]
    assert [micro.is_filler for micro in found] == [False] * 2 + [True] * 3
    assert [len(micro.rows) for micro in found[2:]] == [1, 1, 1]
    fillers = [micro.rows for micro in found[2:]]
    assert not any(rows.loss_weights.any() or rows.advantages.any() for rows in fillers)
    own = list(RaggedBatches().split(training_batch, None, BatchLimits(max_rows=4)))
    for mine, plain in zip(found, own, strict=False):
        torch.testing.assert_close(mine.rows.loss_weights, plain.rows.loss_weights)


def test_fillers_add_no_gradient_and_count_in_no_average(monkeypatch):
    even, learner, training_batch = batches(monkeypatch, 5)
    limited = replace(learner, micro_batching=even, row_limit=RowLimit("", "", max_rows=4))
    sums, gradients = [], []
    for each in (limited, replace(limited, micro_batching=RaggedBatches())):
        weights = [p for p in learner.policy.parameters() if p.requires_grad]
        stepper = PlainStepper(torch.optim.SGD(weights, lr=0.0))
        sums.append(each._accumulate_gradients(training_batch, stepper, 4).totals.sums)
        gradients.append([p.grad.clone() for p in weights if p.grad is not None])
    for padded, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(padded, plain)
    assert sums[0].keys() == sums[1].keys()
    for name, total in sums[1].items():
        torch.testing.assert_close(sums[0][name], total)


def test_rows_are_scored_as_often_as_on_the_process_with_the_most(monkeypatch):
    even, _, training_batch = batches(monkeypatch, 4)
    asked = []

    def logprobs_of(tokens):
        asked.append(len(tokens.completion_ids))
        ones = torch.ones(tokens.completion_ids.shape)
        return TokenLogprobs(ones, ones)

    found = even.compute_logprobs(training_batch.tokens, logprobs_of, BatchLimits(max_rows=4))
    assert asked == [4, 4, 1, 1]
    assert (found.logprobs == 1).any(1).all()


def test_a_gathered_policy_needs_no_filling_up():
    even = EvenBatches(tiny_policy("qwen2"), Most(9))
    assert even.count_fillers(2) == 0
