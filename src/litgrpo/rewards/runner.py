"""The reward runner: calls reward functions in worker processes, and counts what failed."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from math import ceil, nan
from pathlib import Path
from typing import Any, NamedTuple

from litgrpo.event_loops import drop_event_loop, event_loop
from litgrpo.rewards.calls import (
    Call,
    Function,
    MalformedResult,
    Scores,
    UnusableReward,
    find_mark,
    find_state_owner,
    is_marked,
    make_failed_scores,
    score_call,
    score_coroutine,
)
from litgrpo.rewards.scoring import Scoring
from litgrpo.workers.failures import FailureCounter, WorkerError, cause_of, to_picklable
from litgrpo.workers.process import Send, Worker, WorkerPool, receive

log = logging.getLogger(__name__)

OWN_PACKAGE = "litgrpo.rewards."
MAX_WORKERS = 4
GRACE_S = 2.0  # for a coroutine to be stopped from within, on a busy machine
SLOW_S = 1.0  # of a call; slower ones are logged
SLOW_IMPORT_S = 3.0


class RewardFailure(RuntimeError):
    """More rewards of one function failed than `max_failed_frac` allows.

    The message is one line; the cause has the traceback.
    """

    exit_code = 2


class FunctionInWorker:
    """Scores rows in the worker processes of one function."""

    # The rows of `call` are not kept: each message has its own.

    def __init__(self, call: Call) -> None:
        self.call = replace(call, rows={}, num_rows=0, context={}, places=())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Import what the function needs, before this process is forked."""
        self.__dict__.update(state)
        prepare = find_mark(self.call.function, "prepare")
        if prepare is not None:
            prepare()

    def __call__(self, message: tuple[Any, ...], send: Send) -> tuple[Scores, float]:
        """Return the scores of some rows, and the seconds that it took."""
        rows, num_rows, context = message
        call = replace(self.call, rows=rows, num_rows=num_rows, context=context)
        memory_bytes = find_mark(call.function, "row_memory_bytes")
        if memory_bytes is not None:
            _limit_memory(memory_bytes)
        started = time.perf_counter()
        # Ctrl-C does not reach a worker, so every exception comes from the function.
        scores = score_call(call, (BaseException,))
        if not isinstance(scores.error, MalformedResult | UnusableReward | None):
            scores.error = to_picklable(scores.error)
        return scores, time.perf_counter() - started


def _limit_memory(num_bytes: int) -> None:
    """Let this process take so much more memory than it has."""
    import resource  # not on Windows, where there are no workers

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


class FunctionWorkers(NamedTuple):
    """A function with its settings, and its workers, or the reason why they do not start."""

    function: Function
    settings: dict[str, Any]
    pool: WorkerPool | WorkerError | None  # None: it cannot be sent to another process


