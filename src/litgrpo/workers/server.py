"""What the fork server does when it starts: load the target that its workers share.

The server imports this module (`process.Server`). Nothing here imports torch or numpy, so that it
starts in a tenth of a second.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

STARTED = "LITGRPO_FORK_SERVER"  # environment variable that marks the server
TARGET = "LITGRPO_FORK_SERVER_TARGET"  # environment variable: file with the pickled target
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>


def prepare() -> tuple[Any, ...]:
    """Prepare this process for forking, and load the target; it exits if a fork is not safe.

    Returns the target; nothing if it is not to be loaded, or if that raised an error.
    """
    os.setsid()  # signals of the terminal reach the run only, which needs its workers to finish
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1)  # adopt orphans of workers, so they can be killed
        warnings.filterwarnings("ignore", "forkserver: waitpid")  # it does not know them
    atexit.register(_kill_children)
    sys.excepthook = _print_unless_lost
    if TARGET not in os.environ:
        return ()
    try:
        target: tuple[Any, ...] = (load(os.environ[TARGET]),)
    except Exception:  # each worker loads it again, and reports the error
        target = ()
    flush_prints()
    # A fork copies one thread only. A lock that another thread holds would never be released.
    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(1)
    return target


def load(path: str) -> Any:
    """Unpickle a target."""
    return pickle.loads(Path(path).read_bytes())


def descendants(pid: int) -> list[int]:
    """Return the processes that a process and its descendants have started; [] except on Linux."""
    pids = [pid]
    for parent in pids:
        with suppress(OSError):  # it has exited
            for task in Path(f"/proc/{parent}/task").iterdir():
                pids += map(int, (task / "children").read_text(encoding="ascii").split())
    return pids[1:]


def kill(pid: int) -> None:
    """Kill a process, unless it has exited or belongs to another user."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def flush_prints() -> None:
    """Write what was printed; forks would otherwise print it again."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _print_unless_lost(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an error; not the one by which the server or a fork sees that the run has ended."""
    if not issubclass(kind, EOFError):
        sys.__excepthook__(kind, error, trace)


def _kill_children() -> None:
    """Kill the workers and their descendants.

    Killing one makes its children orphans, which this process adopts: repeat until none is left.
    """
    while children := descendants(os.getpid()):
        for pid in children:
            kill(pid)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


# The target, if this process is the server or a fork of it; else empty.
loaded = prepare() if STARTED in os.environ else ()
