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
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, NamedTuple

from litgrpo.rewards.runner.calls import Scores, answer, own_settings
from litgrpo.rewards.runner.coroutines import awaited_answer
from litgrpo.rewards.runner.failures import MalformedResult, WorkerError, cause_of
from litgrpo.rewards.runner.marks import Function

FORK = 0  # asks the launcher for a worker; any other number is a worker that has ended
STACK_SHARE = 0.9  # of the time, after which a hanging worker shows its stack
MAX_TRACEBACK = 20_000  # characters
PARENT_DIED = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>

Loaded = dict[str, tuple[Function, dict[str, Any]]]


class Question(NamedTuple):
    """Some rows of a call, as they travel to a worker; settings were sent before.

    Args:
        name: of the reward function.
        arguments: {parameter: value}.
        num_rows: how many.
        notes: which methods of `Notes` the function names.
    """

    name: str
    arguments: dict[str, Any]
    num_rows: int
    notes: tuple[str, ...] = ()


class Message(NamedTuple):
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


def main(control_fd: int, parent: int) -> None:
    """Load the functions, then fork or become workers until the training process is gone."""
    _die_with(parent)
    _be_first_to_go()
    control = Connection(control_fd)
    try:
        functions = _load(control)
        connection_fd, output_fd = _launch(control)
        control.close()
        _serve(Connection(connection_fd), output_fd, functions)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # nobody is there to be answered


def _load(control: Connection) -> Loaded:
    """The functions with their settings.

    Sends the name of each before it is loaded, so that the one that hangs is known, and at the end
    {name: why it could not be loaded}.
    """
    functions: Loaded = {}
    troubles: dict[str, str] = {}
    for name, text in control.recv().items():
        control.send(name)
        try:
            functions[name] = pickle.loads(text)
        except Exception as error:
            troubles[name] = f"{type(error).__name__}: {error}"
    _flush_prints()
    control.send(troubles)
    return functions


def _launch(control: Connection) -> tuple[int, int]:
    """Fork workers; returns in each of them, with the files for its messages and its output."""
    launcher = os.getpid()
    while True:
        pid = control.recv()
        if pid != FORK:
            control.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            continue
        files = recv_handle(control), recv_handle(control)
        forked = os.fork() if _can_fork() else launcher
        if forked == launcher:  # not forked: the launcher is the worker
            control.send(launcher)
            return files
        if not forked:
            os.setpgid(0, 0)  # so that it can be ended with all that it starts
            _die_with(launcher)
            return files
        for file in files:
            os.close(file)
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
        for number, question in enumerate(message.questions):
            if message.show_stack:
                faulthandler.dump_traceback_later(STACK_SHARE * message.limit_s, file=2)
            started = time.perf_counter()
            scores = _answer(question, functions)
            faulthandler.cancel_dump_traceback_later()
            _send(connection, number, scores, started)


def _answer(question: Question, functions: Loaded) -> Scores:
    """Call the function."""
    function, given = _asked(question, functions)
    # No Ctrl-C reaches this session: whatever is raised, it was the function.
    scores = answer(function, given, question.num_rows, question.notes, (BaseException,))
    return _packed(scores)


async def _answer_together(message: Message, functions: Loaded, connection: Connection) -> None:
    """Call all functions, and await them at the same time."""

    async def ask(number: int, question: Question) -> None:
        started = time.perf_counter()
        function, given = _asked(question, functions)
        rows, notes = question.num_rows, question.notes
        scores = await awaited_answer(function, given, rows, notes, message.limit_s)
        _send(connection, number, _packed(scores), started)

    await asyncio.gather(*(ask(*numbered) for numbered in enumerate(message.questions)))


def _asked(question: Question, functions: Loaded) -> tuple[Function, dict[str, Any]]:
    function, settings = functions[question.name]
    return function, question.arguments | own_settings(settings)


def _send(connection: Connection, number: int, scores: Scores, started: float) -> None:
    """Send the number of a question, its scores, and the seconds that it took."""
    _flush_prints()
    connection.send((number, scores, time.perf_counter() - started))


def _packed(scores: Scores) -> Scores:
    """Scores for the journey; only the text of an exception is sure to survive it."""
    error = scores.error
    if error is not None and not isinstance(error, MalformedResult | WorkerError):
        text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
        scores.error = WorkerError(cause_of(error), text)
    return scores


def _can_fork() -> bool:
    """A fork copies one thread only, with whatever locks the others hold."""
    return sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1


def _die_with(parent: int) -> None:
    """End when the parent is gone; on Linux also in the middle of C code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DIED, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the lines above
        os._exit(0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
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