class Runner:
    """Runs reward functions, counts failures, and stops the run if too many rows fail."""

    # Functions run in worker processes, several at a time. One that hangs (even in C code) is
    # killed after its time limit; one that crashes loses only the affected rows. Functions of
    # litgrpo that cannot hang run in the training process, which is faster, as do objects with
    # `state_dict`, coroutine functions (each in an event loop of its own), and functions that
    # cannot be pickled (with a warning).

    def __init__(self, scoring: Scoring = Scoring()) -> None:  # noqa: B008 (frozen)
        self.timeout_s, self.num_workers = scoring.timeout_s, scoring.num_workers
        self.max_failed_frac = scoring.max_failed_frac
        self.failures: dict[str, FailureCounter] = {}
        self.proven: set[str] = set()  # functions that have scored a row
        self.warned: set[str] = set()
        self._forget_processes()

    def _forget_processes(self) -> None:
        self.owner = os.getpid()
        self.started: StartedCalls | None = None
        self.workers: dict[str, FunctionWorkers] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Copy the settings and the counts; a copy starts its own workers."""
        return self.__dict__ | {"started": None, "workers": {}}

    @property
    def size(self) -> int:
        """Number of workers that run at the same time."""
        if sys.platform == "win32":  # which has no workers
            return 0
        default = min(MAX_WORKERS, os.cpu_count() or 1)
        return default if self.num_workers is None else self.num_workers

    def start(self, calls: Sequence[Call]) -> StartedCalls:
        """Start the calls of one iteration; worker processes run while the caller continues.

        Calls that were started before and not waited for are cancelled.
        """
        self.cancel()
        self.started = StartedCalls(self, calls)
        return self.started

    def cancel(self) -> None:
        """Cancel started calls that were not waited for."""
        if self.owner != os.getpid():  # a forked copy: the workers belong to the original process
            self._forget_processes()
        if self.started is not None:
            self.started.cancel()
        self.started = None
        self.kill_busy()

    def kill_busy(self) -> None:
        """Kill workers whose answers are no longer needed."""
        for pool in self._worker_pools():
            pool.take_all_back()

    def close(self) -> None:
        """Cancel started calls and kill all workers; they start again when needed."""
        self.cancel()
        for pool in self._worker_pools():
            pool.close()
        self.workers = {}

    def _worker_pools(self) -> list[WorkerPool]:
        pools = [workers.pool for workers in self.workers.values()]
        return [pool for pool in pools if isinstance(pool, WorkerPool)]

    def find_pools(self, calls: Sequence[Call]) -> dict[str, WorkerPool | WorkerError]:
        """Return {name: workers of a function, or why it broke the process that loaded it}.

        Functions that run in this process are left out.
        """
        sent = [
            call
            for call in calls
            if self.size and not (call.is_coroutine or stays_in_process(call))
        ]
        began = time.monotonic()
        new = [call for call in sent if not self._has_loaded(call)]
        for call in new:  # the servers load at the same time
            self.workers[call.name] = self._start_workers(call)
        for call in new:
            pool = self.workers[call.name].pool
            try:
                if isinstance(pool, WorkerPool):
                    pool.load()
            except WorkerError as error:
                self.workers[call.name] = self.workers[call.name]._replace(pool=error)
        if time.monotonic() - began > SLOW_IMPORT_S:
            # Imports torch, which looking up a function does not need.
            from litgrpo.distributed.messages import rank_zero_info

            rank_zero_info(
                f"Worker processes imported the modules of the rewards "
                f"{', '.join(call.name for call in new)} in {time.monotonic() - began:.0f} s, once"
                " per run; modules that import torch or lightning take longest."
            )
        pools = {call.name: self.workers[call.name].pool for call in sent}
        return {name: pool for name, pool in pools.items() if pool is not None}

    def _has_loaded(self, call: Call) -> bool:
        """Return True if the workers of a call's function run; end those of another one."""
        workers = self.workers.get(call.name)
        if workers is None:
            return False
        is_same = workers.function is call.function and workers.settings is call.settings
        if not is_same and isinstance(workers.pool, WorkerPool):
            workers.pool.close()
        return is_same

    def _start_workers(self, call: Call) -> FunctionWorkers:
        pool: WorkerPool | None = None
        try:
            pool = WorkerPool(FunctionInWorker(call), self.size)
        except Exception as error:  # pickling runs the function's own code
            self.warn_once(
                call.name,
                "reward '%s' cannot be sent to another process (%s). It runs in this one, where a "
                "hang or a crash of it cannot be survived; a function that can be imported, with "
                "plain kwargs, can be sent.",
                *(call.name, f"{type(error).__name__}: {error}"),
            )
        return FunctionWorkers(call.function, call.settings, pool)

    def warn_once(self, name: str, message: str, *values: object) -> None:
        """Warn, but only the first time for this reward and message."""
        if name + message not in self.warned:
            self.warned.add(name + message)
            log.warning(message, *values)

    def warn_if_slow(self, call: Call, seconds: float, rows: Sequence[int]) -> None:
        """Warn of the first call of a function that took long, for `rows` of its rows."""
        if seconds > SLOW_S:
            texts = call.rows.get("completions") or [""] * call.num_rows  # not all read them
            self.warn_once(
                *(call.name, "reward '%s' took %.1f s for %d rows, the first of them %.200r"),
                *(call.name, seconds, len(rows), texts[rows[0]]),
            )

    def count_failures(self, calls: Sequence[Call], results: Sequence[Scores]) -> None:
        """Count the failures of an iteration; log the first, and each time their number doubled."""
        for call, scores in zip(calls, results, strict=True):
            worked = len(scores.failures) < call.num_rows
            if isinstance(scores.error, UnusableReward):
                raise ValueError(f"reward '{call.name}': {scores.error}")
            if worked:
                self.proven.add(call.name)
            elif isinstance(scores.error, MalformedResult) and call.name not in self.proven:
                raise ValueError(f"reward '{call.name}' {scores.error}")
            if scores.failures:
                self._count(call, scores)
            elif scores.error is not None:
                self.warn_once(
                    call.name,
                    "reward '%s' failed for %d rows together and was called row by row: %s",
                    *(call.name, call.num_rows, scores.error),
                )

    def _count(self, call: Call, scores: Scores) -> None:
        counts = self.failures.setdefault(call.name, FailureCounter())
        is_first, first = not counts, min(scores.failures)
        has_doubled = counts.add(scores.failures.values())
        number = len(scores.failures)
        summary = f"reward '{call.name}': {number} of {call.num_rows} completions failed"
        if number > self.max_failed_frac * call.num_rows:
            raise RewardFailure(_failure_message(call, scores, summary)) from scores.error
        if is_first:
            values = (f"{name} {column[first]!r:.200}" for name, column in call.rows.items())
            log.warning(
                "%s and are left out (%s); the first is %s, which got %s",
                *(summary, counts, _name_row(call, first), ", ".join(values)),
                exc_info=scores.error,
            )
        elif has_doubled:
            log.warning("%s; so far %d (%s)", summary, counts.total(), counts)


