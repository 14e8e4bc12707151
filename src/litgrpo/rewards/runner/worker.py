"""A process for reward functions, which may hang or crash there without hurting the run.

The launcher (`processes.py`) starts one such process and sends it the functions. Once they are
loaded it forks a worker for each request, which takes milliseconds, however long the imports took.
A process that has threads (a GPU library, for instance) cannot be forked safely and serves itself.
Nothing but the loading runs foreign code before the fork.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from litgrpo.rewards.runner.calls import (
    Function,
    MalformedResult,
    Scores,
    failed,
    is_coroutine,
    own_settings,
    read_result,
    reason_of,
)

COMMAND, REPLY = struct.Struct("!cq"), struct.Struct("!q")
FORK, REAP, BURY = b"F", b"R", b"B"
FLUSH_S = 0.005  # results are sent together for so long, because a message costs more than a row
STACK_SHARE = 0.9  # of the time, after which a hanging worker shows its stack
MAX_TRACEBACK = 20_000  # characters
PARENT_DIED = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>

Loaded = dict[str, tuple[Function, dict[str, Any]]]


@dataclass(frozen=True)
class Job:
    """Rows of one call, as they travel to a worker.

    Args:
        name: of the reward function, loaded before.
        rows: {parameter: one value per row}.
        context: {parameter: value} the same for all rows.
        num_rows: how many.
        split: ask for each row alone, so that each has a result of its own.
        limit_s: seconds that all of it may take.
        stream: send each result at once.
    """

    name: str
    rows: dict[str, list[Any]]
    context: dict[str, Any]
    num_rows: int
    split: bool
    limit_s: float
    stream: bool = False

    def questions(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Arguments and number of rows of each question."""
        if not self.split:
            yield self.rows | self.context, self.num_rows
            return
        for row in range(self.num_rows):
            yield (
                {name: values[row : row + 1] for name, values in self.rows.items()}
                | (self.context),
                1,
            )


@dataclass
class Answer:
    """The result of one question.

    Args:
        job: number of the job in its message.
        item: number of the question in its job.
        scores: what came back; `scores.error` is empty, an exception may not survive the journey.
        trouble: kind (`malformed` or `raised`) and text of the exception, if there was one.
        seconds: how long it took.
    """

    job: int
    item: int
    scores: Scores
    trouble: tuple[str, str] | None = None
    seconds: float = 0.0


