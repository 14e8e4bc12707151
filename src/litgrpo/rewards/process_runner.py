"""The default reward runner: functions in worker processes."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from math import ceil, nan
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
from litgrpo.rewards.runner import RewardRunner, StartedCalls
from litgrpo.rewards.worker_pool import FunctionPool
from litgrpo.workers.failures import WorkerError
from litgrpo.workers.process import Worker

OWN_PACKAGE = "litgrpo.rewards."
MAX_WORKERS = 4
SLOW_IMPORT_S = 3.0
HANDLER = "litgrpo.rewards.calls:handle_message"


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
    ) -> None:
        super().__init__(timeout_s, max_failed_frac, slow_warning_s)
        at_least("model.reward_runner.num_workers", num_workers, 1)
        self.pool = FunctionPool(num_workers or min(MAX_WORKERS, os.cpu_count() or 1), HANDLER)

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
        batch = Batch(self, self.pool, sent)
        batch.dispatch()
        return CallsInWorkers(self, calls, batch)

    def close(self) -> None:
        """End all processes; they start again when needed."""
        super().close()
        self.pool.close()


class CallsInWorkers(StartedCalls):
    """Calls of which some are run by workers and the rest in `wait`.

    Args:
        runner: runner that started them.
        calls: one call per reward function.
        batch: the calls that workers run.
    """

    def __init__(self, runner: ProcessRunner, calls: Sequence[Call], batch: Batch) -> None:
        self.process_runner, self.batch = runner, batch
        super().__init__(runner, calls)

    def is_here(self, number: int) -> bool:
        """See `StartedCalls.is_here`."""
        return number not in self.batch.calls

    def collect(self) -> list[Scores]:
        """Run what stays in this process while the workers are busy, then wait for them."""
        try:
            results = self.score_here() | self.batch.finish()
        finally:
            self.process_runner.pool.kill_busy()  # none, unless something was raised above
        return [results[n] for n in range(len(self.calls))]


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
    """

    def __init__(
        self,
        runner: RewardRunner,
        pool: FunctionPool,
        calls: Mapping[int, Call],
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
            rows = list(range(call.num_rows))
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
            worker.send(message, task.limit_s + GRACE_S * task.together)

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
        return Question(call.name, call.select(rows) | call.context, len(rows), call.notes)

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
