"""The calls of one iteration in worker processes: which rows are asked together, and for how long.

Each function is called for all its rows at once. If that raises, hangs, crashes or floods the
terminal, it is called for the rows one by one: a row that hangs is set aside after a short while,
so that the others get their turn, and is given its share of what time is left at the end.

A function has `timeout_s` of all workers. Only time in which a worker runs it counts: waiting for a
worker, or for somebody to read the answer, takes nothing from it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import ceil, inf, nan
from multiprocessing.connection import wait
from typing import Any

from litgrpo.rewards.runner.calls import FLOOD, TIMEOUT, Call, Scores, failed
from litgrpo.rewards.runner.failures import WorkerError
from litgrpo.rewards.runner.marks import is_marked
from litgrpo.rewards.runner.runner import RewardRunner
from litgrpo.rewards.runner.worker import Message, Question
from litgrpo.rewards.runner.worker_pool import GONE, LOAD_S, Worker, WorkerPool

log = logging.getLogger(__name__)

NO_TURN = "no time was left for it"  # other rows of the function used it up
SHORTEST_S = 0.02  # that a row gets at least, while there is time
SHARE = 1 / 32  # of the time left, for a row at first; n that hang leave (31/32)^n to the others
GRACE_S = 0.5  # for coroutines to be stopped from within

Rows = tuple[int, list[int]]  # number of a call, and some of its rows


class Attempt(IntEnum):
    """How rows are asked for."""

    WHOLE = 0  # all at once
    ROWS = 1  # coroutines, one for each row, all together
    SHORT = 2  # one row, with little time
    LAST = 3  # one row that hung in the short attempt


@dataclass
class Task:
    """What a worker is asked at once: one question, or coroutines that wait together.

    Args:
        attempt: how.
        unanswered: {number of the question: its rows}.
        together: they are coroutines.
        workers: how many it keeps from the function's other rows, itself included.
    """

    attempt: Attempt
    unanswered: dict[int, Rows]
    together: bool
    workers: float
    limit_s: float = inf  # for each question
    began_at: float = inf
    until: float = inf  # when the worker is ended
    seconds: float = 0.0  # that it took

    def __post_init__(self) -> None:
        """Remember whose time it takes."""
        self.calls = {n for n, _ in self.unanswered.values()}

    def begin(self, now: float) -> None:
        """The worker has begun."""
        self.began_at = now
        self.until = now + self.limit_s + GRACE_S * self.together

    def stop(self, now: float) -> None:
        """The worker was ended; what passed after the limit is not the rows' time."""
        self.seconds = min(max(0.0, now - self.began_at), self.limit_s)


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
        pool: WorkerPool,
        calls: Mapping[int, Call],
        known: Mapping[int, Mapping[int, float]],
    ) -> None:
        self.runner, self.pool, self.calls = runner, pool, calls
        self.results = {n: Scores([nan] * call.num_rows) for n, call in calls.items()}
        self.left_s = dict.fromkeys(calls, runner.timeout_s * pool.size)
        self.aside: dict[int, list[int]] = {n: [] for n in calls}
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
            pieces = stripes(rows, pool.size if is_marked(call.function, "pure") else 1)
            for piece in pieces:
                self._ask(Attempt.WHOLE, [(n, piece)], workers=pool.size / len(pieces))
        if coroutines:
            self._ask(Attempt.WHOLE, coroutines, together=True, workers=pool.size)

    def dispatch(self) -> None:
        """Hand out tasks while workers are free, without waiting for answers."""
        while self.queue:
            task = self.queue[0]
            self._refuse(task)
            worker = self.pool.take() if task.unanswered else None
            if worker is None and task.unanswered:
                return
            self.queue.popleft()
            if worker is None:
                self._settle(task)
                continue
            self.running[worker] = task
            task.limit_s, task.until = self._limit_s(task), time.monotonic() + LOAD_S
            questions = [self._question(n, rows) for n, rows in task.unanswered.values()]
            explain = task.attempt <= Attempt.ROWS  # where it hangs; later that is known
            try:
                worker.connection.send(Message(questions, task.together, task.limit_s, explain))
            except OSError as error:  # it died while it was idle: its answer will be its end
                log.debug("worker %d: %s", worker.pid, error)

    def finish(self) -> dict[int, Scores]:
        """Wait until every row has a score or its time is over."""
        while self.queue or self.running:
            self.dispatch()
            self._listen()
            self._end_overdue()
        return self.results

    def _ask(
        self, attempt: Attempt, rows: Iterable[Rows], *, together: bool = False, workers: float = 1
    ) -> None:
        self.queue.append(Task(attempt, dict(enumerate(rows)), together, workers))

    def _limit_s(self, task: Task) -> float:
        """Seconds that each question of a task may take; half is kept for the rows one by one."""
        n = min(task.calls)
        left_s, half = self.left_s[n], self.runner.timeout_s / 2
        waiting = sum(other.attempt is Attempt.LAST and n in other.calls for other in self.queue)
        whole = half * (1 + is_marked(self.calls[n].function, "whole_batch"))
        limits = (whole, half, max(SHORTEST_S, SHARE * left_s), min(half, left_s / (1 + waiting)))
        return max(0.0, min(left_s, limits[task.attempt]))

    def _question(self, n: int, rows: list[int]) -> Question:
        call = self.calls[n]
        return Question(call.name, call.select(rows) | call.context, len(rows), call.notes)

    def _refuse(self, task: Task) -> None:
        """Enter why rows fail whose function cannot be loaded or has no time left."""
        late = TIMEOUT if task.attempt is Attempt.LAST else NO_TURN
        for number, (n, rows) in list(task.unanswered.items()):
            broken = self.pool.failed.get(self.calls[n].name)
            if broken is not None or self.left_s[n] <= 0:
                reason = broken.cause if broken else late
                self.results[n].put(rows, failed(len(rows), reason, broken))
                del task.unanswered[number]

    def _listen(self) -> None:
        """Sleep until a worker answers or prints, or until one is overdue; read what came."""
        sources: dict[Any, Worker] = {}
        for worker in self.running:
            sources |= {worker.output: worker, worker.connection: worker}
        until = min((task.until for task in self.running.values()), default=0.0)
        ready = wait(sources, max(0.0, until - time.monotonic()))
        for worker in {sources[source] for source in ready}:
            worker.output.drain()
            # All answers that came before what was printed: else a flood is blamed on their rows.
            while worker in self.running and worker.connection.poll():
                self._read(worker, self.running[worker])

    def _read(self, worker: Worker, task: Task) -> None:
        """Read one message of a worker: when it began, or the answer to a question."""
        try:
            message = worker.connection.recv()
        except GONE:
            self._lost(worker, None)
            return
        if isinstance(message, float):
            task.begin(message)
            return
        number, scores, seconds = message
        n, rows = task.unanswered.pop(number)
        task.seconds = max(task.seconds, seconds)
        self.runner.note_time(self.calls[n], seconds, rows)
        if scores.error is None or task.attempt is not Attempt.WHOLE:
            self.results[n].put(rows, scores)
        else:
            self._retry(n, rows, scores, together=task.together)
        if not task.unanswered:
            worker.output.drain()
            sys.stdout.write(worker.output.take())
            self.pool.release(worker)
            self._done(worker)

    def _retry(self, n: int, rows: list[int], failure: Scores, *, together: bool = False) -> None:
        """Ask for each row what failed for several; where rows are compared, all have failed."""
        if is_marked(self.calls[n].function, "whole_batch"):
            self.results[n].put(rows, failure)
            return
        self.results[n].error = self.results[n].error or failure.error
        if together:
            row_by_row = [(n, [row]) for row in rows]
            self._ask(Attempt.ROWS, row_by_row, together=True, workers=self.pool.size)
            return
        for row in rows:
            self._ask(Attempt.SHORT, [(n, [row])])

    def _end_overdue(self) -> None:
        """End workers that take too long or print too much."""
        for worker, task in list(self.running.items()):
            overdue = time.monotonic() >= task.until
            if worker.output.drain():
                self._lost(worker, FLOOD)
            elif overdue and not worker.connection.poll():  # no answer has come meanwhile
                self._lost(worker, TIMEOUT)

    def _lost(self, worker: Worker, reason: str | None) -> None:
        """A worker is gone (no reason), or must go; find out which row did it."""
        task = self.running[worker]
        task.stop(time.monotonic())
        died_of = self.pool.end(worker)
        cause = reason or died_of
        told = f"the worker was ended: {reason}" if reason else f"the worker {died_of}"
        error = WorkerError(cause, f"{told}. {worker.output.take()}".strip())
        for n in task.calls:
            rows = [row for m, rows in task.unanswered.values() for row in rows if m == n]
            self.runner.note_time(self.calls[n], task.seconds, rows)
            if task.attempt <= Attempt.ROWS:
                self._retry(n, rows, failed(len(rows), cause, error))
            elif task.attempt is Attempt.SHORT and cause == TIMEOUT:
                self.aside[n] += rows
            else:
                self.results[n].put(rows, failed(len(rows), cause, error))
        self._done(worker)

    def _done(self, worker: Worker) -> None:
        """A worker is at the end of its task, for one reason or another."""
        task = self.running.pop(worker)
        for n in task.calls:
            self.left_s[n] -= task.seconds * task.workers
        self._settle(task)

    def _settle(self, task: Task) -> None:
        """Once all rows of a function had their turn, ask again for those that took long."""
        for n in task.calls:
            if not any(n in other.calls for other in (*self.queue, *self.running.values())):
                for row in self.aside[n]:
                    self._ask(Attempt.LAST, [(n, [row])])
                self.aside[n] = []


def stripes(rows: Sequence[int], count: int) -> list[list[int]]:
    """The rows in at most `count` equal pieces.

    Example:
        >>> stripes([3, 4, 5], 2)
        [[3, 4], [5]]
    """
    size = max(1, ceil(len(rows) / count))
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]
