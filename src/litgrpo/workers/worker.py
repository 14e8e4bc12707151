"""Child side of the worker pool: a launcher that loads user code and forks workers to run it.

The run starts a launcher (`pool.py`) and sends it objects. Once they are loaded, the launcher forks
a worker for each request in milliseconds, even if the imports took long. A process with threads
(from a GPU library, for instance) cannot be forked safely and becomes the worker itself. Before the
fork, only loading runs user code. Nothing here imports torch or numpy, so that a launcher starts in
a tenth of a second.
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

FORK = 0  # requests a new worker; any other number is the pid of a worker to reap
SHOW_STACK = signal.SIGUSR1  # makes a worker print its stack and exit
PARENT_DIED, ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER of <sys/prctl.h>

Send = Callable[[Any], None]
# Answers a message, given the loaded objects. It may send partial replies; its return value is the
# last reply.
Handler = Callable[[dict[str, Any], Any, Send], Any]


def main(control_fd: int, parent: int, handler: str) -> None:
    """Load objects, then fork workers, or become one, until the run exits.

    Args:
        control_fd: descriptor of the connection to the run.
        parent: process id of the run.
        handler: `module:function` of a `Handler`.
    """
    _die_with(parent)
    _prefer_for_oom_killer()
    control = Connection(control_fd)
    try:
        handle: Handler = resolve_name(handler)
        loaded = load(control)
        connection_fd, output_fd = _launch(control, parent)
        control.close()
        _serve(Connection(connection_fd), output_fd, handle, loaded)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the run has exited


def load(control: Connection) -> dict[str, Any]:
    """Receive and unpickle the objects.

    Sends each name before loading its object, so that the parent knows which one hangs, and
    {name: error} at the end.
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
    """Fork workers; return in each of them its descriptors for messages and output."""
    launcher, workers, own = os.getpid(), set[int](), _children()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1)  # adopt orphans of workers, so they can be killed
        signal.signal(signal.SIGTERM, lambda *_: _kill_all(workers))
        _die_with(parent, signal.SIGTERM)
    while True:
        try:
            pid = control.recv()
        except (EOFError, OSError):
            _kill_all(workers)
        if pid != FORK:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            workers.discard(pid)
            _kill_strays(own | workers)
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
    if forked:  # could not fork: the launcher becomes the worker
        _die_with(parent)
        control.send(launcher)
    else:
        os.setpgid(0, 0)  # own process group, so that killpg reaches its children
        _die_with(launcher)


def _serve(connection: Connection, output_fd: int, handle: Handler, loaded: dict[str, Any]) -> None:
    """Answer messages until the connection closes."""
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
    """Return the children of this process, including adopted orphans."""
    file = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(map(int, file.read_text().split())) if file.exists() else set()


def _kill_strays(expected: Iterable[int]) -> None:
    """Kill processes that dead workers left behind.

    Killing one makes its children orphans, which this process adopts: repeat until none is left.
    """
    while strays := _children() - set(expected):
        for pid in strays:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _kill_all(workers: Iterable[int]) -> None:
    """Kill the workers and their descendants, then exit."""
    for pid in workers:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    _kill_strays(())
    os._exit(0)


def _can_fork() -> bool:
    """Return True if this process has one thread.

    A fork copies one thread only. A lock that another thread holds would never be released.
    """
    return sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1


def _die_with(parent: int, signum: int = signal.SIGKILL) -> None:
    """Exit when the parent dies; on Linux even inside C code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DIED, signum)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the request to the kernel
        os._exit(0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def _prefer_for_oom_killer() -> None:
    """Let the OOM killer choose this process before the training process."""
    if sys.platform == "linux":
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


def _flush_prints() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