def _failure_message(call: Call, scores: Scores, summary: str) -> str:
    """One line: the reasons, the first row, the first cause, and what to do."""
    reasons, first = FailureCounter(scores.failures.values()), min(scores.failures)
    cause = "" if scores.error is None else f"; the first cause: {cause_of(scores.error)}"
    completions = call.rows.get("completions") or call.rows.get("prompts")
    hint = ""
    if completions and reasons.keys() <= {"AttributeError", "TypeError"}:
        is_text = isinstance(completions[0], str)
        got, other = ("texts", "messages") if is_text else ("messages", "texts")
        name = "chat" if is_text else "text"
        hint = f" It got {got}; if it expects {other}, set model.scoring.format to {name}."
    return (
        f"{summary} ({reasons}), first {_name_row(call, first)}{cause}.{hint} Fix the function, or"
        " raise model.scoring.max_failed_frac; --debug shows its traceback."
    )


def _name_row(call: Call, row: int) -> str:
    """Name a row, with its prompt and completion if they are known."""
    return f"row {row} ({call.places[row]})" if call.places else f"row {row}"


def stays_in_process(call: Call) -> bool:
    """Return True if a call runs only code of this package, or an object that is not copied.

    Such an object holds model weights (`in_process`), or a state that checkpoints hold.
    """
    function, settings = call.function, list(call.settings.values())
    if is_marked(function, "in_process") or find_state_owner(function) is not None:
        return True
    while isinstance(function, partial):
        settings += function.keywords.values()
        function = function.func
    may_hang = is_marked(function, "isolated") or call.row_timeout_s is not None
    ours = str(function.__module__).startswith(OWN_PACKAGE) and not may_hang
    return ours and not any(_is_foreign(value) for value in settings)


