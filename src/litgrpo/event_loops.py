"""Event loops in threads of this process, for threads that wait for coroutines.

`asyncio.run` raises where a loop runs already, as in a notebook, and what a coroutine opens belongs
to its loop. So each kind of work has one loop that stays.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")
_loops: dict[str, asyncio.AbstractEventLoop] = {}
_lock = threading.Lock()  # two threads must not make a loop each
# A forked process inherits the loops but not their threads.
os.register_at_fork(after_in_child=_loops.clear)


def event_loop(name: str) -> asyncio.AbstractEventLoop:
    """Return the loop of this name, which runs in a daemon thread."""
    with _lock:
        if name not in _loops:
            loop = _loops[name] = asyncio.new_event_loop()
            threading.Thread(target=_run, args=[loop], daemon=True, name=f"litgrpo-{name}").start()
        return _loops[name]


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop that nothing ends: a coroutine that calls `sys.exit` leaves it by that error."""
    while not loop.is_closed():
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


def drop_event_loop(name: str) -> None:
    """Let the next coroutine have another loop, because one blocks this one."""
    with _lock:
        _loops.pop(name, None)


def wait_for(coroutine: Coroutine[Any, Any, Result], name: str) -> Result:
    """Return the result of a coroutine that runs in the loop of this name, from another thread."""
    future = asyncio.run_coroutine_threadsafe(coroutine, event_loop(name))
    try:
        return future.result()
    except BaseException:  # also an interrupt: the result is not needed
        future.cancel()
        raise
