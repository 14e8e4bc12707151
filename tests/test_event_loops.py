"""Event loops in threads."""

import asyncio
import threading
import time

import pytest

from litgrpo.event_loops import drop_event_loop, event_loop, wait_for


def test_all_threads_share_one_event_loop():
    together, found = threading.Barrier(32), []

    def ask():
        together.wait()
        found.append(event_loop("new"))

    threads = [threading.Thread(target=ask) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_errors_of_a_coroutine_are_raised_where_one_waits():
    async def fails():
        raise KeyError("x")

    with pytest.raises(KeyError):
        wait_for(fails(), "one")


def test_a_loop_that_is_blocked_can_be_replaced():
    released = threading.Event()

    async def blocks():
        released.wait()

    async def three():
        return 3

    asyncio.run_coroutine_threadsafe(blocks(), event_loop("blocked"))
    drop_event_loop("blocked")
    try:
        begin = time.monotonic()
        assert wait_for(three(), "blocked") == 3
        assert time.monotonic() - begin < 60
    finally:
        released.set()


def test_a_coroutine_that_exits_leaves_the_loop_running():
    async def leaves():
        raise SystemExit(3)

    async def three():
        return 3

    async def together():
        return await asyncio.gather(leaves())

    with pytest.raises(SystemExit):
        wait_for(together(), "leaves")
    assert wait_for(three(), "leaves") == 3
