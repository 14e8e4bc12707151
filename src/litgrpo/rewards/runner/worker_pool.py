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
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from typing import Any

import cloudpickle

from litgrpo.arguments import require
from litgrpo.rewards.runner.calls import FLOOD, MAX_PRINTED, MAX_SHOWN, TIMEOUT, Call
from litgrpo.rewards.runner.failures import WorkerError
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
LOAD_S = 120.0  # for the imports of a function's module
READ_BYTES = 1 << 16
MAX_PICKLED = 64_000_000  # bytes; what holds more is a model and stays here
GONE = (OSError, EOFError)  # what using the connection to a process that has ended raises


class LoadingFailed(WorkerError):
    """A process hung, died or flooded its output while it loaded a function.

    Args:
        name: of the reward.
        reason: what happened.
        printed: what the process printed.
    """

    def __init__(self, name: str, reason: str, printed: str) -> None:
        super().__init__(f"{reason} while loading", printed)
        self.name = name


class Output:
    """The beginning of what a process prints, and how much it was.

    Args:
        fd: the reading end of its pipe.
    """

    def __init__(self, fd: int) -> None:
        self.file = os.fdopen(fd, "rb", buffering=0)
        self.printed, self.shown = 0, bytearray()
        self.close = weakref.finalize(self, self.file.close)

    def fileno(self) -> int:
        """For `wait`."""
        return self.file.fileno()

    def drain(self) -> bool:
        """Read what was printed so far; says whether it is too much."""
        while self.printed <= MAX_PRINTED and select.select([self.file], [], [], 0)[0]:
            text = os.read(self.fileno(), READ_BYTES)
            if not text:
                break
            self.printed += len(text)
            self.shown += text[: MAX_SHOWN - len(self.shown)]
        return self.printed > MAX_PRINTED

    def take(self) -> str:
        """What was printed since the last time, shortened."""
        text, more = self.shown.decode(errors="replace"), self.printed - len(self.shown)
        self.printed, self.shown = 0, bytearray()
        return text + (f"\n... and {more} more bytes\n" if more > 0 else "")


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
    output: Output
    launcher: Launcher

    def end(self) -> str:
        """Kill it and all that it started; says what it died of."""
        for kill in (os.killpg, os.kill):  # one that was just forked has no group of its own yet
            try:
                kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                log.debug("worker %d is gone already", self.pid)
        code = self.launcher.exit_code(self.pid)
        self.output.drain()
        self.connection.close()
        self.output.close()
        return died_of(code)


class Launcher:
    """The process that loaded the functions and forks workers.

    Args:
        pickled: {name: the pickled function and its settings}.

    Raises:
        LoadingFailed: it hung, died or printed too much while it loaded one.
    """

    def __init__(self, pickled: Mapping[str, bytes]) -> None:
        ours, theirs = socket.socketpair()
        self.control = Connection(ours.detach())
        read, write = os.pipe()
        self.output = Output(read)
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, path, str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            env=os.environ | ONE_THREAD,
            start_new_session=True,  # Ctrl-C is for us; we end the workers
        )
        theirs.close()
        os.close(write)
        self.close = weakref.finalize(self, _shut, os.getpid(), self.process, self.control)
        self.used_up = False  # it has become a worker
        self.troubles = self._load(dict(pickled))

    def _load(self, pickled: dict[str, bytes]) -> dict[str, str]:
        """Send the functions, wait until they are loaded; {name: why it cannot be}."""
        heard: Any = "launcher"
        try:
            self.control.send(pickled)
            while isinstance(heard, str):  # the function that is being loaded
                self._wait(heard)
                heard = self.control.recv()
        except GONE:
            reason = died_of(self.process.wait())
            self.output.drain()
            raise LoadingFailed(heard, reason, self.output.take()) from None
        sys.stdout.write(self.output.take())
        return dict(heard)

    def _wait(self, name: str) -> None:
        """Until there is a message, or loading has failed."""
        until = time.monotonic() + LOAD_S
        sources: list[Any] = [self.control, self.output]
        while not self.control.poll():
            ready = wait(sources, max(0.0, until - time.monotonic()))
            reason = FLOOD if self.output.drain() else "" if ready else TIMEOUT
            if reason:
                name = self._loading(name)
                self.close()
                raise LoadingFailed(name, reason, self.output.take())

    def _loading(self, name: str) -> str:
        """The function that is being loaded, if it was `name` when we last heard of it.

        What a function prints may arrive before the message that its turn has come.
        """
        while self.control.poll():
            heard = self.control.recv()
            name = heard if isinstance(heard, str) else name
        return name

    def launch(self) -> Worker:
        """A new worker."""
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe()
        self.control.send(FORK)
        for fd in (theirs.detach(), output_write):
            send_handle(self.control, fd, self.process.pid)
            os.close(fd)
        pid = self.control.recv()
        self.used_up = pid == self.process.pid
        return Worker(pid, Connection(ours.detach()), Output(output_read), self)

    def exit_code(self, pid: int) -> int:
        """The exit code of a worker that has ended, or minus its signal."""
        try:
            if pid != self.process.pid:
                self.control.send(pid)
                return int(self.control.recv())
            return self.process.wait()
        except GONE:  # the launcher is gone, and its workers with it
            return -signal.SIGKILL
        finally:
            if self.process.poll() is not None:
                self.close()


