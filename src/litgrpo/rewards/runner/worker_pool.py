"""Starting and ending the processes in which reward functions run."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import IO, Any

import cloudpickle

from litgrpo.arguments import require
from litgrpo.rewards.runner.calls import MAX_PRINTED, MAX_SHOWN, Call
from litgrpo.rewards.runner.worker import FORK

log = logging.getLogger(__name__)

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from litgrpo.rewards.runner.worker import main; main(*map(int, sys.argv[2:]))"
)
# One thread each: several workers run side by side, and a process without threads can be forked.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
LOAD_S = 120.0  # imports of the functions' modules
READ_BYTES = 1 << 16
MAX_PICKLED = 64_000_000  # bytes; what holds more is a model and stays here
GONE = (OSError, EOFError)  # what using the connection to a process that has ended raises


class CannotLoad(RuntimeError):
    """The functions could not be loaded in another process."""


@dataclass(eq=False)
class Worker:
    """A process that answers one message after the other.

    Args:
        pid: its process.
        connection: carries messages.
        output: what it prints.
        launcher: the process that forked it, or itself.
    """

    pid: int
    connection: Connection
    output: IO[bytes]
    launcher: Launcher
    printed: int = 0
    shown: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        """Close the file when nobody knows the worker any more."""
        weakref.finalize(self, self.output.close)

    def drain(self) -> None:
        """Read what it has printed so far; keep the beginning."""
        while self.printed <= MAX_PRINTED and select.select([self.output], [], [], 0)[0]:
            text = os.read(self.output.fileno(), READ_BYTES)
            if not text:
                break
            self.printed += len(text)
            self.shown += text[: MAX_SHOWN - len(self.shown)]

    def take_prints(self) -> str:
        """What it printed since the last time, shortened."""
        text, more = self.shown.decode(errors="replace"), self.printed - len(self.shown)
        self.printed, self.shown = 0, bytearray()
        return text + (f"\n... and {more} more bytes\n" if more > 0 else "")

    def end(self, *, wait: bool) -> str:
        """Kill it and all that it started.

        Args:
            wait: for it to be gone, and so learn what it died of.
        """
        for kill in (os.killpg, os.kill):  # one that was just forked has no group of its own yet
            try:
                kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                log.debug("worker %d is gone already", self.pid)
        code = self.launcher.exit_code(self, wait=wait)
        self.drain()
        self.connection.close()
        self.output.close()
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


class Launcher:
    """The process that loaded the functions and forks workers.

    Args:
        pickled: {name: the pickled function and its settings}.

    Raises:
        CannotLoad: a function cannot be loaded there.
    """

    def __init__(self, pickled: Mapping[str, bytes]) -> None:
        ours, theirs = socket.socketpair()
        self.control = Connection(ours.detach())
        lifeline_read, lifeline = os.pipe()
        given = (theirs.fileno(), lifeline_read)
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, path, *map(str, given)],
            pass_fds=given,
            stdin=subprocess.DEVNULL,
            env=os.environ | ONE_THREAD,
            start_new_session=True,  # Ctrl-C is for us; we end the workers
        )
        theirs.close()
        os.close(lifeline_read)
        self.close = weakref.finalize(
            self, _shut, os.getpid(), self.process, self.control, lifeline
        )
        self.used_up = False  # it has become a worker
        troubles = self._load(dict(pickled))
        if troubles:
            self.close()
            raise CannotLoad("; ".join(f"{name}: {text}" for name, text in troubles.items()))

    def _load(self, pickled: dict[str, bytes]) -> dict[str, str]:
        """Send the functions, wait until they are loaded; {name: why it could not be}."""
        try:
            self.control.send(pickled)
            if self.control.poll(LOAD_S):
                return dict(self.control.recv())
        except GONE:
            code = self.process.wait()
            return {"launcher": f"the process that loads functions exited with {code}"}
        return {"launcher": f"loading took more than {LOAD_S:.0f} s"}

    def launch(self) -> Worker:
        """A new worker."""
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe()
        self.control.send((FORK, False))
        for fd in (theirs.detach(), output_write):
            send_handle(self.control, fd, self.process.pid)
            os.close(fd)
        pid = self.control.recv()
        self.used_up = pid == self.process.pid
        output = os.fdopen(output_read, "rb", buffering=0)
        return Worker(pid, Connection(ours.detach()), output, self)

    def exit_code(self, worker: Worker, *, wait: bool) -> int:
        """The exit code of a worker that has ended, or minus its signal."""
        if worker.pid == self.process.pid:
            code = self.process.wait()
            self.close()
            return code
        try:
            self.control.send((worker.pid, wait))
            return int(self.control.recv()) if wait else -signal.SIGKILL
        except GONE:  # the launcher is gone, too
            self.close()
            return -signal.SIGKILL


def _shut(owner: int, process: subprocess.Popen[bytes], control: Connection, lifeline: int) -> None:
    """End the launcher; its workers die with it."""
    if os.getpid() != owner:  # a fork of ours; the launcher belongs to the parent
        return
    control.close()
    os.close(lifeline)
    process.kill()
    process.wait()


class WorkerPool:
    """As many workers as may run at the same time, and the launchers that they come from.

    Nothing is started before it is needed.

    Args:
        size: number of workers.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.owner = os.getpid()
        self.registered: dict[str, tuple[Any, Any]] = {}
        self.pickled: dict[str, bytes] = {}
        self.troubles: dict[str, str] = {}
        self.launchers: list[Launcher] = []
        self.idle: list[Worker] = []
        self.busy: list[Worker] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or the same in another process, starts workers of its own."""
        return vars(WorkerPool(self.size))

    def register(self, calls: Sequence[Call]) -> dict[str, str]:
        """Make sure that workers know these functions.

        Returns:
            {name: why it cannot be run in a worker}.
        """
        wanted = {call.name: (call.function, call.settings) for call in calls}
        known = self.registered
        if all(name in known and _same(known[name], wanted[name]) for name in wanted):
            return {name: self.troubles[name] for name in wanted if name in self.troubles}
        if sys.platform == "win32":  # cannot hand file descriptors to other processes
            return dict.fromkeys(wanted, "Windows has no workers")
        self.close()
        self.registered, self.pickled, self.troubles = wanted, {}, {}
        for name, part in wanted.items():
            try:
                self.pickled[name] = packed(*part)
            except Exception as error:  # whatever a foreign object raises when it is pickled
                self.troubles[name] = f"{type(error).__name__}: {error}"
        try:
            self.launchers = [Launcher(self.pickled)] if self.pickled else []
        except CannotLoad as error:
            self.troubles |= dict.fromkeys(self.pickled, str(error))
        return self.troubles

    def take(self) -> Worker | None:
        """A worker that waits, or a new one, or None if all are at work."""
        if len(self.busy) >= self.size:
            return None
        worker = self.idle.pop() if self.idle else self._new()
        self.busy.append(worker)
        return worker

    def _new(self) -> Worker:
        for launcher in self.launchers:
            try:
                if launcher.close.alive and not launcher.used_up:
                    return launcher.launch()
            except GONE:  # somebody ended it
                launcher.close()
        self.launchers = [one for one in self.launchers if one.close.alive]
        self.launchers.append(Launcher(self.pickled))
        return self.launchers[-1].launch()

    def release(self, worker: Worker) -> None:
        """The worker is done and can be taken again."""
        self.busy.remove(worker)
        self.idle.append(worker)

    def end(self, worker: Worker, *, wait: bool) -> str:
        """End a busy worker; says what it died of, if that is waited for."""
        self.busy.remove(worker)
        return worker.end(wait=wait)

    def end_busy(self) -> None:
        """End workers whose answers nobody will read."""
        if self.owner != os.getpid():  # a fork of ours; the workers belong to the parent
            self.__init__(self.size)  # type: ignore[misc]
        for worker in list(self.busy):
            self.end(worker, wait=False)

    def close(self) -> None:
        """End everything."""
        self.end_busy()
        for worker in self.idle:
            worker.end(wait=False)
        for launcher in self.launchers:
            launcher.close()
        self.launchers, self.idle, self.registered = [], [], {}


def packed(function: Any, settings: dict[str, Any]) -> bytes:
    """A function and its settings as bytes; those of a script or notebook travel whole.

    Raises:
        ValueError: it is so large that it must hold a model.
    """
    text: bytes = cloudpickle.dumps((function, settings))
    require(len(text) <= MAX_PICKLED, f"it holds {len(text) // 1_000_000} MB")
    return text


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] is other[0] and one[1] is other[1]