def _is_foreign(value: Any) -> bool:
    """Return True if a setting is, or contains, code from outside this package."""
    if isinstance(value, dict):
        return _is_foreign(list(value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_foreign, value))
    return callable(value) and not str(value.__module__).startswith(OWN_PACKAGE)


class Task(NamedTuple):
    """Rows of a call that a worker scores."""

    number: int  # of the call
    rows: Sequence[int]  # numbers of the rows
    limit_s: float
    is_first: bool  # a failure of several rows is followed by a task for each of them


class StartedCalls:
    """The calls of one iteration, whose worker processes are running; `wait` for the scores."""

    def __init__(self, runner: Runner, calls: Sequence[Call]) -> None:
        self.runner, self.calls = runner, list(calls)
        self.cancelled = False
        self._scores: list[Scores] | None = None
        self._results = [Scores([nan] * call.num_rows) for call in self.calls]
        self._coroutines: dict[int, Future[Scores]] = {}  # that run in this process
        self._pools: dict[int, WorkerPool] = {}
        self._queues: dict[int, deque[Task]] = {}
        self._running: dict[Worker, Task] = {}
        self._here: list[int] = []
        pools = runner.find_pools(calls)
        for n, call in enumerate(self.calls):
            pool = pools.get(call.name)
            if isinstance(pool, WorkerPool):
                self._pools[n] = pool
                self._queues[n] = deque(plan_tasks(n, call, runner.timeout_s, runner.size))
            elif pool is not None:
                self._results[n] = make_failed_scores(call.num_rows, pool, pool.cause)
            elif call.is_coroutine:
                # Each has its own loop: one that blocks its thread must not stop the others.
                self._coroutines[n] = asyncio.run_coroutine_threadsafe(
                    score_coroutine(call, self._limit_s(call)), event_loop(loop_of(call))
                )
            else:
                self._here.append(n)
        self._dispatch()

    def wait(self) -> list[Scores]:
        """Call the functions that run in this process, then wait for the worker processes.

        Returns:
            The scores of each call. Failures have been counted and logged.

        Raises:
            ValueError: a function that never worked before returned no list of N rewards, neither
                for all rows together nor for any row alone: a mistake in its code; or it raised
                `UnusableReward`.
            RewardFailure: more than `max_failed_frac` of a function's rows failed.
            RuntimeError: the runner was closed, or has started other calls.
        """
        if self.cancelled:
            raise RuntimeError(
                "these reward calls were cancelled: the runner was closed or started other calls"
                " before wait()"
            )
        if self._scores is None:
            try:
                self._collect()
            finally:
                self.runner.kill_busy()  # none, unless something was raised above
            self.runner.started = None
            self.runner.count_failures(self.calls, self._results)
            self._scores = self._results
        return self._scores

    def cancel(self) -> None:
        """Cancel the calls, whose scores are not needed."""
        self.cancelled = True
        for coroutine in self._coroutines.values():
            coroutine.cancel()

    def _collect(self) -> None:
        """Enter the scores of each call; raises nothing that a reward function raised."""
        # In the caller's thread, where reward models do not compete with the training step.
        for n in self._here:
            self._results[n] = _score_here(self.runner, self.calls[n])
        for n in self._coroutines:
            self._results[n] = self._await(n)
        while self._running or any(self._queues.values()):
            self._dispatch()
            for worker, answer, _ in receive(list(self._running), wait=True):
                self._record(worker, self._running.pop(worker), answer)

    def _limit_s(self, call: Call) -> float | None:
        """Return the seconds that a coroutine has for all rows; None: it has its own limits."""
        # The mark is that of our judges, which limit each of their requests.
        limits_itself = is_marked(call.function, "in_process")
        return None if limits_itself else self.runner.timeout_s / 2

    def _await(self, number: int) -> Scores:
        """Return the scores of a coroutine; one that blocks its thread loses it."""
        call = self.calls[number]
        limit_s = self._limit_s(call)
        try:
            return self._coroutines[number].result(limit_s and 2 * limit_s + GRACE_S)
        except TimeoutError as error:
            drop_event_loop(loop_of(call))
            return make_failed_scores(call.num_rows, error)

    def _dispatch(self) -> None:
        """Send tasks while workers are free, without waiting for answers."""
        for number, tasks in self._queues.items():
            while tasks and len(self._running) < self.runner.size:
                worker = self._pools[number].take()
                if worker is None:
                    break
                self._send(worker, tasks.popleft())

    def _send(self, worker: Worker, task: Task) -> None:
        self._running[worker] = task
        call = self.calls[task.number].only(task.rows)
        worker.send((call.rows, call.num_rows, call.context), task.limit_s)

    def _record(self, worker: Worker, task: Task, answer: Any) -> None:
        """Enter the scores of a task, or add a task for each row if several failed together."""
        self._pools[task.number].give_back(worker)
        call, result = self.calls[task.number], self._results[task.number]
        if not isinstance(answer, WorkerError):
            scores, seconds = answer
        elif call.row_timeout_s is not None and worker.has_loaded and worker.is_lost:
            scores, seconds = Scores([0.0]), task.limit_s  # the row's own time limit is over
        else:
            scores = make_failed_scores(len(task.rows), answer, answer.cause)
            seconds = task.limit_s
        self.runner.warn_if_slow(call, seconds, task.rows)
        if (
            task.is_first
            and scores.error is not None
            and not isinstance(scores.error, UnusableReward)
        ):
            result.error = result.error or scores.error
            # The other half of the time, see `plan_tasks`.
            limit_s = self.runner.timeout_s / 2 * min(1, self.runner.size / call.num_rows)
            alone = [Task(task.number, [row], limit_s, False) for row in task.rows]
            self._queues[task.number].extend(alone)
        else:
            result.put(task.rows, scores)


