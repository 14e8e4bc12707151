"""Worker processes from the side of the run: started, asked, listened to, ended."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.reduction import send_handle
from typing import Any

import cloudpickle

from litgrpo.arguments import require
from litgrpo.workers.failures import FLOOD, MAX_PRINTED, MAX_SHOWN, TIMEOUT, WorkerError
from litgrpo.workers.worker import FORK, SHOW_STACK

log = logging.getLogger(__name__)

START = (
    "import json, sys; path, *words = json.loads(sys.argv[1]); sys.path[:] = path;"
    " from litgrpo.workers.worker import main; main(*words)"
)
# One thread each: several workers run side by side, and a process without threads can be forked.
# Sets of texts have the same order in every run.
SETTINGS = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    **{"VECLIB_MAXIMUM_THREADS": "1", "PYTHONHASHSEED": "0"},
}
LOAD_S = 120.0  # for the imports of an object's module
STACK_S = 2.0  # for a worker that takes too long to show where it is
CLOSE_S = 5.0  # for a launcher to end all that its workers started
READ_BYTES = 1 << 16
MAX_PICKLED = 64_000_000  # bytes; what holds more is a model
GONE = (OSError, EOFError)  # what using the connection to a process that has ended raises


class LoadingFailed(WorkerError):
    """A process hung, died or flooded its output while it loaded an object.

    Args:
        name: of the object.
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
        os.set_blocking(fd, False)
        self.file = os.fdopen(fd, "rb", buffering=0)
        self.printed, self.shown = 0, bytearray()
        self.close = weakref.finalize(self, self.file.close)

    def fileno(self) -> int:
        """To be waited for."""
        return self.file.fileno()

    def drain(self) -> bool:
        """Read what was printed so far; says whether it is too much."""
        while self.printed <= MAX_PRINTED and (text := self.file.read(READ_BYTES)):
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
        until: when it is ended, while it is busy.
    """

    pid: int
    connection: Connection
    output: Output
    launcher: Launcher
    until: float = inf
    busy: bool = False
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        """Open the kernel's count of how long it waited for a processor, where there is one."""
        path = f"/proc/{self.pid}/schedstat"
        self.schedule = os.open(path if os.path.exists(path) else os.devnull, os.O_RDONLY)
        self.release = weakref.finalize(self, os.close, self.schedule)

    def begin(self, limit_s: float) -> None:
        """Its time begins."""
        self.busy, self.waited_s = True, self._waited_s()
        self.until = time.monotonic() + limit_s

    def is_late(self, now: float) -> bool:
        """Whether its time is over; what it waited for a processor is not its fault."""
        if now >= self.until:
            waited_s = self._waited_s()
            self.until += waited_s - self.waited_s
            self.waited_s = waited_s
        return now >= self.until

    def _waited_s(self) -> float:
        """Seconds since its start in which it could have run, and others did."""
        try:
            return int(os.pread(self.schedule, 100, 0).split()[1]) / 1e9
        except (ProcessLookupError, IndexError):  # it is gone, or the kernel does not count
            return self.waited_s

    def show_stack(self) -> None:
        """Let it print where it is; it ends with that."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, SHOW_STACK)
        wait_for([self.connection], STACK_S)

    def end(self) -> str:
        """Kill it and all that it started; says what it died of."""
        for kill in (os.killpg, os.kill):  # one that was just forked has no group of its own yet
            with suppress(ProcessLookupError):  # it is gone already
                kill(self.pid, signal.SIGKILL)
        code = self.launcher.exit_code(self.pid)
        self.output.drain()
        self.connection.close()
        self.output.close()
        return died_of(code)


StepResult = tuple[Worker, Any, bool]


class Launcher:
    """The process that loaded the objects and forks workers.

    Args:
        pickled: {name: the pickled object}.
        handler: `module:function`, how workers answer (`worker.Handler`).

    Raises:
        LoadingFailed: it hung, died or printed too much while it loaded one.
    """

    def __init__(self, pickled: Mapping[str, bytes], handler: str) -> None:
        ours, theirs = socket.socketpair()
        self.control = Connection(ours.detach())
        read, write = os.pipe()
        self.output = Output(read)
        path = [os.path.abspath(entry) for entry in sys.path]
        words = json.dumps([path, theirs.fileno(), os.getpid(), handler])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, words],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            env=os.environ | SETTINGS,
            start_new_session=True,  # Ctrl-C is for us; we end the workers
        )
        theirs.close()
        os.close(write)
        self.close = weakref.finalize(self, _shut, os.getpid(), self.process, self.control)
        self.used_up = False  # it has become a worker
        self.troubles = self._load(dict(pickled))

    def _load(self, pickled: dict[str, bytes]) -> dict[str, str]:
        """Send the objects, wait until they are loaded; {name: why it cannot be}."""
        heard: Any = "launcher"
        try:
            self.control.send(pickled)
            while isinstance(heard, str):  # the object that is being loaded
                self._wait(heard)
                heard = self.control.recv()
        except GONE:
            reason = died_of(self.process.wait())
            self.output.drain()
            raise LoadingFailed(heard, reason, self.output.take()) from None
        self.output.drain()
        sys.stdout.write(self.output.take())
        return dict(heard)

    def _wait(self, name: str) -> None:
        """Until there is a message, or loading has failed."""
        until = time.monotonic() + LOAD_S
        sources: list[Any] = [self.control, self.output]
        while not self.control.poll():
            ready = wait_for(sources, max(0.0, until - time.monotonic()))
            reason = FLOOD if self.output.drain() else "" if ready else TIMEOUT
            if reason:
                name = self._loading(name)
                self.close()
                raise LoadingFailed(name, reason, self.output.take())

    def _loading(self, name: str) -> str:
        """The object that is being loaded, if it was `name` when we last heard of it.

        What it prints may arrive before the message that its turn has come.
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
    """End the launcher; it ends its workers, and all that they started."""
    if os.getpid() != owner:  # a fork of ours; the launcher belongs to the parent
        return
    control.close()
    process.terminate()
    try:
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:  # foreign code that holds the interpreter
        process.kill()
        process.wait()


