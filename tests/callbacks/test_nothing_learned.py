import logging

import pytest

from litgrpo.callbacks.nothing_learned import NothingLearned
from tests.support.training import always_half, batches, letters, module, train

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def lines(caplog, reward, iterations):
    """What is said in a run with this reward."""
    caplog.set_level(logging.INFO, "litgrpo")
    grpo = module(reward=reward, max_iterations=iterations, check_invariants=False)
    train(grpo, batches("a", "b"))
    return [line for line in caplog.messages if line.startswith("No group taught")]


def nothing(prompts, completions):
    return [None for _ in completions]


def test_equal_rewards_are_told_after_ten_iterations_and_then_twice_as_late(caplog):
    said = lines(caplog, always_half, 21)
    assert [line.split(" iterations")[0].split()[-1] for line in said] == ["10", "20"]
    assert "the same reward, lately 0.5" in said[0]
    assert "easier prompts" in said[0]


def test_rewards_that_say_nothing_have_another_remedy(caplog):
    (said,) = lines(caplog, nothing, 10)
    assert "no reward at all (None)" in said
    assert "easier" not in said


def test_where_something_is_learned_nothing_is_said(caplog):
    assert lines(caplog, letters, 12) == []


def test_it_counts_iterations_in_a_row(caplog):
    def once(prompts, completions):
        """Differs within groups in the fifth call alone."""
        once.calls += 1
        return [float(n) if once.calls == 5 else 0.0 for n in range(len(completions))]

    once.calls = 0
    assert lines(caplog, once, 14) == []


def test_the_module_brings_it():
    assert any(isinstance(each, NothingLearned) for each in module().configure_callbacks())
