"""Parent side of the worker pool: start workers, send messages, receive replies, kill."""

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
from typing import Any, NamedTuple

import cloudpickle

from litgrpo.arguments import require
from litgrpo.workers.failures import FLOOD, MAX_PRINTED, MAX_SHOWN, TIMEOUT, WorkerError
from litgrpo.workers.worker import FORK, SHOW_STACK

log = logging.getLogger(__name__)

START = (
    "import json, sys; path, *words = json.loads(sys.argv[1]); sys.path[:] = path;"
    " from litgrpo.workers.worker import main; main(*words)"
)
# One thread each: several workers run in parallel, and only a process without other threads can be
# forked safely. A fixed hash seed gives sets of strings the same order in every run.
SETTINGS = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    **{"VECLIB_MAXIMUM_THREADS": "1", "PYTHONHASHSEED": "0"},
}
LOAD_S = 120.0  # time limit for importing an object's module
STACK_S = 2.0  # time limit for a late worker to print its stack
CLOSE_S = 5.0  # time limit for a launcher to kill its workers and their descendants
READ_BYTES = 1 << 16
MAX_PICKLED = 64_000_000  # bytes; anything larger holds a model by mistake
GONE = (OSError, EOFError)  # raised by a connection whose other process has exited


class LoadingFailed(WorkerError):
    """Process hung, died or flooded its output while loading an object.

    Args:
        name: name of the object.
        reason: cause in one line.
        printed: output of the process.
    """

    def __init__(self, name: str, reason: str, printed: str) -> None:
        super().__init__(f"{reason} while loading", printed)
        self.name = name


