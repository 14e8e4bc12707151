"""Processes that run user code, which may hang or crash, forked by the standard library's server.

`Launcher` starts a fork server (`multiprocessing.forkserver`) that loads the user's objects once.
Workers are its forks: they start in milliseconds, even if the imports took long. The user's script
is never run again, so it needs no main guard. If the run ends, also by SIGKILL, the server sees the
end of a pipe and kills its workers and what they have started.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, NamedTuple, cast

import cloudpickle

from litgrpo.arguments import require
from litgrpo.workers import server
from litgrpo.workers.failures import MAX_TRACEBACK, TIMEOUT, WorkerError, to_picklable

# One thread each: several workers run in parallel, and only a process without other threads can be
# forked safely. A fixed hash seed gives sets of strings the same order in every run.
SETTINGS = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    **{"VECLIB_MAXIMUM_THREADS": "1", "PYTHONHASHSEED": "0"},
}
LOAD_S = 120.0  # time limit for loading the target
STACK_S = 2.0  # time limit for a late worker to print its stack
EXIT_S = 5.0  # time limit for the server to tell the exit code of a killed worker
MAX_PICKLED = 64_000_000  # bytes; anything larger holds a model by mistake
MAX_LOADING = 4  # processes of a target that each of them has to load by itself
SHOW_STACK = signal.SIGUSR1 if sys.platform != "win32" else 0  # prints the stack, and ends a worker
PARENT_DIED = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
GONE = (OSError, EOFError)  # raised by a connection whose other process has exited

Send = Callable[[Any], None]
# Answers a message in a worker. It may send partial answers; its return value is the last.
Target = Callable[[Any, Send], Any]


class Server(forkserver.ForkServer):
    """The standard library's fork server, which loads a pickled target before it forks."""

    _forkserver_pid: int | None  # None before the first start
    _forkserver_alive_fd: int | None
    _stop: Callable[[], None]

    def __init__(self, pickled: Any) -> None:
        super().__init__()
        _servers.add(self)
        self.pickled, self.preloads = pickled, sys.platform == "linux"
        self.set_forkserver_preload([server.__name__])

    def ensure_running(self) -> None:
        """Start the server if it does not run."""
        if self._forkserver_pid is not None:
            with suppress(ChildProcessError):
                options = os.WEXITED | os.WNOHANG | os.WNOWAIT
                if os.waitid(os.P_PID, self._forkserver_pid, options) is None:
                    return
        path = os.pathsep.join(_search_path())
        settings = SETTINGS | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", server.STARTED: "1"}
        if self.preloads:
            settings[server.TARGET] = f"/proc/{os.getpid()}/fd/{self.pickled.fileno()}"
        with _environment(settings):
            super().ensure_running()

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._forkserver_pid is not None
        return self._forkserver_pid

    def stop(self, owner: int) -> None:
        """End the server, which kills its workers and their descendants."""
        # A forked copy of the owner must not end it.
        if os.getpid() == owner:
            self.kill()
            self.pickled.close()

    def kill(self) -> None:
        """End a server that may hang, its workers and their descendants."""
        if self._forkserver_pid is not None:
            # Its own end would wait for all copies of its pipe to be closed, also those of
            # processes that the run has forked.
            for pid in [*server.descendants(self.pid), self.pid]:
                server.kill(pid)
            with suppress(ChildProcessError):
                self._stop()


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _forget_servers() -> None:
    """Close a fork's copies of the pipes by which servers see that the run has ended."""
    for forked in _servers:
        if forked._forkserver_alive_fd is not None:
            os.close(forked._forkserver_alive_fd)
            forked._forkserver_alive_fd = None


os.register_at_fork(after_in_child=_forget_servers)


class Launcher:
    """Starts workers that answer messages by calling `target(message, send)`."""

    def __init__(self, target: Target) -> None:
        pickled = dump(target)
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  # open while workers are started
        self.file.write(pickled)
        self.file.flush()
        self.server = Server(self.file)
        self.close = weakref.finalize(self, self.server.stop, os.getpid())
        self.server.ensure_running()  # it loads the target meanwhile

    @property
    def preloads(self) -> bool:
        """True if the server has loaded the target; else each worker loads it."""
        return self.server.preloads

    def start(self) -> Worker:
        """Start a worker, which loads the target; `WorkerError` if the server does not start."""
        connection, worker_end = Pipe()
        stack = tempfile.TemporaryFile()  # noqa: SIM115  # the worker's
        try:
            pid, status = self._fork(
                [worker_end.fileno(), stack.fileno(), self.file.fileno(), 1, 2]
            )
        except BaseException:
            self.server.kill()
            raise
        worker_end.close()
        return Worker(pid, status, connection, stack)

    def _fork(self, descriptors: list[int]) -> tuple[int, int]:
        """Return process id and status pipe of a new worker."""
        while True:
            status, data = self.server.connect_to_new_process(descriptors)
            child = ForkedWorker(self.server.pid, dict(os.environ))
            with suppress(*GONE), open(data, "wb") as file:
                if wait_for([status], LOAD_S):
                    pid = forkserver.read_signed(status)
                    pickle.dump({"sys_path": _search_path(), "dir": os.getcwd()}, file)
                    pickle.dump(child, file)
                    file.flush()
                    return pid, status
            os.close(status)
            # The server hung or died while it loaded the target, or the target started threads,
            # which a fork must not copy: the next server leaves the loading to its workers.
            self.server.kill()
            if not self.server.preloads:
                raise WorkerError("the server of worker processes does not start")
            self.server.preloads = False