class WorkerPool:
    """Workers, and the launchers that they come from.

    Args:
        size: number of workers that `take` gives.
        handler: `module:function`, how workers answer (`worker.Handler`).
    """

    def __init__(self, size: int, handler: str) -> None:
        self.size, self.handler = size, handler
        self.owner = os.getpid()
        self.registered: dict[str, tuple[Any, ...]] = {}
        self.pickled: dict[str, bytes] = {}
        self.troubles: dict[str, str] = {}
        self.failed: dict[str, LoadingFailed] = {}
        self.launchers: list[Launcher] = []
        self.workers: list[Worker] = []
        self.selector = selectors.DefaultSelector()

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or the same in another process, starts workers of its own."""
        return {"size": self.size, "handler": self.handler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As new."""
        self.__init__(**state)  # type: ignore[misc]

    def register(self, wanted: Mapping[str, tuple[Any, ...]]) -> dict[str, str]:
        """Make sure that workers know these objects; `failed` has those that broke a process.

        Args:
            wanted: {name: objects}; nothing is started anew where they are the same objects.

        Returns:
            {name: why it cannot be sent to a worker}.
        """
        known = self.registered
        if all(name in known and _same(known[name], wanted[name]) for name in wanted):
            return {name: self.troubles[name] for name in wanted if name in self.troubles}
        if sys.platform == "win32":  # cannot hand file descriptors to other processes
            return dict.fromkeys(wanted, "Windows has no workers")
        self.close()
        self.registered, self.pickled, self.troubles, self.failed = dict(wanted), {}, {}, {}
        for name, part in wanted.items():
            try:
                self.pickled[name] = packed(part)
            except Exception as error:  # whatever a foreign object raises when it is pickled
                self.troubles[name] = f"{type(error).__name__}: {error}"
        self._start()
        return self.troubles

    def _start(self) -> None:
        """Start a launcher, without the objects that break it."""
        self.launchers = [one for one in self.launchers if one.close.alive]
        while self.pickled:
            try:
                self.launchers.append(Launcher(self.pickled, self.handler))
            except LoadingFailed as error:
                broken = {error.name} & self.pickled.keys() or set(self.pickled)
                self.failed |= dict.fromkeys(broken, error)
                self.pickled = {n: text for n, text in self.pickled.items() if n not in broken}
                continue
            self.troubles |= self.launchers[-1].troubles
            return

    def take(self) -> Worker | None:
        """A worker that waits, or a new one, or None if all are at work or nothing can be run."""
        waiting = [worker for worker in self.workers if not worker.busy]
        if waiting or len(self.workers) >= self.size:
            return waiting[-1] if waiting else None
        return self.launch()

    def launch(self) -> Worker | None:
        """A new worker, or None if nothing can be run."""
        while self.pickled:
            ready = [one for one in self.launchers if one.close.alive and not one.used_up]
            if not ready:
                self._start()
                continue
            try:
                worker = ready[0].launch()
            except GONE:  # somebody ended it
                ready[0].close()
                continue
            self.workers.append(worker)
            self.selector.register(worker.connection, selectors.EVENT_READ, worker)
            self.selector.register(worker.output, selectors.EVENT_READ, worker)
            return worker
        return None

    def ask(self, worker: Worker, message: Any, limit_s: float) -> None:
        """Send a message to a worker that waits; its answers come by `answers`.

        Args:
            worker: of this pool.
            message: for the handler.
            limit_s: seconds until it is ended.
        """
        worker.begin(limit_s)
        try:
            worker.connection.send(message)
        except OSError as error:  # it died while it waited: its answer will be its end
            log.debug("worker %d: %s", worker.pid, error)

    def answers(self, *, wait: bool) -> list[StepResult]:
        """What workers answered since the last call.

        Args:
            wait: until a worker answers, prints, or is overdue.

        Returns:
            (worker, answer, whether it waits again) of each. The answer of a worker that was lost
            is a `WorkerError`.
        """
        until = min((worker.until for worker in self.workers if worker.busy), default=0.0)
        ready = self.selector.select(max(0.0, until - time.monotonic()) if wait else 0)
        heard: list[StepResult] = []
        for worker in dict.fromkeys(key.data for key, _ in ready):
            flood = worker.output.drain()
            # All answers that came before what was printed: else a flood is blamed on them.
            while worker in self.workers and worker.connection.poll():
                heard += self._read(worker)
            if worker.busy and (flood or worker.output.drain()):
                heard.append((worker, self._lost(worker, FLOOD), True))
        now = time.monotonic()
        late = [worker for worker in self.workers if worker.busy and worker.is_late(now)]
        overdue = [worker for worker in late if not worker.connection.poll()]
        return heard + [(worker, self._lost(worker, TIMEOUT), True) for worker in overdue]

    def _read(self, worker: Worker) -> list[StepResult]:
        """One message; none where it died while it waited."""
        try:
            answer, last = worker.connection.recv()
        except GONE:
            was_busy = worker.busy
            lost = self._lost(worker, None)
            return [(worker, lost, True)] if was_busy else []
        if last:
            worker.busy, worker.until = False, inf
            sys.stdout.write(worker.output.take())
        return [(worker, answer, last)]

    def _lost(self, worker: Worker, reason: str | None) -> WorkerError:
        """A worker is gone (no reason), or must go."""
        if reason == TIMEOUT:
            worker.show_stack()
        died = self.end(worker)
        told = f"the worker was ended: {reason}" if reason else f"the worker {died}"
        return WorkerError(reason or died, f"{told}. {worker.output.take()}".strip())

    def end(self, worker: Worker) -> str:
        """End a worker; says what it died of."""
        self.workers.remove(worker)
        self.selector.unregister(worker.connection)
        self.selector.unregister(worker.output)
        worker.busy = False
        return worker.end()

    def end_busy(self) -> None:
        """End workers whose answers nobody will read."""
        if self.owner != os.getpid():  # a fork of ours; the workers belong to the parent
            self.__init__(self.size, self.handler)  # type: ignore[misc]
        for worker in [worker for worker in self.workers if worker.busy]:
            self.end(worker)
        self.answers(wait=False)  # forgets those that died while they waited

    def close(self) -> None:
        """End everything."""
        self.end_busy()
        for worker in list(self.workers):
            self.end(worker)
        for launcher in self.launchers:
            launcher.close()
        self.launchers, self.registered = [], {}


def packed(part: tuple[Any, ...]) -> bytes:
    """Objects as bytes; those of a script or notebook travel whole.

    Raises:
        ValueError: they are so large that they must hold a model.
    """
    text: bytes = cloudpickle.dumps(part)
    require(len(text) <= MAX_PICKLED, f"it holds {len(text) // 1_000_000} MB")
    return text


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
