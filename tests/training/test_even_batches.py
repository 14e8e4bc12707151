import torch

from litgrpo.training import even_batches
from litgrpo.training.even_batches import Even
from litgrpo.training.micro_batches import Limits, Ragged
from litgrpo.types import TokenLogprobs
from tests.support.models import prompt_batch, tiny_policy
from tests.training.parts import learner_of, rewards_of, rollouter_of


class Most:
    """Another process has so many micro-batches."""

    world_size = 2

    def __init__(self, number):
        self.number = number

    def max(self, value):
        return value.clamp(min=self.number)


def batches(monkeypatch, number):
    """Of a policy that seems to be divided."""
    monkeypatch.setattr(even_batches, "is_gathered", lambda _: False)
    policy = tiny_policy("qwen2")
    learner = learner_of(policy)
    rollout = rollouter_of(policy).generate(prompt_batch("a", "hello"), "train")
    logprobs = learner.old_and_reference_logprobs(rollout)
    return (
        Even(policy, Most(number)),
        learner,
        learner.experience(rollout, rewards_of(rollout), logprobs),
    )


def test_rows_without_weight_fill_up_to_the_largest_number(monkeypatch):
    even, _, experience = batches(monkeypatch, 5)
    found = list(even.split(experience, None, Limits(max_rows=4)))
    assert [last for _, last in found] == [False] * 4 + [True]
    assert [len(micro) for micro, _ in found[2:]] == [1, 1, 1]
    assert not any(micro.weights.any() or micro.advantages.any() for micro, _ in found[2:])
    own = list(Ragged().split(experience, None, Limits(max_rows=4)))
    for (mine, _), (plain, _) in zip(found, own, strict=False):
        torch.testing.assert_close(mine.weights, plain.weights)


def test_what_fills_up_adds_no_gradient_and_counts_nowhere(monkeypatch):
    even, learner, experience = batches(monkeypatch, 5)
    normalizers = learner.normalizers(experience)
    sums, plain = even.sums(), Ragged().sums()
    for number, (micro, _) in enumerate(even.split(experience, None, Limits(max_rows=4))):
        output = learner.objective.loss(learner.logprobs(micro.tokens), micro, normalizers)
        sums.add(output)
        if number < 2:
            plain.add(output)
        else:
            learner.policy.zero_grad()
            output.loss.backward()
            assert not any(p.grad.any() for p in learner.policy.parameters() if p.grad is not None)
    assert sums.totals.sums.keys() == plain.totals.sums.keys()
    for name, total in plain.totals.sums.items():
        assert torch.equal(sums.totals.sums[name], total)


def test_rows_are_scored_as_often_as_on_the_process_with_the_most(monkeypatch):
    even, _, experience = batches(monkeypatch, 4)
    asked = []

    def logprobs_of(tokens):
        asked.append(len(tokens.completion_ids))
        ones = torch.ones(tokens.completion_ids.shape)
        return TokenLogprobs(ones, ones)

    found = even.scored(experience.tokens, logprobs_of, Limits(max_rows=4))
    assert asked == [4, 4, 1, 1]
    assert (found.logprobs == 1).any(1).all()


def test_a_gathered_policy_needs_no_filling_up():
    even = Even(tiny_policy("qwen2"), Most(9))
    assert even.missing(2) == 0
