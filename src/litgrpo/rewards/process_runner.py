"""The default reward runner: functions in worker processes."""

from __future__ import annotations

import dis
import hashlib
import inspect
import os
import pickle
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from math import ceil, nan
from types import CellType
from typing import Any

from litgrpo.argument_types import check_argument_types
from litgrpo.arguments import at_least
from litgrpo.rewards.calls import (
    Call,
    Message,
    Question,
    Scores,
    UnusableReward,
    find_state_owner,
    is_marked,
    make_failed_scores,
)
from litgrpo.rewards.runner import RewardRunner, StartedCalls, run_in_process
from litgrpo.rewards.worker_pool import FunctionPool
from litgrpo.workers.failures import WorkerError
from litgrpo.workers.process import Worker

OWN_PACKAGE = "litgrpo.rewards."
MAX_WORKERS = 4
SLOW_IMPORT_S = 3.0
HANDLER = "litgrpo.rewards.calls:handle_message"
STORES = ("STORE_DEREF", "STORE_GLOBAL")
CONTAINERS = (list, dict, set, bytearray, deque)
# Methods that change a container.
MUTATORS = {"append", "extend", "insert", "pop", "popleft", "appendleft", "remove", "clear"}
MUTATORS |= {"add", "discard", "update", "setdefault"}


class ProcessRunner(RewardRunner):
    """Runs the functions in worker processes, several at a time; the default.

    A function that hangs (even in C code) is killed after its time limit. One that crashes loses
    only the affected rows. litgrpo's own functions run in the training process, which is faster.
    So does a function that cannot be pickled (with a warning).

    Args:
        timeout_s: seconds that one function may take per iteration: half of them for all rows
            together; where that fails, the other half for the rows one by one.
        max_failed_frac: share of one function's rows in one iteration that may fail; more stops the
            run.
        slow_warning_s: log a warning for the first call of a function that takes longer.
        num_workers: number of worker processes; default: one per core, at most 4.
        cache_size: number of rewards of `pure` functions that are cached.

    Example:
        >>> ProcessRunner(timeout_s=20.0, num_workers=2).pool.size
        2
    """

    @check_argument_types()
    def __init__(
        self,
        timeout_s: float = 60.0,
        max_failed_frac: float = 0.5,
        slow_warning_s: float = 1.0,
        num_workers: int | None = None,
        cache_size: int = 100_000,
    ) -> None:
        super().__init__(timeout_s, max_failed_frac, slow_warning_s)
        at_least("model.reward_runner.num_workers", num_workers, 1)
        at_least("model.reward_runner.cache_size", cache_size, 0)
        self.pool = FunctionPool(num_workers or min(MAX_WORKERS, os.cpu_count() or 1), HANDLER)
        self.cache: OrderedDict[bytes, float] = OrderedDict()
        self.cache_size = cache_size

    def dispatch(self, calls: Sequence[Call]) -> StartedCalls:
        """Give the calls to workers; functions that stay in this process run in `wait`."""
        self.pool.kill_busy()
        foreign = {n: call for n, call in enumerate(calls) if not stays_in_process(call)}
        parts = {call.name: (call.function, call.settings) for call in foreign.values()}
        began = time.monotonic()
        troubles = self.pool.register(parts)
        if time.monotonic() - began > SLOW_IMPORT_S:
            # Imports torch, which looking up a function does not need.
            from litgrpo.distributed.messages import rank_zero_info

            rank_zero_info(
                f"Worker processes imported the modules of the rewards {', '.join(parts)} in "
                f"{time.monotonic() - began:.0f} s, once per run; modules that import torch or "
                "lightning take longest."
            )
        for name, why in troubles.items():
            self.warn_once(
                name,
                "reward '%s' cannot be sent to another process (%s). It runs in this one, where a "
                "hang or a crash of it cannot be survived; a function that can be imported, with "
                "plain kwargs, can be sent.",
                *(name, why),
            )
        sent = {n: call for n, call in foreign.items() if call.name not in troubles}
        for call in sent.values():
            for kept in find_state(call.function)[:1]:
                self.warn_once(
                    call.name,
                    "reward '%s' keeps state in %r. It runs in worker processes, so what it"
                    " changes there stays there, and is lost with a worker; reward_runner:"
                    " InProcessRunner runs it in this process.",
                    *(call.name, kept),
                )
        keys = {n: self._keys(call) for n, call in sent.items() if is_marked(call.function, "pure")}
        known = {n: self._find_cached(row_keys) for n, row_keys in keys.items()}
        batch = Batch(self, self.pool, sent, known)
        batch.dispatch()
        return CallsInWorkers(self, calls, batch, keys)

    def close(self) -> None:
        """End all processes; they start again when needed."""
        super().close()
        self.pool.close()

    def _keys(self, call: Call) -> list[bytes]:
        """Hash each row: the function's name and all its arguments."""
        names = sorted(call.rows)
        columns = [call.rows[name] for name in names]
        constant = (call.name, names, call.settings, call.context)
        try:
            seed = pickle.dumps(constant)
            rows = [pickle.dumps(row) for row in zip(*columns, strict=True)]
        except Exception as error:  # pickling a foreign object may raise anything
            self.warn_once(*(call.name, "rewards of '%s' are not remembered: %s", call.name, error))
            return []
        return [hashlib.blake2b(seed + row, digest_size=16).digest() for row in rows]

    def _find_cached(self, keys: Sequence[bytes]) -> dict[int, float]:
        """Return {row: reward} of the rows that are in the cache."""
        return {row: self.cache[key] for row, key in enumerate(keys) if key in self.cache}

    def remember(self, keys: Sequence[bytes], scores: Scores) -> None:
        """Keep the rewards of rows that did not fail."""
        for row, key in enumerate(keys):
            if row not in scores.failures:
                self.cache[key] = scores.values[row]
                self.cache.move_to_end(key)
        while len(self.cache) > self.cache_size:
            self.cache.popitem(last=False)