class WorkerOutput:
    """Start of a process's output, and the number of bytes printed.

    Args:
        fd: read end of the process's pipe.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.file = os.fdopen(fd, "rb", buffering=0)
        self.printed, self.shown = 0, bytearray()
        self.close = weakref.finalize(self, self.file.close)

    def fileno(self) -> int:
        """Return the descriptor, so that selectors can wait for output."""
        return self.file.fileno()

    def drain(self) -> bool:
        """Read the pipe; return True if the process printed too much."""
        # A full pipe would block the worker's print, so it is emptied beyond MAX_SHOWN, too.
        while self.printed <= MAX_PRINTED and (text := self.file.read(READ_BYTES)):
            self.printed += len(text)
            self.shown += text[: MAX_SHOWN - len(self.shown)]
        return self.printed > MAX_PRINTED

    def take(self) -> str:
        """Return the output since the last call, truncated."""
        text, more = self.shown.decode(errors="replace"), self.printed - len(self.shown)
        self.printed, self.shown = 0, bytearray()
        return text + (f"\n... and {more} more bytes\n" if more > 0 else "")


@dataclass(eq=False)
class Worker:
    """Process that answers one message at a time.

    Args:
        pid: process id.
        connection: carries messages and replies.
        output: its stdout and stderr.
        launcher: process that forked it, or that became this worker.
        deadline: `time.monotonic` at which it is killed while busy.
        waited_s: CPU waiting time when the deadline was last set.
    """

    pid: int
    connection: Connection
    output: WorkerOutput
    launcher: Launcher
    deadline: float = inf
    busy: bool = False
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        """Open the kernel's record of the time the process waited for a CPU, on Linux."""
        path = f"/proc/{self.pid}/schedstat"
        self.schedule = os.open(path if os.path.exists(path) else os.devnull, os.O_RDONLY)
        self.release = weakref.finalize(self, os.close, self.schedule)

    def begin(self, limit_s: float) -> None:
        """Mark the worker busy and start its time limit."""
        self.busy, self.waited_s = True, self._cpu_wait_s()
        self.deadline = time.monotonic() + limit_s

    def is_late(self, now: float) -> bool:
        """Return True if the time limit has passed, not counting time spent waiting for a CPU."""
        # On an oversubscribed machine a correct step can wait longer than it computes. The deadline
        # moves by the waiting time, so that load from elsewhere does not fail an episode.
        if now >= self.deadline:
            waited_s = self._cpu_wait_s()
            self.deadline += waited_s - self.waited_s
            self.waited_s = waited_s
        return now >= self.deadline

    def _cpu_wait_s(self) -> float:
        """Return the seconds since its start in which it was runnable but had no CPU."""
        try:
            return int(os.pread(self.schedule, 100, 0).split()[1]) / 1e9  # field 2 of schedstat, ns
        except (ProcessLookupError, IndexError):  # it has exited, or no schedstat here
            return self.waited_s

    def show_stack(self) -> None:
        """Make the worker print its stack, which also ends it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, SHOW_STACK)
        wait_for([self.connection], STACK_S)

    def kill(self) -> str:
        """Kill the worker and its process group; return the cause of its death."""
        for kill in (os.killpg, os.kill):  # a worker just forked is not yet a group leader
            with suppress(ProcessLookupError):  # already dead
                kill(self.pid, signal.SIGKILL)
        code = self.launcher.exit_code(self.pid)
        self.output.drain()
        self.connection.close()
        self.output.close()
        return describe_exit(code)


class WorkerReply(NamedTuple):
    """Reply of a worker.

    Args:
        worker: sender.
        answer: value, or `WorkerError` if the worker was lost.
        is_last: the worker has finished the message and is idle.

    Example::

        for worker, answer, is_last in pool.receive(wait=True):
            ...
    """

    worker: Worker
    answer: Any
    is_last: bool


class Launcher:
    """Process that has loaded the objects and forks workers.

    Args:
        pickled: {name: pickled object}.
        handler: `module:function` that answers messages in workers (`worker.Handler`).

    Raises:
        LoadingFailed: the process hung, died or printed too much while loading an object.
    """

    def __init__(self, pickled: Mapping[str, bytes], handler: str) -> None:
        parent_end, child_end = socket.socketpair()
        self.control = Connection(parent_end.detach())
        read, write = os.pipe()
        self.output = WorkerOutput(read)
        path = [os.path.abspath(entry) for entry in sys.path]
        words = json.dumps([path, child_end.fileno(), os.getpid(), handler])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, words],
            pass_fds=(child_end.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            env=os.environ | SETTINGS,
            start_new_session=True,  # Ctrl-C reaches the parent only, which kills the workers
        )
        child_end.close()
        os.close(write)
        self.close = weakref.finalize(self, _shut_down, os.getpid(), self.process, self.control)
        self.used_up = False  # True once it has become a worker itself
        self.troubles = self._load(dict(pickled))

    def _load(self, pickled: dict[str, bytes]) -> dict[str, str]:
        """Send the objects, wait until they are loaded, return {name: loading error}."""
        # The launcher sends the name of each object before loading it, then the dict of errors.
        message: Any = "launcher"
        try:
            self.control.send(pickled)
            while isinstance(message, str):
                self._wait(message)
                message = self.control.recv()
        except GONE:
            reason = describe_exit(self.process.wait())
            self.output.drain()
            raise LoadingFailed(message, reason, self.output.take()) from None
        self.output.drain()
        sys.stdout.write(self.output.take())
        return dict(message)

    def _wait(self, name: str) -> None:
        """Wait for a message.

        Raises:
            LoadingFailed: the time limit passed, or the process printed too much.
        """
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
        """Return the object that is being loaded, `name` if no later message arrived.

        The output of an object can arrive before the message that names it.
        """
        while self.control.poll():
            message = self.control.recv()
            name = message if isinstance(message, str) else name
        return name

    def launch(self) -> Worker:
        """Fork a worker."""
        parent_end, child_end = socket.socketpair()
        output_read, output_write = os.pipe()
        self.control.send(FORK)
        for fd in (child_end.detach(), output_write):
            send_handle(self.control, fd, self.process.pid)
            os.close(fd)
        pid = self.control.recv()
        self.used_up = pid == self.process.pid
        return Worker(pid, Connection(parent_end.detach()), WorkerOutput(output_read), self)

    def exit_code(self, pid: int) -> int:
        """Return the exit code of a killed or exited worker, or minus its signal."""
        try:
            # A forked worker is the launcher's child, and only a parent can read an exit code.
            if pid != self.process.pid:
                self.control.send(pid)
                return int(self.control.recv())
            return self.process.wait()
        except GONE:  # the launcher died, which kills its workers
            return -signal.SIGKILL
        finally:
            if self.process.poll() is not None:
                self.close()


def describe_exit(code: int) -> str:
    """Describe an exit code, or minus a signal.

    Example:
        >>> describe_exit(-9), describe_exit(3)
        ('died of SIGKILL', 'exited with 3')
    """
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _shut_down(owner: int, process: subprocess.Popen[bytes], control: Connection) -> None:
    """Terminate the launcher, which kills its workers and their descendants."""
    if os.getpid() != owner:  # a forked copy: the launcher belongs to the original process
        return
    control.close()
    process.terminate()
    try:
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:  # C code holds the interpreter, so SIGTERM is not handled
        process.kill()
        process.wait()


class WorkerPool:
    """Worker processes that run user code, which may hang, crash or flood its output.

    Args:
        size: maximal number of workers that `take` returns.
        handler: `module:function` that answers messages in workers (`worker.Handler`).

    Example::

        pool = WorkerPool(2, "litgrpo.environments.episode:handle_request")
        pool.register({"environment": (my_environment, None)})
        pool.send(pool.take(), request, limit_s=10.0)
        replies = pool.receive(wait=True)
    """

    def __init__(self, size: int, handler: str) -> None:
        self.size, self.handler = size, handler
        self._reset()

    def _reset(self) -> None:
        """Set the state of a pool without processes."""
        self.owner = os.getpid()
        self.registered: dict[str, tuple[Any, ...]] = {}
        self.pickled: dict[str, bytes] = {}
        self.troubles: dict[str, str] = {}
        self.failed: dict[str, LoadingFailed] = {}
        self.launchers: list[Launcher] = []
        self.workers: list[Worker] = []
        self.selector = selectors.DefaultSelector()

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings only: a copy starts its own workers."""
        return {"size": self.size, "handler": self.handler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the settings, without processes."""
        self.size, self.handler = state["size"], state["handler"]
        self._reset()

    def register(self, wanted: Mapping[str, tuple[Any, ...]]) -> dict[str, str]:
        """Load objects into workers; objects that broke a process are in `failed` afterwards.

        Args:
            wanted: {name: objects}; running workers are kept if the objects are identical.

        Returns:
            {name: reason} of objects that cannot be sent to a worker.
        """
        known = self.registered
        if all(name in known and _same(known[name], wanted[name]) for name in wanted):
            return {name: self.troubles[name] for name in wanted if name in self.troubles}
        if sys.platform == "win32":  # send_handle cannot pass file descriptors there
            return dict.fromkeys(wanted, "Windows has no workers")
        self.close()
        self.registered, self.pickled, self.troubles, self.failed = dict(wanted), {}, {}, {}
        for name, part in wanted.items():
            try:
                self.pickled[name] = pickle_objects(part)
            except Exception as error:  # pickling runs the object's own code
                self.troubles[name] = f"{type(error).__name__}: {error}"
        self._start()
        return self.troubles

    def _start(self) -> None:
        """Start a launcher; retry without objects that break it."""
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
        """Return an idle or new worker; None if all are busy or no object could be loaded."""
        idle = [worker for worker in self.workers if not worker.busy]
        if idle:
            return idle[-1]
        return self.launch() if len(self.workers) < self.size else None

    def launch(self) -> Worker | None:
        """Start a worker; None if no object could be loaded."""
        while self.pickled:
            ready = [one for one in self.launchers if one.close.alive and not one.used_up]
            if not ready:
                self._start()
                continue
            try:
                worker = ready[0].launch()
            except GONE:  # it was killed from outside, for instance by the OOM killer
                ready[0].close()
                continue
            self.workers.append(worker)
            self.selector.register(worker.connection, selectors.EVENT_READ, worker)
            self.selector.register(worker.output, selectors.EVENT_READ, worker)
            return worker
        return None

    def send(self, worker: Worker, message: Any, limit_s: float) -> None:
        """Send a message to an idle worker; `receive` returns the replies.

        Args:
            worker: idle worker of this pool.
            message: argument of the handler.
            limit_s: seconds after which the worker is killed.
        """
        worker.begin(limit_s)
        try:
            worker.connection.send(message)
        except OSError as error:  # it died while idle; `receive` reports that
            log.debug("worker %d: %s", worker.pid, error)

    def receive(self, *, wait: bool) -> list[WorkerReply]:
        """Return the replies since the last call.

        Args:
            wait: block until a worker replies, prints, or exceeds its time limit.

        Returns:
            Replies in order; a `WorkerError` for each worker that was lost.
        """
        until = min((worker.deadline for worker in self.workers if worker.busy), default=0.0)
        ready = self.selector.select(max(0.0, until - time.monotonic()) if wait else 0)
        replies: list[WorkerReply] = []
        for worker in dict.fromkeys(key.data for key, _ in ready):
            flood = worker.output.drain()
            # Read finished replies first; else a flood of the next message fails an earlier one.
            while worker in self.workers and worker.connection.poll():
                replies += self._read(worker)
            if worker.busy and (flood or worker.output.drain()):
                replies.append(WorkerReply(worker, self._lose(worker, FLOOD), True))
        now = time.monotonic()
        late = [worker for worker in self.workers if worker.busy and worker.is_late(now)]
        # A reply that arrived in the meantime counts, even if it is late.
        overdue = [worker for worker in late if not worker.connection.poll()]
        lost = [WorkerReply(worker, self._lose(worker, TIMEOUT), True) for worker in overdue]
        return replies + lost

    def _read(self, worker: Worker) -> list[WorkerReply]:
        """Read one reply; none from a worker that died while idle."""
        try:
            answer, is_last = worker.connection.recv()
        except GONE:
            was_busy = worker.busy
            error = self._lose(worker, None)
            return [WorkerReply(worker, error, True)] if was_busy else []
        if is_last:
            worker.busy, worker.deadline = False, inf
            sys.stdout.write(worker.output.take())
        return [WorkerReply(worker, answer, is_last)]

    def _lose(self, worker: Worker, reason: str | None) -> WorkerError:
        """Remove a worker that died (no reason given) or must be killed; return the error."""
        if reason == TIMEOUT:
            worker.show_stack()
        death = self.kill(worker)
        event = f"the worker was killed: {reason}" if reason else f"the worker {death}"
        return WorkerError(reason or death, f"{event}. {worker.output.take()}".strip())

    def kill(self, worker: Worker) -> str:
        """Kill a worker; return the cause of its death."""
        self.workers.remove(worker)
        self.selector.unregister(worker.connection)
        self.selector.unregister(worker.output)
        worker.busy = False
        return worker.kill()

    def kill_busy(self) -> None:
        """Kill busy workers, whose replies are no longer needed."""
        if self.owner != os.getpid():  # a forked copy: the workers belong to the original process
            self._reset()
        for worker in [worker for worker in self.workers if worker.busy]:
            self.kill(worker)
        self.receive(wait=False)  # removes workers that died while idle

    def close(self) -> None:
        """Kill all workers and launchers."""
        self.kill_busy()
        for worker in list(self.workers):
            self.kill(worker)
        for launcher in self.launchers:
            launcher.close()
        self.launchers, self.registered = [], {}


def pickle_objects(part: tuple[Any, ...]) -> bytes:
    """Pickle objects; code of a script or notebook is pickled by value.

    Raises:
        ValueError: the pickle is too large; it must hold a model.
    """
    text: bytes = cloudpickle.dumps(part)
    require(
        len(text) <= MAX_PICKLED,
        f"pickle has {len(text) // 1_000_000} MB, limit is {MAX_PICKLED // 1_000_000} MB",
    )
    return text


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
