import os
import platform
import subprocess
import sys

import pytest

from litgrpo.distributed import memory

NEW_PAGES = """
import resource, torch
from litgrpo.distributed.memory import free_memory, keep_freed_memory
kept = {asked} and keep_freed_memory()
for _ in range(16):  # it takes a few blocks until one of the same size fits where one was
    torch.ones(2**24)  # 64 MiB
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = pages()
for _ in range(4):
    torch.ones(2**24)
print(kept, pages() - before > 1000)
free_memory()
before = pages()
torch.ones(2**24)
print(pages() - before > 1000)
"""
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


def run(asked: bool, **settings: str) -> list[str]:
    """What a process of its own says: whether it keeps, needs new pages, and after giving back."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    program = NEW_PAGES.format(asked=asked)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=known | settings, capture_output=True, text=True, check=True)
    return done.stdout.split()


@needs_glibc
def test_memory_of_freed_tensors_is_used_again_until_it_is_given_back():
    assert run(asked=False)[:2] == ["False", "True"]
    assert run(asked=True) == ["True", "False", "True"]


@needs_glibc
def test_what_the_user_set_for_the_allocator_stays():
    assert run(asked=True, MALLOC_ARENA_MAX="2")[:2] == ["False", "True"]


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not memory.keep_freed_memory()
    memory.free_memory()
