"""The process that loads foreign code, and those that it forks to run it.

The run starts a launcher (`pool.py`) and sends it objects. Once they are loaded, the launcher forks
a worker for each request, which takes milliseconds however long the imports took. A process that
has threads (a GPU library, for instance) cannot be forked safely and becomes the worker itself.
Nothing but the loading runs foreign code before the fork. Nothing here imports torch or numpy, so
that a launcher starts in a tenth of a second.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

FORK = 0  # asks the launcher for a worker; any other number is a worker that has ended
SHOW_STACK = signal.SIGUSR1  # a worker that gets it shows where it is, and ends
PARENT_DIED, ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER of <sys/prctl.h>

Send = Callable[[Any], None]
# Answers a message with the objects that were loaded: what it returns is the last answer, and what
# it sends are those before.
Handler = Callable[[dict[str, Any], Any, Send], Any]


def main(control_fd: int, parent: int, handler: str) -> None:
    """Load objects, then fork or become workers until the run is gone.

    Args:
        control_fd: of the connection to the run.
        parent: process of the run.
        handler: `module:function`, a `Handler`.
    """
    _die_with(parent)
    _be_first_to_go()
    control = Connection(control_fd)
    try:
        handle: Handler = resolve_name(handler)
        loaded = load(control)
        connection_fd, output_fd = _launch(control, parent)
        control.close()
        _serve(Connection(connection_fd), output_fd, handle, loaded)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # nobody is there to be answered


def load(control: Connection) -> dict[str, Any]:
    """The objects.

    Sends the name of each before it is loaded, so that the one that hangs is known, and at the end
    {name: why it could not be loaded}.
    """
    loaded: dict[str, Any] = {}
    troubles: dict[str, str] = {}
    for name, text in control.recv().items():
        control.send(name)
        try:
            loaded[name] = pickle.loads(text)
        except Exception as error:
            troubles[name] = f"{type(error).__name__}: {error}"
    _flush_prints()
    control.send(troubles)
    return loaded


def _launch(control: Connection, parent: int) -> tuple[int, int]:
    """Fork workers; returns in each of them, with the files for its messages and its output."""
    launcher, workers, own = os.getpid(), set[int](), _children()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1)  # what a worker started can be found and ended
        signal.signal(signal.SIGTERM, lambda *_: _end_all(workers))
        _die_with(parent, signal.SIGTERM)
    while True:
        try:
            pid = control.recv()
        except (EOFError, OSError):
            _end_all(workers)
        if pid != FORK:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            workers.discard(pid)
            _end_strays(own | workers)
            control.send(code)
            continue
        files = recv_handle(control), recv_handle(control)
        forked = os.fork() if _can_fork() else launcher
        if forked in (0, launcher):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _become_worker(control, launcher, parent, forked)
            return files
        workers.add(forked)
        for file in files:
            os.close(file)
        control.send(forked)


def _become_worker(control: Connection, launcher: int, parent: int, forked: int) -> None:
    if forked:  # not forked: the launcher is the worker
        _die_with(parent)
        control.send(launcher)
    else:
        os.setpgid(0, 0)  # so that it can be ended with all that it starts
        _die_with(launcher)


def _serve(connection: Connection, output_fd: int, handle: Handler, loaded: dict[str, Any]) -> None:
    """Answer messages until there is nobody to answer."""
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    faulthandler.enable(file=2, all_threads=False)
    faulthandler.register(SHOW_STACK, file=2, all_threads=False, chain=True)

    def send(answer: Any, last: bool = False) -> None:
        _flush_prints()
        connection.send((answer, last))

    while True:
        send(handle(loaded, connection.recv(), send), last=True)


def _children() -> set[int]:
    """Processes that this one started, or that became orphans under it."""
    file = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(map(int, file.read_text().split())) if file.exists() else set()


def _end_strays(kept: Iterable[int]) -> None:
    """End what workers that are gone had started, also what these had started, and so on."""
    while strays := _children() - set(kept):
        for pid in strays:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _end_all(workers: Iterable[int]) -> None:
    """The run is over: end the workers, all that they started, and this process."""
    for pid in workers:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    _end_strays(())
    os._exit(0)


def _can_fork() -> bool:
    """A fork copies one thread only, with whatever locks the others hold."""
    return sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1


def _die_with(parent: int, signum: int = signal.SIGKILL) -> None:
    """End when the parent is gone; on Linux also in the middle of C code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DIED, signum)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the lines above
        os._exit(0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def _be_first_to_go() -> None:
    """Where memory runs out, the system should end this process, not the training."""
    if sys.platform == "linux":
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


def _flush_prints() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
