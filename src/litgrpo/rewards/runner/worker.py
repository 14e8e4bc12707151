"""A process in which reward functions may hang or crash without hurting the run.

The training process starts a launcher (`worker_pool.py`) and sends it the functions. Once they are
loaded, the launcher forks a worker for each request, which takes milliseconds however long the
imports took. A process that has threads (a GPU library, for instance) cannot be forked safely and
becomes the worker itself. Nothing but the loading runs foreign code before the fork.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import inspect
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from litgrpo.rewards.runner.calls import (
    Function,
    MalformedResult,
    Scores,
    WorkerError,
    failed,
    own_settings,
    read_result,
    reason_of,
)

FORK = 0  # asks the launcher for a worker; any other number is a worker that has ended
STACK_SHARE = 0.9  # of the time, after which a hanging worker shows its stack
MAX_TRACEBACK = 20_000  # characters
PARENT_DIED = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>

Loaded = dict[str, tuple[Function, dict[str, Any]]]
Answer = tuple[int, Scores, float]  # number of the question, its scores, seconds


@dataclass(frozen=True)
class Question:
    """Some rows of a call, as they travel to a worker.

    Args:
        name: of the reward function, loaded before.
        arguments: {parameter: value}, without the settings, which were sent before.
        num_rows: how many.
    """

    name: str
    arguments: dict[str, Any]
    num_rows: int


@dataclass(frozen=True)
class Message:
    """What a worker is sent.

    Args:
        questions: answered one after the other.
        together: they are coroutines, awaited at the same time.
        limit_s: seconds that each may take.
        show_stack: print where a question hangs, shortly before its time is over.
    """

    questions: list[Question]
    together: bool
    limit_s: float
    show_stack: bool


def main(control_fd: int, lifeline_fd: int) -> None:
    """Load the functions, then fork or become workers until the training process is gone."""
    _die_with(lifeline_fd)
    _be_first_to_go()
    control = Connection(control_fd)
    functions, troubles = _load(control.recv())
    control.send(troubles)
    _flush_prints()
    try:
        connection_fd, output_fd = _launch(control)
        control.close()
        _serve(Connection(connection_fd), output_fd, functions)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # nobody is there to be answered


def _launch(control: Connection) -> tuple[int, int]:
    """Fork workers; returns in each of them, with the files for its messages and its output."""
    launcher = os.getpid()
    killed: list[int] = []
    while True:
        pid, wants_code = control.recv()
        killed = [one for one in killed if not os.waitpid(one, os.WNOHANG)[0]]
        if pid != FORK and not wants_code:
            killed.append(pid)  # on a busy machine dying takes time: it is reaped later
            continue
        if pid != FORK:
            control.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            continue
        connection_fd, output_fd = recv_handle(control), recv_handle(control)
        forked = os.fork() if _can_fork() else launcher
        if forked == launcher:  # not forked: the launcher is the worker
            control.send(launcher)
            return connection_fd, output_fd
        if not forked:
            os.setpgid(0, 0)  # so that it can be ended with all that it starts
            _die_with_parent(launcher)
            return connection_fd, output_fd
        os.close(connection_fd)
        os.close(output_fd)
        control.send(forked)


def _serve(connection: Connection, output_fd: int, functions: Loaded) -> None:
    """Answer messages until there is nobody to answer."""
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    faulthandler.enable(file=2, all_threads=False)
    while True:
        message: Message = connection.recv()
        connection.send(time.monotonic())  # the time-out counts from here; the clock is shared
        if message.together:
            asyncio.run(_answer_together(message, functions, connection))
            continue
        for number in range(len(message.questions)):
            if message.show_stack:
                faulthandler.dump_traceback_later(STACK_SHARE * message.limit_s, file=2)
            started = time.perf_counter()
            scores = _answer(message.questions[number], functions)
            faulthandler.cancel_dump_traceback_later()
            _send(connection, (number, scores, time.perf_counter() - started))


def _answer(question: Question, functions: Loaded) -> Scores:
    """Call the function."""
    function, settings = functions[question.name]
    try:
        result = function(**question.arguments, **own_settings(settings))
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return read_result(result, question.num_rows)
    except BaseException as error:  # no Ctrl-C reaches this session: it was the function
        return _troubled(question, error)


async def _answer_together(message: Message, functions: Loaded, connection: Connection) -> None:
    """Call all functions, and await them at the same time."""

    async def ask(number: int, question: Question) -> None:
        started = time.perf_counter()
        function, settings = functions[question.name]
        try:
            answer = function(**question.arguments, **own_settings(settings))
            result = await asyncio.wait_for(answer, message.limit_s)
            scores = read_result(result, question.num_rows)
        except BaseException as error:
            scores = _troubled(question, error)
        _send(connection, (number, scores, time.perf_counter() - started))

    await asyncio.gather(*(ask(*numbered) for numbered in enumerate(message.questions)))


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _send(connection: Connection, answer: Answer) -> None:
    _flush_prints()
    connection.send(answer)


def _troubled(question: Question, error: BaseException) -> Scores:
    """Failed scores; only the text of an exception is sure to survive the journey."""
    kind: type[Exception] = WorkerError
    text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    if isinstance(error, MalformedResult):
        kind, text = MalformedResult, str(error)
    return failed(question.num_rows, reason_of(error), kind(text))


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

        # The kernel sends SIGKILL as soon as there is anything to read, here: the pipe's end.
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
        return

    def wait() -> None:
        os.read(lifeline_fd, 1)
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _die_with_parent(launcher: int) -> None:
    """The same for a fork, whose parent has one thread and lives as long as the launcher."""
    ctypes.CDLL(None).prctl(PARENT_DIED, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
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
