"""The calls of one iteration in worker processes: which rows are asked together, and for how long.

Each function is called for all its rows at once. If that raises, hangs, crashes or floods the
terminal, it is called for the rows one by one: a row that hangs is set aside after a short while,
so that the others get their turn, and is given the rest of the time at the end.

The time-out counts only time in which a worker runs the function. So each request carries the time
that is left to it: waiting for a worker, or for somebody to read the answer, takes nothing from it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import ceil, inf, nan
from multiprocessing.connection import wait
from typing import Any

from litgrpo.rewards.runner.calls import (
    MAX_PRINTED,
    Call,
    Scores,
    WorkerError,
    failed,
    is_coroutine,
    is_marked,
)
from litgrpo.rewards.runner.runner import RewardRunner
from litgrpo.rewards.runner.worker import Message, Question
from litgrpo.rewards.runner.worker_pool import GONE, LOAD_S, Worker, WorkerPool

log = logging.getLogger(__name__)

TIMEOUT, FLOOD = "TimeoutError", f"printed more than {MAX_PRINTED // 1_000_000} MB"
NO_TURN = "no time was left for it"  # other rows of the function used it up
SHORTEST_S = 0.02  # that a row gets at least, while there is time
GRACE_S = 0.5  # for coroutines to be stopped from within

Rows = tuple[int, list[int]]  # number of a call, and some of its rows


class Attempt(IntEnum):
    """What was tried before with the rows of a request."""

    WHOLE = 0  # nothing; all rows in one question
    ROWS = 1  # coroutines for all rows failed; one question per row, all together
    SHORT = 2  # which row is bad is not known; one question per row, with little time
    LAST = 3  # they hung in the short attempt


HALF = 1 / 2
# Share of the time left that one question may take. What the first attempt leaves is for the rows
# one by one; after n rows that hang in the short attempt, (31/32)^n of its time is left for others.
SHARE = {Attempt.WHOLE: HALF, Attempt.ROWS: 1.0, Attempt.SHORT: 1 / 32}


@dataclass
class Request:
    """Questions for one worker, which answers one after the other; coroutines all together.

    Args:
        attempt: what was tried before.
        unanswered: {number of the question: its rows}.
        left_s: seconds for which the function may still run for these rows.
        share: of them, that one question may take.
        together: they are coroutines.
        set_aside: rows that took long.
        began_at: when the worker began with the first unanswered question.
        until: when the worker is ended.
    """

    attempt: Attempt
    unanswered: dict[int, Rows]
    left_s: float
    share: float
    together: bool = False
    set_aside: list[Rows] = field(default_factory=list)
    began_at: float = inf
    until: float = inf

    @property
    def limit_s(self) -> float:
        """Seconds that the next question may take."""
        return max(0.0, min(self.left_s, max(SHORTEST_S, self.share * self.left_s)))

    def begin(self, now: float) -> None:
        """The worker has begun with the next question."""
        self.began_at = now
        self.until = now + self.limit_s + GRACE_S * self.together

    def stop(self, now: float) -> float:
        """The worker was ended; returns how long it was at the question, at most its limit."""
        seconds = min(max(0.0, now - self.began_at), self.limit_s)
        self.left_s -= seconds
        return seconds


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
        self.queue: deque[Request] = deque()
        self.running: dict[Worker, Request] = {}
        coroutines: list[Rows] = []
        for n, call in calls.items():
            remembered = known.get(n, {})
            self.results[n].put(list(remembered), Scores(list(remembered.values())))
            rows = [row for row in range(call.num_rows) if row not in remembered]
            if is_coroutine(call.function):
                coroutines.append((n, rows))
            elif is_marked(call.function, "pure"):
                self._ask_one_by_one(n, rows, runner.timeout_s, HALF)
            else:
                # A function that compares rows cannot be called again for one: no time is kept.
                share = 1.0 if is_marked(call.function, "whole_batch") else None
                self._ask(Attempt.WHOLE, [(n, rows)], runner.timeout_s, share)
        self._ask(Attempt.WHOLE, coroutines, runner.timeout_s, together=True)

    def dispatch(self) -> None:
        """Hand out requests while workers are free, without waiting for answers."""
        while self.queue:
            worker = self.pool.take()
            if worker is None:
                return
            request = self.running[worker] = self.queue.popleft()
            request.until = time.monotonic() + LOAD_S  # to begin
            message = Message(
                [self._question(n, rows) for n, rows in request.unanswered.values()],
                *(request.together, request.limit_s),
                show_stack=request.share >= HALF,  # else it was shown before
            )
            try:
                worker.connection.send(message)
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
        self,
        attempt: Attempt,
        questions: Iterable[Rows],
        left_s: float,
        share: float | None = None,
        *,
        together: bool = False,
        set_aside: Sequence[Rows] = (),
    ) -> None:
        """Queue a request, or enter why its rows fail; then comes what was set aside."""
        unanswered = dict(enumerate(questions))
        if unanswered and left_s > 0:
            share = share or SHARE.get(attempt, 1 / len(unanswered))
            self.queue.append(
                Request(attempt, unanswered, left_s, share, together, list(set_aside))
            )
            return
        for n, rows in unanswered.values():  # in the last attempt it is the rows' own fault
            reason = TIMEOUT if attempt is Attempt.LAST else NO_TURN
            self.results[n].put(rows, failed(len(rows), reason))
        if set_aside:
            self._ask(Attempt.LAST, set_aside, left_s)

    def _ask_one_by_one(
        self, n: int, rows: list[int], left_s: float, share: float | None = None
    ) -> None:
        """Share rows out to all workers, a question for each row."""
        for stripe in stripes(rows, self.pool.size):
            self._ask(Attempt.SHORT, [(n, [row]) for row in stripe], left_s, share)

    def _question(self, n: int, rows: list[int]) -> Question:
        call = self.calls[n]
        return Question(call.name, call.select(rows) | call.context, len(rows))

    def _listen(self) -> None:
        """Sleep until a worker answers or prints, or until one is overdue; read what came."""
        sources: dict[Any, Worker] = {}
        for worker in self.running:
            sources |= {worker.output: worker, worker.connection: worker}
        until = min(request.until for request in self.running.values())
        ready = wait(sources, max(0.0, until - time.monotonic()))
        for worker in {sources[source] for source in ready}:
            worker.drain()
            # All answers that came before what was printed: else a flood is blamed on their rows.
            while worker in self.running and worker.connection.poll():
                self._read(worker, self.running[worker])

    def _read(self, worker: Worker, request: Request) -> None:
        """Read one message of a worker: when it began, or the answer to a question."""
        try:
            message = worker.connection.recv()
        except GONE:
            self._lost(worker, None)
            return
        if isinstance(message, float):
            request.begin(message)
            return
        number, scores, seconds = message
        self._enter(request, request.unanswered.pop(number), scores, seconds)
        if not request.unanswered:
            worker.drain()
            sys.stdout.write(worker.take_prints())
            self._done(worker)
            self.pool.release(worker)

    def _enter(self, request: Request, asked: Rows, scores: Scores, seconds: float) -> None:
        """Enter an answer; where a question for all rows failed, ask for each row."""
        n, rows = asked
        call, left_s = self.calls[n], request.left_s - seconds
        self.runner.note_time(call, seconds, rows)
        if not request.together:  # the clock of coroutines runs for all at once, until the end
            request.left_s = left_s
            request.begin(time.monotonic())
        if scores.error is None or request.attempt is not Attempt.WHOLE:
            self.results[n].put(rows, scores)
        elif request.together and not is_marked(call.function, "whole_batch"):
            self.results[n].error = scores.error
            self._ask(Attempt.ROWS, [(n, [row]) for row in rows], left_s, together=True)
        else:
            self._retry(n, rows, left_s, scores)

    def _retry(self, n: int, rows: list[int], left_s: float, failure: Scores) -> None:
        """Ask for each row what failed for several; where rows are compared, all have failed."""
        if is_marked(self.calls[n].function, "whole_batch"):
            self.results[n].put(rows, failure)
            return
        self.results[n].error = self.results[n].error or failure.error
        self._ask_one_by_one(n, rows, left_s)

    def _end_overdue(self) -> None:
        """End workers that take too long or print too much."""
        for worker, request in list(self.running.items()):
            overdue = time.monotonic() >= request.until
            if worker.printed > MAX_PRINTED:
                self._lost(worker, FLOOD)
            elif overdue and not worker.connection.poll():  # no answer has come meanwhile
                self._lost(worker, TIMEOUT)

    def _lost(self, worker: Worker, reason: str | None) -> None:
        """A worker is gone (no reason), or must go; find out which row did it."""
        request = self.running[worker]
        seconds = request.stop(time.monotonic())
        died_of = self.pool.end(worker, wait=reason is None)
        story = f"the worker was ended: {reason}" if reason else f"the worker {died_of}"
        error = WorkerError(f"{story}. {worker.take_prints()}".strip())
        reason = reason or died_of
        # Rows are asked in order, so the worker was at the first one without an answer.
        number, (n, rows) = next(iter(request.unanswered.items()))
        self.runner.note_time(self.calls[n], seconds, rows)
        if request.attempt <= Attempt.ROWS:
            by_call: dict[int, list[int]] = {}
            for n, rows in request.unanswered.values():
                by_call.setdefault(n, []).extend(rows)
            for n, rows in by_call.items():
                self._retry(n, rows, request.left_s, failed(len(rows), reason, error))
            request.unanswered.clear()
        elif reason == TIMEOUT and request.attempt is Attempt.SHORT:
            request.set_aside.append(request.unanswered.pop(number))
        else:
            self.results[n].put(rows, failed(1, reason, error))
            del request.unanswered[number]
        self._done(worker)

    def _done(self, worker: Worker) -> None:
        """A worker is at the end of its request, for one reason or another; go on with the rest."""
        request = self.running.pop(worker)
        rest = request.unanswered.values()
        self._ask(request.attempt, rest, request.left_s, set_aside=request.set_aside)


def stripes(rows: Sequence[int], count: int) -> list[list[int]]:
    """The rows in at most `count` equal pieces.

    Example:
        >>> stripes([3, 4, 5], 2)
        [[3, 4], [5]]
    """
    size = max(1, ceil(len(rows) / count))
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]