@dataclass
class ForkedWorker:
    """What the standard library's server runs in a fork: it calls `_bootstrap`."""

    parent: int  # process id of the server
    environment: dict[str, str]  # environment variables

    def _bootstrap(self, _: int) -> int:
        descriptors: list[int] = forkserver.get_inherited_fds()  # type: ignore[assignment]
        connection, stack, pickled, *streams = descriptors
        os.setpgid(0, 0)  # its own process group, so that killpg reaches its children
        _die_with(self.parent)
        _prefer_for_oom_killer()
        # The server ends when nobody holds the other end of this pipe: only the run does.
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(self.environment | SETTINGS)
        faulthandler.enable(file=stack, all_threads=False)
        faulthandler.register(SHOW_STACK, file=stack, all_threads=False, chain=True)
        with suppress(*GONE):  # the run has exited
            _serve(Connection(connection), pickled)
        return 0


def _serve(connection: Connection, pickled: int) -> None:
    """Load the target, then answer messages until the connection closes."""

    def send(answer: Any, is_last: bool = False) -> None:
        server.flush_prints()
        try:
            connection.send((answer, is_last))
        except OSError:
            raise
        except Exception as error:  # the answer cannot be pickled
            connection.send((to_picklable(error), is_last))

    try:
        target = server.loaded or (server.load(f"/proc/self/fd/{pickled}"),)
    except BaseException as error:  # also SystemExit of a module
        send(to_picklable(error), True)
        return
    send(None, True)
    while True:
        text = connection.recv_bytes()
        try:
            answer = target[0](pickle.loads(text), send)
        except BaseException as error:
            answer = to_picklable(error)
        send(answer, True)


class WorkerReply(NamedTuple):
    """Reply of a worker."""

    worker: Worker  # sender
    answer: Any  # value, or `WorkerError` if the target raised or the worker was lost
    is_last: bool  # the worker has finished the message