def died_of(code: int) -> str:
    """What ended a process, from its exit code or minus its signal."""
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _shut(owner: int, process: subprocess.Popen[bytes], control: Connection) -> None:
    """End the launcher; its workers die with it."""
    if os.getpid() != owner:  # a fork of ours; the launcher belongs to the parent
        return
    control.close()
    process.kill()
    process.wait()


class WorkerPool:
    """As many workers as may run at the same time, and the launchers that they come from.

    Args:
        size: number of workers.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.owner = os.getpid()
        self.registered: dict[str, tuple[Any, Any]] = {}
        self.pickled: dict[str, bytes] = {}
        self.troubles: dict[str, str] = {}
        self.failed: dict[str, LoadingFailed] = {}
        self.launchers: list[Launcher] = []
        self.idle: list[Worker] = []
        self.busy: list[Worker] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or the same in another process, starts workers of its own."""
        return vars(WorkerPool(self.size))

    def register(self, calls: Sequence[Call]) -> dict[str, str]:
        """Make sure that workers know these functions; `failed` has those that broke a process.

        Returns:
            {name: why it cannot be sent to a worker}.
        """
        wanted = {call.name: (call.function, call.settings) for call in calls}
        known = self.registered
        if all(name in known and _same(known[name], wanted[name]) for name in wanted):
            return {name: self.troubles[name] for name in wanted if name in self.troubles}
        if sys.platform == "win32":  # cannot hand file descriptors to other processes
            return dict.fromkeys(wanted, "Windows has no workers")
        self.close()
        self.registered, self.pickled, self.troubles, self.failed = wanted, {}, {}, {}
        for name, part in wanted.items():
            try:
                self.pickled[name] = packed(*part)
            except Exception as error:  # whatever a foreign object raises when it is pickled
                self.troubles[name] = f"{type(error).__name__}: {error}"
        self._start()
        return self.troubles

    def _start(self) -> None:
        """Start a launcher, without the functions that break it."""
        self.launchers = [one for one in self.launchers if one.close.alive]
        while self.pickled:
            try:
                self.launchers.append(Launcher(self.pickled))
            except LoadingFailed as error:
                broken = {error.name} & self.pickled.keys() or set(self.pickled)
                self.failed |= dict.fromkeys(broken, error)
                self.pickled = {n: text for n, text in self.pickled.items() if n not in broken}
                continue
            self.troubles |= self.launchers[-1].troubles
            return

    def take(self) -> Worker | None:
        """A worker that waits, or a new one, or None if all are at work or nothing can be run."""
        if len(self.busy) >= self.size:
            return None
        while not self.idle and self.pickled:
            self._new()
        self.busy += self.idle[-1:]
        return self.idle.pop() if self.idle else None

    def _new(self) -> None:
        """Let a launcher fork, or start one."""
        ready = [one for one in self.launchers if one.close.alive and not one.used_up]
        if not ready:
            self._start()
            return
        try:
            self.idle.append(ready[0].launch())
        except GONE:  # somebody ended it
            ready[0].close()

    def release(self, worker: Worker) -> None:
        """The worker is done and can be taken again."""
        self.busy.remove(worker)
        self.idle.append(worker)

    def end(self, worker: Worker) -> str:
        """End a busy worker; says what it died of."""
        self.busy.remove(worker)
        return worker.end()

    def end_busy(self) -> None:
        """End workers whose answers nobody will read."""
        if self.owner != os.getpid():  # a fork of ours; the workers belong to the parent
            self.__init__(self.size)  # type: ignore[misc]
        for worker in list(self.busy):
            self.end(worker)

    def close(self) -> None:
        """End everything."""
        self.end_busy()
        for worker in self.idle:
            worker.end()
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