class CallsInWorkers(StartedCalls):
    """Calls of which some are run by workers and the rest in `wait`.

    Args:
        runner: runner that started them.
        calls: one call per reward function.
        batch: the calls that workers run.
        keys: {number of a call: cache key of each row}, of `pure` functions.
    """

    def __init__(
        self,
        runner: ProcessRunner,
        calls: Sequence[Call],
        batch: Batch,
        keys: Mapping[int, Sequence[bytes]],
    ) -> None:
        super().__init__(runner, calls)
        self.process_runner, self.batch, self.keys = runner, batch, keys

    def collect(self) -> list[Scores]:
        """Run what stays in this process while the workers are busy, then wait for them."""
        here = [n for n in range(len(self.calls)) if n not in self.batch.calls]
        try:
            scores = run_in_process(self.runner, [self.calls[n] for n in here])
            results = dict(zip(here, scores, strict=True)) | self.batch.finish()
        finally:
            self.process_runner.pool.kill_busy()  # none, unless something was raised above
        for n, row_keys in self.keys.items():
            self.process_runner.remember(row_keys, results[n])
        return [results[n] for n in range(len(self.calls))]


def find_state(function: Any) -> list[str]:
    """Names outside of a function that it may change: variables that it sets, and containers.

    Containers count in a closure and in a script or notebook; a module's own are often tables.

    Example:
        >>> def counting():
        ...     calls = []
        ...     return lambda completions: calls.append(1)
        >>> find_state(counting())
        ['calls']
    """
    while isinstance(function, partial):
        function = function.func
    if not inspect.isfunction(function):
        return [] if find_state_owner(function) is not None else _find_changed_attributes(function)
    code, closure = function.__code__, function.__closure__ or ()
    stored = {i.argval for i in dis.get_instructions(code) if i.opname in STORES}
    found = [name for name in (*code.co_freevars, *code.co_names) if name in stored]
    seen = {
        name: cell.cell_contents
        for name, cell in zip(code.co_freevars, closure, strict=True)
        if cell != CellType()
    }
    if function.__module__ == "__main__":
        seen |= {n: v for n, v in function.__globals__.items() if n in code.co_names}
    return found + [name for name, value in seen.items() if isinstance(value, CONTAINERS)]