class Worker:
    """Process that answers one message at a time; made by `Launcher.start`."""

    # `status` is a descriptor from which the exit code can be read, `stack` a file to which the
    # process writes its stack before it is ended. The pid is also that of its process group.

    def __init__(self, pid: int, status: int, connection: Connection, stack: Any) -> None:
        self.pid, self.connection, self.status, self.stack = pid, connection, status, stack
        self.release = weakref.finalize(self, _close, status, stack)
        self.has_loaded, self.busy = False, False
        self.deadline = time.monotonic() + LOAD_S
        self._unsent: tuple[bytes, float] | None = None

    def fileno(self) -> int:
        """Return the descriptor on which answers arrive."""
        return self.connection.fileno()

    @property
    def is_lost(self) -> bool:
        """True if the worker was killed."""
        return self.connection.closed

    @property
    def is_loading(self) -> bool:
        """True until the worker has loaded the target, or was killed."""
        return not (self.has_loaded or self.is_lost)

    @property
    def is_idle(self) -> bool:
        """True if the worker can take a message; False also if it has died meanwhile."""
        if self.busy or self.is_lost:
            return False
        return self.is_loading or not self.connection.poll()

    def send(self, message: Any, limit_s: float) -> None:
        """Send a message to an idle worker, which is killed after `limit_s` seconds of work."""
        self._write(pickle.dumps(message), limit_s)

    def _write(self, pickled: bytes, limit_s: float) -> None:
        self.busy = True
        if self.is_loading:  # it does not read yet, and a long message would block
            self._unsent = pickled, limit_s
            return
        self.deadline = time.monotonic() + limit_s
        with suppress(OSError):  # it died while idle; `receive` reports that
            self.connection.send_bytes(pickled)

    def load(self) -> None:
        """Wait until the target is loaded; raise `WorkerError` if that fails or takes too long."""
        while self.is_loading:
            for _, error, _ in receive([self], wait=True):
                raise error

    def read(self) -> list[WorkerReply]:
        """Read what has arrived; it is no reply if it only says that the target is loaded."""
        try:
            answer, is_last = self.connection.recv()
        except GONE:
            return [WorkerReply(self, self.lose(None), True)]
        except Exception as error:  # of a class that only the worker can load
            answer, is_last = to_picklable(error), True
        if self.is_loading:
            if isinstance(answer, WorkerError):
                self.kill()
                return [WorkerReply(self, answer, True)]
            self.has_loaded, self.deadline = True, inf
            if self._unsent is not None:
                self._write(*self._unsent)
            return []
        if is_last:
            self.busy, self.deadline = False, inf
        return [WorkerReply(self, answer, is_last)]

    def lose(self, reason: str | None) -> WorkerError:
        """Kill a worker that died (no reason given) or is late; return the error."""
        started = server.descendants(self.pid)  # nobody's children once the signal has ended it
        if reason == TIMEOUT:
            with suppress(ProcessLookupError):
                os.kill(self.pid, SHOW_STACK)
            wait_for([self.connection], STACK_S)
        loading = " while loading" if self.is_loading else ""
        self.stack.seek(0)
        stack = self.stack.read(MAX_TRACEBACK).decode(errors="replace")
        death = self.kill(started)
        event = f"the worker was killed: {reason}" if reason else f"the worker {death}"
        return WorkerError(f"{reason or death}{loading}", f"{event}. {stack}".strip())

    def kill(self, started: Sequence[int] = ()) -> str:
        """Kill the worker, its descendants and these processes; return the cause of its death."""
        if self.is_lost:
            return "was killed"
        self.busy = False
        for pid in started:
            server.kill(pid)
        # The number of a process whose exit code is known may belong to another one.
        if not wait_for([self.status], 0):
            for pid in [*server.descendants(self.pid), self.pid]:
                server.kill(pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = -signal.SIGKILL
        with suppress(*GONE):  # the server died, which kills its workers
            if wait_for([self.status], EXIT_S):
                code = forkserver.read_signed(self.status)
        self.connection.close()
        self.release()
        return describe_exit(code)


class WorkerPool:
    """Workers with one target, each of them taken by one user at a time; at most `size` of them."""

    def __init__(self, target: Target, size: int) -> None:
        self.launcher, self.size = Launcher(target), size
        self.workers: list[Worker] = []
        self.free: list[Worker] = []

    def load(self) -> None:
        """Start the first worker."""
        try:
            first = self.launcher.start()
            self.workers, self.free = [first], [first]
            first.load()
        except WorkerError:
            self.close()
            raise
        # Without the server's copy each process needs the time and the memory of loading.
        self.size = self.size if self.launcher.preloads else min(self.size, MAX_LOADING)

    def take(self) -> Worker | None:
        """Return a free or new worker; None if all are taken."""
        while self.free:
            worker = self.free.pop()
            if worker.is_idle:
                return worker
            worker.kill()  # it died
        self.workers = [worker for worker in self.workers if not worker.is_lost]
        if len(self.workers) >= self.size:
            return None
        self.workers.append(self.launcher.start())
        return self.workers[-1]

    def give_back(self, worker: Worker) -> None:
        """Let others take a worker that is idle, or was lost."""
        if not worker.is_lost:
            self.free.append(worker)

    def take_all_back(self) -> None:
        """Kill the busy workers, whose answers are no longer needed, and free the others."""
        for worker in [worker for worker in self.workers if worker.busy]:
            worker.kill()
        self.free = [worker for worker in self.workers if not worker.is_lost]

    def close(self) -> None:
        """Kill all workers."""
        for worker in self.workers:
            worker.kill()
        self.launcher.close()


def receive(workers: Iterable[Worker], *, wait: bool) -> list[WorkerReply]:
    """Return the replies since the last call, and kill workers that exceed their time limit.

    A lost worker replies a `WorkerError`. `wait` blocks for a reply, a loss or a loaded target.
    """
    active = [worker for worker in workers if worker.busy or worker.is_loading]
    until = min((worker.deadline for worker in active), default=0.0)
    limit_s = max(0.0, until - time.monotonic()) if wait else 0.0
    replies: list[WorkerReply] = []
    ready = wait_for(active, None if limit_s == inf else limit_s)  # type: ignore[arg-type]
    for worker in cast("list[Worker]", ready):
        while (worker.busy or worker.is_loading) and worker.connection.poll():
            replies += worker.read()
    now = time.monotonic()
    for worker in active:
        late = (worker.busy or worker.is_loading) and now >= worker.deadline
        if late and not worker.connection.poll():  # an answer that arrived counts, even if late
            replies.append(WorkerReply(worker, worker.lose(TIMEOUT), True))
    return replies


def _close(status: int, stack: Any) -> None:
    os.close(status)
    stack.close()


def dump(value: Any) -> bytes:
    """Pickle an object; code of a script or notebook is pickled by value. A model is too large."""
    pickled: bytes = cloudpickle.dumps(value)
    require(
        len(pickled) <= MAX_PICKLED,
        f"pickle has {len(pickled) // 1_000_000} MB, limit is {MAX_PICKLED // 1_000_000} MB",
    )
    return pickled


def describe_exit(code: int) -> str:
    """Describe an exit code, or minus a signal.

    Example:
        >>> describe_exit(-9), describe_exit(3)
        ('died of SIGKILL', 'exited with 3')
    """
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _search_path() -> list[str]:
    return [os.path.abspath(entry) for entry in sys.path]


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started within."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _die_with(parent: int) -> None:
    """Exit when the parent dies; on Linux even inside C code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DIED, signal.SIGKILL)
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
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
