"""Starting, watching and ending the processes in which reward functions run."""

from __future__ import annotations

import json
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import IO, Any

import cloudpickle

from litgrpo.rewards.runner.calls import MAX_PRINTED, MAX_SHOWN, Call
from litgrpo.rewards.runner.worker import BURY, COMMAND, FORK, REAP, REPLY

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

    def end(self, *, wait: bool = True) -> str:
        """Kill it and all that it started, and say what it died of, or do not wait for that."""
        for kill in (os.killpg, os.kill):  # one that was just forked has no group of its own yet
            try:
                kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                log.debug("worker %d is gone already", self.pid)
        code = self.launcher.reap(self) if wait else self.launcher.bury(self)
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
        """Start it and wait until the functions are loaded."""
        self.pickled = dict(pickled)
        self.control, theirs = socket.socketpair()
        lifeline_read, self.lifeline = os.pipe()
        payload_read, payload_write = os.pipe()
        given = (theirs.fileno(), lifeline_read, payload_read)
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, path, *map(str, given)],
            pass_fds=given,
            stdin=subprocess.DEVNULL,
            env=os.environ | ONE_THREAD,
            start_new_session=True,  # Ctrl-C is for us; we end the workers
        )
        for fd in given[1:]:
            os.close(fd)
        theirs.close()
        self.close = weakref.finalize(
            self, _shut, os.getpid(), self.process, self.control, self.lifeline
        )
        self.used_up = False
        try:
            with os.fdopen(payload_write, "wb") as payload:
                pickle.dump(self.pickled, payload)
            troubles = self._loaded()
        except (OSError, TimeoutError) as error:
            self.close()
            raise CannotLoad(str(error)) from error
        if troubles:
            self.close()
            raise CannotLoad("; ".join(f"{name}: {text}" for name, text in troubles.items()))

    def _loaded(self) -> dict[str, str]:
        self.control.settimeout(LOAD_S)
        size = REPLY.unpack(self._receive(REPLY.size))[0]
        troubles: dict[str, str] = pickle.loads(self._receive(size))
        self.control.settimeout(None)
        return troubles

    def _receive(self, size: int) -> bytes:
        text = b""
        while len(text) < size:
            more = self.control.recv(size - len(text))
            if not more:
                code = self.process.wait()
                raise ConnectionResetError(f"the process that loads functions exited with {code}")
            text += more
        return text

    def launch(self) -> Worker:
        """A new worker."""
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe()
        fds = [theirs.fileno(), output_write]
        socket.send_fds(self.control, [COMMAND.pack(FORK, 0)], fds)
        theirs.close()
        os.close(output_write)
        pid = REPLY.unpack(self._receive(REPLY.size))[0]
        self.used_up = pid == 0  # it could not be forked and is the worker itself
        return Worker(
            pid=pid or self.process.pid,
            connection=Connection(ours.detach()),
            output=os.fdopen(output_read, "rb", buffering=0),
            launcher=self,
        )

    def reap(self, worker: Worker) -> int:
        """The exit code of a worker that has ended, or minus its signal."""
        if worker.pid == self.process.pid:
            code = self.process.wait()
            self.close()
            return code
        try:
            self.control.sendall(COMMAND.pack(REAP, worker.pid))
            return int(REPLY.unpack(self._receive(REPLY.size))[0])
        except OSError:  # the launcher is gone, too
            self.close()
            return -signal.SIGKILL

    def bury(self, worker: Worker) -> int:
        """Leave a worker that was killed to the launcher: on a busy machine dying takes time."""
        if worker.pid == self.process.pid:
            return self.reap(worker)
        try:
            self.control.sendall(COMMAND.pack(BURY, worker.pid))
        except OSError:  # the launcher is gone, too
            self.close()
        return -signal.SIGKILL


def _shut(
    owner: int, process: subprocess.Popen[bytes], control: socket.socket, lifeline: int
) -> None:
    """End the launcher; its workers die with it."""
    if os.getpid() != owner:
        return
    control.close()
    os.close(lifeline)
    process.kill()
    process.wait()


class Crew:
    """As many workers as may run at the same time, and the launchers that they come from.

    Args:
        size: number of workers.
    """

    def __init__(self, size: int) -> None:
        """Nothing is started before it is needed."""
        self.size = size
        self.pickled: dict[str, bytes] = {}
        self.known: dict[str, tuple[Any, Any]] = {}
        self.troubles: dict[str, str] = {}
        self.launchers: list[Launcher] = []
        self.idle: list[Worker] = []
        self.busy: list[Worker] = []
        self.owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or the same in another process, starts workers of its own."""
        return vars(Crew(self.size))

    def teach(self, calls: list[Call]) -> dict[str, str]:
        """Make sure that workers know these functions.

        Returns:
            {name: why it cannot be run in a worker}.
        """
        if self.owner != os.getpid():  # a fork of ours; the workers belong to the parent
            self.__init__(self.size)  # type: ignore[misc]
        known = {call.name: (call.function, call.settings) for call in calls}
        if all(name in self.known and _same(self.known[name], known[name]) for name in known):
            return {name: self.troubles[name] for name in known if name in self.troubles}
        if sys.platform == "win32":  # cannot hand file descriptors to other processes
            return dict.fromkeys(known, "Windows has no workers")
        pickled, troubles = {}, {}
        for name, part in known.items():
            try:
                pickled[name] = packed(*part)
            except Exception as error:  # whatever a foreign object raises when it is pickled
                troubles[name] = f"{type(error).__name__}: {error}"
        self.close()
        self.pickled = pickled
        try:
            if pickled:
                self.launchers = [Launcher(pickled)]
        except CannotLoad as error:
            troubles |= dict.fromkeys(pickled, str(error))
        self.known, self.troubles = known, troubles
        return troubles

    def take(self) -> Worker | None:
        """A worker that waits, or a new one, or None if all are at work."""
        if len(self.busy) >= self.size:
            return None
        worker = self.idle.pop() if self.idle else self._new()
        self.busy.append(worker)
        return worker

    def stock(self) -> None:
        """Keep one more worker than are needed, where that is a matter of milliseconds."""
        if not self.idle and not any(launcher.used_up for launcher in self.launchers):
            self.idle.append(self._new())

    def _new(self) -> Worker:
        for launcher in self.launchers:
            try:
                if launcher.close.alive and not launcher.used_up:
                    return launcher.launch()
            except OSError:  # somebody ended it
                launcher.close()
        self.launchers = [one for one in self.launchers if one.close.alive]
        self.launchers.append(Launcher(self.pickled))
        return self.launchers[-1].launch()

    def rest(self, worker: Worker) -> None:
        """The worker is done and can be taken again."""
        self.busy.remove(worker)
        self.idle.append(worker)

    def dismiss(self, worker: Worker, *, wait: bool = True) -> str:
        """End a worker; says what it died of, if that is waited for."""
        self.busy.remove(worker)
        return worker.end(wait=wait)

    def close(self) -> None:
        """End everything."""
        for worker in self.idle + self.busy:
            worker.end()
        for launcher in self.launchers:
            launcher.close()
        self.launchers, self.idle, self.busy, self.known = [], [], [], {}


def packed(function: Any, settings: dict[str, Any]) -> bytes:
    """A function and its settings as bytes; those of a script or notebook travel whole.

    Raises:
        ValueError: it is so large that it must hold a model.
    """
    text: bytes = cloudpickle.dumps((function, settings))
    if len(text) > MAX_PICKLED:
        raise ValueError(f"it holds {len(text) // 1_000_000} MB")
    return text


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] is other[0] and one[1] is other[1]