def _find_changed_attributes(owner: Any) -> list[str]:
    """Names of attributes that a callable object sets, or changes as containers, when called."""
    code = getattr(getattr(owner, "__func__", type(owner).__call__), "__code__", None)
    if code is None:
        return []
    instructions = list(dis.get_instructions(code))
    changed = [each.argval for each in instructions if each.opname == "STORE_ATTR"]
    mutates = any(each.opname == "STORE_SUBSCR" for each in instructions)
    if mutates or MUTATORS.intersection(code.co_names):
        attributes = getattr(getattr(owner, "__self__", owner), "__dict__", {}).items()
        changed += [n for n, v in attributes if n in code.co_names and isinstance(v, CONTAINERS)]
    return changed


def stays_in_process(call: Call) -> bool:
    """Return True if a call runs only code of this package, or a model that is too large to copy.

    Objects that hold model weights (`in_process`) stay in the training process.
    """
    function, settings = call.function, list(call.settings.values())
    if is_marked(function, "in_process"):
        return True
    while isinstance(function, partial):
        settings += function.keywords.values()
        function = function.func
    ours = str(function.__module__).startswith(OWN_PACKAGE) and not is_marked(function, "isolated")
    return ours and not any(_is_foreign(value) for value in settings)


def _is_foreign(value: Any) -> bool:
    """Return True if a setting is, or contains, code from outside this package."""
    if isinstance(value, dict):
        return _is_foreign(list(value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_foreign, value))
    return callable(value) and not str(value.__module__).startswith(OWN_PACKAGE)


GRACE_S = 0.5  # for coroutines to be stopped from within

Rows = tuple[int, list[int]]  # number of a call, and some of its rows


class Attempt(IntEnum):
    """Stages of scoring rows; a failed stage is followed by a finer one."""

    WHOLE = 0  # all at once
    TOGETHER = 1  # coroutines, one for each row, all together
    ROW = 2  # one row


@dataclass
class Task:
    """The work of one message: one question, or coroutines that are awaited concurrently.

    Args:
        attempt: how.
        unanswered: {number of the question: its rows}.
        together: they are coroutines.
        limit_s: seconds for each question.
        began: when it was asked.
    """

    attempt: Attempt
    unanswered: dict[int, Rows]
    together: bool
    limit_s: float = 0.0
    began: float = 0.0


