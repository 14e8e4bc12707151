import gc
import os
import platform
import subprocess
import sys
import weakref

import pytest
import torch

from litgrpo.distributed import memory
from litgrpo.distributed.memory import RowLimit

NEW_PAGES = """
import resource, torch
from litgrpo.distributed.memory import free_memory, keep_freed_memory
assert keep_freed_memory()
for _ in range(16):  # it takes a few blocks until one of the same size fits where one was
    torch.ones(2**24)  # 64 MiB
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = pages()
for _ in range(4):
    torch.ones(2**24)
print(pages() - before > 1000)
free_memory()
before = pages()
torch.ones(2**24)
print(pages() - before > 1000)
"""
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


@pytest.fixture(autouse=True)
def few_objects():
    """Collecting garbage takes long with everything that other tests have imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@needs_glibc
def test_memory_of_freed_tensors_is_used_again_until_it_is_given_back():
    set_by_the_user = memory.SET_BY_THE_USER
    environment = {k: v for k, v in os.environ.items() if not k.startswith(set_by_the_user)}
    command = [sys.executable, "-c", NEW_PAGES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@needs_glibc
def test_what_the_user_set_for_the_allocator_stays(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not memory.keep_freed_memory()


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not memory.keep_freed_memory()
    memory.free_memory()


class Memory:
    """Holds a number of 12 rows; records the limits that it was called with."""

    def __init__(self, suffices, error=MemoryError):
        self.suffices, self.error = suffices, error
        self.limits, self.rows = [], 0

    def attempt(self, max_rows):
        self.limits.append(max_rows)
        self.rows = 12 if max_rows is None else min(max_rows, 12)
        if self.rows > self.suffices:
            raise self.error
        return f"{self.rows} at once"

    def run(self, max_rows=None, least=1):
        self.limit = RowLimit("model.engine.max_rows", "buy some", max_rows)
        return self.limit.run(self.attempt, lambda: self.rows, least=least)


ignore_retries = pytest.mark.filterwarnings("ignore:Out of memory with")


def test_an_attempt_that_fits_is_made_once():
    available = Memory(12)
    assert available.run() == "12 at once"
    assert (available.limits, available.limit.max_rows) == ([None], None)


def test_rows_are_halved_until_they_fit_and_each_limit_is_shown():
    available = Memory(3)
    with pytest.warns(UserWarning, match="model.engine.max_rows") as warned:
        assert available.run() == "3 at once"
    assert available.limits == [None, 6, 3]
    assert available.limit.max_rows == 3
    assert ["= 6" in str(warned[0].message), "= 3" in str(warned[1].message)] == [True, True]


@ignore_retries
def test_the_rows_in_use_are_halved_not_a_limit_that_was_never_reached():
    available = Memory(6)
    available.run(max_rows=1000)
    assert available.limits == [1000, 6]


@ignore_retries
def test_no_limit_is_below_the_least():
    available = Memory(4)
    assert available.run(max_rows=7, least=4) == "4 at once"
    assert available.limit.max_rows == 4


@ignore_retries
@pytest.mark.parametrize("least", [1, 4])
def test_if_nothing_is_left_to_halve_the_remedy_is_named(least):
    with pytest.raises(RuntimeError, match=f"{least} row.*buy some") as raised:
        Memory(0).run(least=least)
    assert isinstance(raised.value.__cause__, MemoryError)


def test_other_errors_pass():
    available = Memory(0, ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        available.run()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        Memory(0, RuntimeError("mat1 and mat2 shapes")).run()
    assert available.limit.max_rows is None


@ignore_retries
def test_tensors_of_the_failed_attempt_are_freed_before_the_next_one():
    held = []

    def attempt(max_rows):
        gc.collect()
        assert not any(each() for each in held)
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        if max_rows is None:
            raise MemoryError
        return max_rows

    assert RowLimit("", "").run(attempt, lambda: 2) == 1