@dataclass
class Outbox:
    """Results on their way back.

    Args:
        connection: to the guard.
        stream: send each at once.
    """

    connection: Connection
    stream: bool
    waiting: list[Answer] = field(default_factory=list)
    sent_at: float = field(default_factory=time.monotonic)

    def put(self, answer: Answer) -> None:
        """Send it now or soon."""
        self.waiting.append(answer)
        if self.stream or time.monotonic() - self.sent_at > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Send what waits."""
        if self.waiting:
            _flush_prints()
            self.connection.send(self.waiting)
        self.waiting, self.sent_at = [], time.monotonic()


def main(control_fd: int, lifeline_fd: int, payload_fd: int) -> None:
    """Load the functions, then fork or become workers until the launcher is gone."""
    _die_with(lifeline_fd)
    _be_first_to_go()
    control = socket.socket(fileno=control_fd)
    with os.fdopen(payload_fd, "rb") as payload:
        functions, troubles = _load(pickle.load(payload))
    text = pickle.dumps(troubles)
    control.sendall(REPLY.pack(len(text)) + text)
    _flush_prints()
    dying: list[int] = []
    while True:
        message, fds, _, _ = socket.recv_fds(control, COMMAND.size, 2)
        if len(message) < COMMAND.size:
            os._exit(0)  # the launcher is gone; workers follow
        command, number = COMMAND.unpack(message)
        if command == BURY:
            dying.append(number)
            continue
        dying = [pid for pid in dying if not os.waitpid(pid, os.WNOHANG)[0]]
        if command == REAP:
            _, status = os.waitpid(number, 0)
            control.sendall(REPLY.pack(os.waitstatus_to_exitcode(status)))
            continue
        pid = os.fork() if command == FORK and _can_fork() else 0
        if pid:
            for fd in fds:
                os.close(fd)
            control.sendall(REPLY.pack(pid))
            continue
        if os.getpid() == _LAUNCHED:
            control.sendall(REPLY.pack(0))  # "I am the worker"
        else:
            os.setpgid(0, 0)  # so that it can be ended with all that it starts
            _die_with_parent()
        control.close()
        _serve(fds, functions)


_LAUNCHED = os.getpid()


def _serve(fds: list[int], functions: Loaded) -> None:
    """Answer messages until there is nobody to answer."""
    connection = Connection(fds[0])
    os.dup2(fds[1], 1)
    os.dup2(fds[1], 2)
    os.close(fds[1])
    faulthandler.enable(file=2, all_threads=False)
    try:
        while True:
            jobs: list[Job] = connection.recv()
            connection.send(time.monotonic())  # now it begins; the clock is the machine's
            outbox = Outbox(connection, jobs[0].stream)
            _work(jobs, functions, outbox)
            outbox.flush()
            connection.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)


def _work(jobs: list[Job], functions: Loaded, outbox: Outbox) -> None:
    """Put the answer to every question into the outbox."""
    function, settings = functions[jobs[0].name]
    if is_coroutine(function) and not jobs[0].stream:
        asyncio.run(_gather(jobs, functions, outbox))
        return
    if not jobs[0].stream:  # say where it hangs, before it is ended
        faulthandler.dump_traceback_later(STACK_SHARE * jobs[0].limit_s, file=2)
    for item, (arguments, num_rows) in enumerate(jobs[0].questions()):
        started = time.perf_counter()
        try:
            result = function(**arguments, **own_settings(settings))
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            answer = Answer(0, item, read_result(result, num_rows))
        except BaseException as error:  # no Ctrl-C reaches this session: it was the function
            answer = _troubled(0, item, num_rows, error)
        answer.seconds = time.perf_counter() - started
        outbox.put(answer)
    faulthandler.cancel_dump_traceback_later()


async def _gather(jobs: list[Job], functions: Loaded, outbox: Outbox) -> None:
    """All coroutines of all jobs at once."""

    async def ask(number: int, item: int, arguments: dict[str, Any], num_rows: int) -> Answer:
        job, started = jobs[number], time.perf_counter()
        function, settings = functions[job.name]
        try:
            answer = function(**arguments, **own_settings(settings))
            result = await asyncio.wait_for(answer, job.limit_s)
            got = Answer(number, item, read_result(result, num_rows))
        except BaseException as error:
            got = _troubled(number, item, num_rows, error)
        got.seconds = time.perf_counter() - started
        return got

    async def answers() -> AsyncIterator[Answer]:
        questions = [
            ask(number, item, arguments, num_rows)
            for number, job in enumerate(jobs)
            for item, (arguments, num_rows) in enumerate(job.questions())
        ]
        for done in asyncio.as_completed(questions):
            yield await done

    async for answer in answers():
        outbox.put(answer)


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _troubled(job: int, item: int, num_rows: int, error: BaseException) -> Answer:
    if isinstance(error, MalformedResult):
        return Answer(job, item, failed(num_rows, reason_of(error)), ("malformed", str(error)))
    text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    return Answer(job, item, failed(num_rows, reason_of(error)), ("raised", text))


def _load(pickled: dict[str, bytes]) -> tuple[Loaded, dict[str, str]]:
    """The functions with their settings, and why some could not be loaded."""
    functions: Loaded = {}
    troubles: dict[str, str] = {}
    for name, text in pickled.items():
        try:
            functions[name] = pickle.loads(text)
        except (Exception, SystemExit) as error:
            troubles[name] = f"{type(error).__name__}: {error}"
    return functions, troubles


def _can_fork() -> bool:
    """A fork copies one thread only, with whatever locks the others hold."""
    return sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1


def _die_with(lifeline_fd: int) -> None:
    """End when the other side of this pipe is closed, also in the middle of C code."""
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
        return
    import threading

    def wait() -> None:
        os.read(lifeline_fd, 1)
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _die_with_parent() -> None:
    """The same for a fork, whose parent has one thread and lives as long as the launcher."""
    ctypes.CDLL(None).prctl(PARENT_DIED, signal.SIGKILL)
    if os.getppid() != _LAUNCHED:
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