class Batch:
    """The calls of one iteration that workers run.

    Args:
        runner: holds the time-out and the list of slow calls.
        pool: the workers.
        calls: {number: call}.
        known: {number: {row: reward}} that were remembered.
    """

    def __init__(
        self,
        runner: RewardRunner,
        pool: FunctionPool,
        calls: Mapping[int, Call],
        known: Mapping[int, Mapping[int, float]],
    ) -> None:
        self.runner, self.pool, self.calls = runner, pool, calls
        self.results = {n: Scores([nan] * call.num_rows) for n, call in calls.items()}
        # Seconds of workers that are left for single rows, and rows that have had none of it.
        half = runner.timeout_s * pool.size / 2
        self.remaining_s = {n: half / (1 + call.is_coroutine) for n, call in calls.items()}
        self.num_single: Counter[int] = Counter()
        self.queue: deque[Task] = deque()
        self.running: dict[Worker, Task] = {}
        coroutines: list[Rows] = []
        for n, call in calls.items():
            remembered = known.get(n, {})
            self.results[n].put(list(remembered), Scores(list(remembered.values())))
            rows = [row for row in range(call.num_rows) if row not in remembered]
            if call.is_coroutine:
                coroutines.append((n, rows))
                continue
            for piece in split_rows(rows, pool.size if is_marked(call.function, "pure") else 1):
                self._enqueue(Attempt.WHOLE, [(n, piece)])
        if coroutines:
            self._enqueue(Attempt.WHOLE, coroutines, together=True)

    def dispatch(self) -> None:
        """Hand out tasks while workers are free, without waiting for answers."""
        while self.queue:
            task = self.queue[0]
            self._fail_broken(task)
            worker = self.pool.take() if task.unanswered else None
            if worker is None and task.unanswered and self.running:
                return
            if not task.unanswered:
                self.queue.popleft()
            if worker is None:  # else a function has broken the process that was to be forked
                continue
            self.running[worker] = self.queue.popleft()
            task.limit_s, task.began = self._limit_s(task), time.monotonic()
            questions = [self._question(n, rows) for n, rows in task.unanswered.values()]
            message = Message(questions, task.together, task.limit_s)
            self.pool.send(worker, message, task.limit_s + GRACE_S * task.together)

    def finish(self) -> dict[int, Scores]:
        """Wait until every row has a score or its time is over."""
        while self.queue or self.running:
            self.dispatch()
            for worker, answer, last in self.pool.receive(wait=True):
                task = self.running.pop(worker) if last else self.running[worker]
                if isinstance(answer, WorkerError):
                    seconds = min(time.monotonic() - task.began, task.limit_s)
                    for number in list(task.unanswered):
                        rows = task.unanswered[number][1]
                        scores = make_failed_scores(len(rows), answer, answer.cause)
                        self._record(task, number, scores, seconds, lost=True)
                elif answer is not None:
                    self._record(task, *answer)
        return self.results

    def _enqueue(self, attempt: Attempt, rows: Iterable[Rows], *, together: bool = False) -> None:
        self.queue.append(Task(attempt, dict(enumerate(rows)), together))

    def _limit_s(self, task: Task) -> float:
        """Seconds that each question of a task may take."""
        # `timeout_s` has two halves: one for all rows at once, one for single rows after a failure.
        # whole_batch functions have no second stage and may use both. For coroutines the second
        # half is split again: all rows concurrently, then one row at a time.
        n = min(n for n, _ in task.unanswered.values())
        half = self.runner.timeout_s / 2
        if task.attempt is Attempt.WHOLE:
            compares_rows = is_marked(self.calls[n].function, "whole_batch")
            return self.runner.timeout_s if compares_rows else half
        if task.attempt is Attempt.TOGETHER:
            return half / 2
        # An equal share for each row that still waits, so that one that hangs takes nothing from
        # the others; seconds that fast rows leave go to the rest.
        return self.remaining_s[n] / max(self.num_single[n], self.pool.size)

    def _question(self, n: int, rows: list[int]) -> Question:
        call = self.calls[n]
        # Any worker may answer, so the state goes with the question and comes back.
        state = self.runner.states.get(call.name)
        return Question(call.name, call.select(rows) | call.context, len(rows), call.notes, state)

    def _fail_broken(self, task: Task) -> None:
        """Fail the rows of functions that broke the process which loaded them."""
        for number, (n, rows) in list(task.unanswered.items()):
            broken = self.pool.failed.get(self.calls[n].name)
            if broken is not None:
                self.results[n].put(rows, make_failed_scores(len(rows), broken, broken.cause))
                del task.unanswered[number]

    def _record(
        self, task: Task, number: int, scores: Scores, seconds: float, *, lost: bool = False
    ) -> None:
        """Enter the scores of a question, or ask for each row what failed for several."""
        n, rows = task.unanswered.pop(number)
        call, result = self.calls[n], self.results[n]
        if scores.state is not None:
            self.runner.states[call.name] = scores.state
        self.runner.warn_if_slow(call, seconds, rows)
        if task.attempt is Attempt.ROW:
            self.remaining_s[n] -= seconds
            self.num_single[n] -= 1
        # Coroutines that wait together fail each for itself, unless their worker was lost.
        alone = task.attempt is Attempt.ROW or (task.attempt is Attempt.TOGETHER and not lost)
        if (
            alone
            or scores.error is None
            or isinstance(scores.error, UnusableReward)
            or is_marked(call.function, "whole_batch")
        ):
            result.put(rows, scores)
            return
        result.error = result.error or scores.error
        if task.together and task.attempt is Attempt.WHOLE:
            self._enqueue(Attempt.TOGETHER, [(n, [row]) for row in rows], together=True)
            return
        self.num_single[n] += len(rows)
        for row in rows:
            self._enqueue(Attempt.ROW, [(n, [row])])


def split_rows(rows: Sequence[int], count: int) -> list[list[int]]:
    """The rows in at most `count` equal pieces.

    Example:
        >>> split_rows([3, 4, 5], 2)
        [[3, 4], [5]]
    """
    size = max(1, ceil(len(rows) / count))
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]
