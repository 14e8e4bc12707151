import gc
import weakref

import pytest
import torch

from litgrpo.parallel.out_of_memory import free_memory, is_out_of_memory, with_halving

TEXTS = dict(
    what="the rollout", setting="engine.max_rows", unchanged="the completions", remedy="buy some"
)


class Memory:
    """Suffices for so many of 12 rows; notes the limits that it was asked to compute with."""

    def __init__(self, suffices, error=MemoryError):
        self.suffices, self.error = suffices, error
        self.limits, self.halved, self.rows = [], [], 0

    def attempt(self, limit):
        self.limits.append(limit)
        self.rows = 12 if limit is None else min(limit, 12)
        if self.rows > self.suffices:
            raise self.error
        return f"{self.rows} at once"

    def run(self, limit=None, least=1):
        return with_halving(
            self.attempt,
            rows=lambda: self.rows,
            limit=limit,
            least=least,
            on_halved=self.halved.append,
            **TEXTS,
        )


def test_enough_memory_is_one_attempt_without_a_word():
    memory = Memory(12)
    assert memory.run() == "12 at once"
    assert (memory.limits, memory.halved) == ([None], [])


def test_rows_are_halved_until_memory_suffices_and_each_limit_is_told():
    memory = Memory(3)
    with pytest.warns(UserWarning, match="engine.max_rows is . from now on") as warned:
        assert memory.run() == "3 at once"
    assert memory.limits == [None, 6, 3]
    assert memory.halved == [6, 3]
    said = [str(each.message) for each in warned]
    assert said == [
        f"out of memory in the rollout: engine.max_rows is {limit} from now on "
        "(the completions will be the same)"
        for limit in (6, 3)
    ]


@pytest.mark.filterwarnings("ignore:out of memory in the rollout")
def test_the_rows_that_failed_are_halved_not_a_limit_that_was_never_reached():
    memory = Memory(6)
    memory.run(limit=1000)
    assert memory.limits == [1000, 6]


@pytest.mark.filterwarnings("ignore:out of memory in the rollout")
def test_no_limit_is_below_the_least():
    memory = Memory(4)
    assert memory.run(limit=7, least=4) == "4 at once"
    assert memory.halved == [4]


@pytest.mark.filterwarnings("ignore:out of memory in the rollout")
@pytest.mark.parametrize(("least", "at_once"), [(1, "a single row"), (4, "4 rows")])
def test_where_nothing_is_left_to_halve_the_message_says_what_to_do(least, at_once):
    with pytest.raises(RuntimeError, match=f"with {at_once} at once: buy some.") as raised:
        Memory(0).run(least=least)
    assert isinstance(raised.value.__cause__, MemoryError)


def test_other_errors_pass():
    memory = Memory(0, ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        memory.run()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        Memory(0, RuntimeError("mat1 and mat2 shapes")).run()
    assert memory.halved == []


@pytest.mark.filterwarnings("ignore:out of memory in the rollout")
def test_what_the_failed_attempt_held_is_gone_before_the_next_one():
    held = []

    def attempt(limit):
        gc.collect()
        assert not any(each() for each in held)
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        if limit is None:
            raise MemoryError
        return limit

    numbers = dict(rows=lambda: 2, limit=None, on_halved=lambda rows: None)
    assert with_halving(attempt, **numbers, **TEXTS) == 1


def test_each_way_to_say_that_memory_is_short_is_known():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(10**15)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Attempting to reserve 4.00G"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("not enough memory"))


def test_freeing_memory_needs_no_device():
    free_memory()