def loop_of(call: Call) -> str:
    """Return the name of the event loop in which a coroutine function runs."""
    return f"reward {call.name}"


def plan_tasks(number: int, call: Call, timeout_s: float, num_workers: int) -> list[Task]:
    """Return the first tasks of a call: all rows at once, unless each row has its own limit."""
    rows = range(call.num_rows)
    if is_marked(call.function, "whole_batch"):
        return [Task(number, rows, timeout_s, False)]
    if call.row_timeout_s is not None:
        limit_s = min(call.row_timeout_s, timeout_s * min(1, num_workers / len(rows)))
        return [Task(number, [row], limit_s, False) for row in rows]
    size = ceil(len(rows) / num_workers) if is_marked(call.function, "pure") else len(rows)
    pieces = [rows[start : start + size] for start in range(0, len(rows), size)]
    # The other half of the time is for single rows, if a piece fails.
    return [Task(number, piece, timeout_s / 2, True) for piece in pieces]


def _score_here(runner: Runner, call: Call) -> Scores:
    """Call a function in this process for all rows; if that fails, for each until the deadline."""
    deadline = time.monotonic() + runner.timeout_s
    batch_scores = _time_call(runner, call, range(call.num_rows))
    final = batch_scores.error is None or isinstance(batch_scores.error, UnusableReward)
    if final or is_marked(call.function, "whole_batch"):
        return batch_scores
    scores = Scores([nan] * call.num_rows, error=batch_scores.error)
    for row in range(call.num_rows):
        late = time.monotonic() > deadline
        one = make_failed_scores(1, TimeoutError()) if late else _time_call(runner, call, [row])
        scores.put([row], one)
    return scores


def _time_call(runner: Runner, call: Call, rows: Sequence[int]) -> Scores:
    """Call a function for some rows, and warn if it is slow."""
    started = time.monotonic()
    scores = score_call(call.only(rows))
    runner.warn_if_slow(call, time.monotonic() - started, rows)
    return scores
