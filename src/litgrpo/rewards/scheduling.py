"""One iteration of reward functions in worker processes: who is asked what, until when.

Each call is asked for all its rows at once first. If that raises, hangs, crashes or floods the
terminal, its rows are asked one by one: those that hang are set aside after a short while, so that
the others get their turn, and are given the rest of the time at the end.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from multiprocessing.connection import wait
from typing import Any

from litgrpo.rewards.calls import (
    MAX_PRINTED,
    Call,
    MalformedResult,
    Scores,
    failed,
    is_coroutine,
    is_marked,
    joined,
)
from litgrpo.rewards.guard import Guard
from litgrpo.rewards.processes import Crew, Worker
from litgrpo.rewards.worker import Answer, Job

log = logging.getLogger(__name__)

TIMEOUT, FLOOD = "TimeoutError", f"printed more than {MAX_PRINTED // 1_000_000} MB"
SHORT_SHARE, SHORTEST_S = 32, 0.05  # a row's first chance: this share of what is left
GRACE_S = 0.25  # for coroutines to be stopped from within


class WorkerError(Exception):
    """An exception of a reward function in a worker; its text is the traceback there."""


@dataclass
class Progress:
    """What is known of one call so far.

    Args:
        call: the call.
        retriable: rows can be asked one by one.
        rows: {row: its scores}.
        ends_at: when its time is over; counted from the first question on.
        set_aside: rows that took long the first time.
        error: the first exception.
        whole: the answer to the question for all rows.
    """

    call: Call
    retriable: bool
    rows: dict[int, Scores] = field(default_factory=dict)
    ends_at: float | None = None
    set_aside: list[int] = field(default_factory=list)
    error: Exception | None = None
    whole: Scores | None = None

    @property
    def missing(self) -> list[int]:
        """Rows without an answer."""
        if self.whole is not None:
            return []
        return [row for row in range(self.call.num_rows) if row not in self.rows]

    def result(self) -> Scores:
        """Everything joined."""
        if self.whole is not None:
            return self.whole
        return joined((self.rows[row] for row in range(self.call.num_rows)), self.error)


@dataclass
class Task:
    """One message to a worker: rows of one call, or of several coroutine functions.

    Args:
        parts: (number of the call, its rows).
        split: rows one by one.
        stream: each result at once, so that it is known which row hangs.
        share: seconds at most; for a stream, for each row.
        last: the rows' last chance.
        first: of a call that may be asked row by row later, and must leave half of its time for it.
    """

    parts: list[tuple[int, list[int]]]
    split: bool
    share: float
    stream: bool = False
    last: bool = False
    first: bool = False
    until: float = 0.0
    asked_at: float = 0.0
    answered: set[int] = field(default_factory=set)


class Round:
    """The calls of one iteration.

    Args:
        guard: holds time-outs and the list of slow questions.
        crew: the workers.
        calls: {number: call}.
        known: {number: {row: reward}} that need not be asked.
    """

    def __init__(
        self,
        guard: Guard,
        crew: Crew,
        calls: Mapping[int, Call],
        known: Mapping[int, Mapping[int, float]],
    ) -> None:
        """Plan the first questions."""
        self.guard, self.crew = guard, crew
        self.states = {
            n: Progress(
                call=call,
                retriable=not is_marked(call.function, "whole_batch"),
                rows={row: Scores([value]) for row, value in known.get(n, {}).items()},
            )
            for n, call in calls.items()
        }
        self.queue: deque[Task] = deque()
        self.at_work: dict[Worker, Task] = {}
        self._plan()

    def _plan(self) -> None:
        waiting = [n for n, s in self.states.items() if is_coroutine(s.call.function) and s.missing]
        half = self.guard.timeout_s / 2
        if waiting:
            parts = [(n, self.states[n].missing) for n in waiting]
            self.queue.append(Task(parts, False, half))
        for n, state in self.states.items():
            rows = state.missing
            if n in waiting or not rows:
                continue
            if is_marked(state.call.function, "pure"):
                self.queue.extend(
                    Task([(n, stripe)], True, half, first=True)
                    for stripe in stripes(rows, self.crew.size)
                )
            else:
                share = half if state.retriable else self.guard.timeout_s
                self.queue.append(Task([(n, rows)], False, share))

    def start(self) -> None:
        """Hand out work without waiting for answers."""
        while self.queue:
            task = self.queue[0]
            task.parts = [(n, rows) for n, rows in task.parts if self._in_time(n, rows, task)]
            if not task.parts:
                self.queue.popleft()
                continue
            worker = self.crew.take()
            if worker is None:
                return
            self._send(worker, self.queue.popleft())

    def finish(self) -> None:
        """Wait until every row has an answer or its time is over."""
        while self.at_work or self.queue:
            self.start()
            sources: dict[Any, Worker] = {}
            for worker in self.at_work:
                sources |= {worker.output: worker, worker.connection: worker}
            now = time.monotonic()
            patience = min((task.until for task in self.at_work.values()), default=now) - now
            for source in wait(sources, max(0.0, patience)):
                worker = sources[source]
                worker.drain()
                if source is worker.connection:
                    self._read(worker)
            self._end_overdue()
            self._last_chances()

    def abandon(self) -> None:
        """End what still runs, after an exception here."""
        for worker in list(self.at_work):
            self.crew.dismiss(worker)
        self.at_work.clear()

    def results(self) -> dict[int, Scores]:
        """{number: scores} of every call."""
        return {n: state.result() for n, state in self.states.items()}

    def _in_time(self, n: int, rows: list[int], task: Task) -> bool:
        """Whether a call has time left; if not, its rows fail, or are asked one by one."""
        state, now = self.states[n], time.monotonic()
        if state.ends_at is None or now < self._limit(state.ends_at, task):
            return True
        if task.first and now < state.ends_at:
            self._again(n, rows, TIMEOUT)
        else:
            self._fail(n, rows, TIMEOUT)
        return False

    def _limit(self, ends_at: float, task: Task) -> float:
        return ends_at - self.guard.timeout_s / 2 if task.first else ends_at

    def _send(self, worker: Worker, task: Task) -> None:
        now = task.asked_at = time.monotonic()
        limits = []
        for n, _ in task.parts:
            state = self.states[n]
            if state.ends_at is None:
                state.ends_at = now + self.guard.timeout_s
            limits.append(self._limit(state.ends_at, task))
        task.until = min(now + task.share, *limits)
        gathers = is_coroutine(self.states[task.parts[0][0]].call.function)
        limit_s = max(0.0, task.until - now)
        task.until += GRACE_S if gathers else 0.0
        jobs = [self._job(n, rows, task, limit_s) for n, rows in task.parts]
        self.at_work[worker] = task
        try:
            worker.connection.send(jobs)
        except OSError as error:  # it died while it was idle; the answer will be its end
            log.debug("worker %d: %s", worker.pid, error)

    def _job(self, n: int, rows: list[int], task: Task, limit_s: float) -> Job:
        call = self.states[n].call
        chosen = call.select(rows)
        return Job(call.name, chosen, call.context, len(rows), task.split, limit_s, task.stream)

    def _read(self, worker: Worker) -> None:
        """Take one message of a worker."""
        task = self.at_work.get(worker)
        if task is None:
            return
        worker.drain()
        try:
            answers: list[Answer] | None = worker.connection.recv()
        except (EOFError, OSError):
            self._lost(worker, task, None)
            return
        for answer in answers or []:
            self._take(task, answer)
        if task.stream:
            now = time.monotonic()
            ends = [self.states[n].ends_at or now for n, _ in task.parts]
            task.asked_at, task.until = now, min(now + task.share, *ends)
        if answers is None:
            sys.stdout.write(worker.take_prints())
            del self.at_work[worker]
            self.crew.rest(worker)

    def _take(self, task: Task, answer: Answer) -> None:
        """Enter one answer; a question for all rows that failed is asked again row by row."""
        n, rows = task.parts[answer.job]
        state = self.states[n]
        asked = rows if not task.split else rows[answer.item : answer.item + 1]
        self.guard.note_time(state.call, answer.seconds, asked)
        error = None
        if answer.trouble:
            kind, text = answer.trouble
            error = MalformedResult(text) if kind == "malformed" else WorkerError(text)
            state.error = state.error or error
        if task.split:
            state.rows[asked[0]] = answer.scores
        elif error is None:
            self._spread(state, rows, answer.scores)
        else:
            reason = next(iter(answer.scores.failures.values()))
            self._again(n, rows, reason, together=is_coroutine(state.call.function))
        if not task.split:
            task.answered.add(n)

    def _spread(self, state: Progress, rows: Sequence[int], scores: Scores) -> None:
        if len(rows) == state.call.num_rows:
            state.whole = scores
            return
        for place, row in enumerate(rows):
            reason = {0: scores.failures[place]} if place in scores.failures else {}
            state.rows[row] = Scores([scores.values[place]], reason, scores.precision)

    def _again(self, n: int, rows: list[int], reason: str, *, together: bool = False) -> None:
        """Ask row by row what could not be answered as one; coroutines may still run together."""
        state = self.states[n]
        if not state.retriable:
            self._fail(n, rows, reason)
            return
        now = time.monotonic()
        left = max(0.0, (state.ends_at or now + self.guard.timeout_s) - now)
        if together:
            self.queue.append(Task([(n, rows)], True, left))
            return
        share = max(SHORTEST_S, left / SHORT_SHARE)
        for stripe in stripes(rows, self.crew.size):
            self.queue.append(Task([(n, stripe)], True, share, stream=True))

    def _fail(self, n: int, rows: Sequence[int], reason: str) -> None:
        state = self.states[n]
        if not state.retriable:
            state.whole = failed(state.call.num_rows, reason, state.error)
            return
        for row in rows:
            state.rows.setdefault(row, failed(1, reason))

    def _end_overdue(self) -> None:
        """End workers that take too long or print too much."""
        now = time.monotonic()
        for worker, task in list(self.at_work.items()):
            if worker.printed > MAX_PRINTED:
                self._lost(worker, task, FLOOD)
            elif now >= task.until:
                if worker.connection.poll():
                    self._read(worker)  # it answered while we looked elsewhere
                else:
                    self._lost(worker, task, TIMEOUT)

    def _lost(self, worker: Worker, task: Task, reason: str | None) -> None:
        """A worker is gone, or must go; find out which row did it."""
        del self.at_work[worker]
        died_of = self.crew.dismiss(worker)
        story = f"the worker {died_of}" if reason is None else f"the worker was ended: {reason}"
        story = f"{story}. {worker.take_prints()}".strip()
        reason = reason or died_of
        seconds = time.monotonic() - task.asked_at
        for n, rows in task.parts:
            state = self.states[n]
            left = [row for row in rows if row not in state.rows]
            if n in task.answered or not left:
                continue
            state.error = state.error or WorkerError(story)
            if not task.stream:
                self.guard.note_time(state.call, seconds, left)
                self._again(n, left, reason)
                continue
            self.guard.note_time(state.call, seconds, left[:1])
            if reason == TIMEOUT and not task.last:
                state.set_aside.append(left[0])
            else:
                self._fail(n, left[:1], reason)
            if left[1:]:
                self.queue.appendleft(Task([(n, left[1:])], True, task.share, True, task.last))

    def _last_chances(self) -> None:
        """Rows that were set aside get what time is left, once all others have had their turn.

        Those of other functions too: a last chance takes long and would keep them waiting.
        """
        first_chances = (
            task for task in [*self.queue, *self.at_work.values()] if task.stream and not task.last
        )
        if any(first_chances):
            return
        for n, state in self.states.items():
            if not state.set_aside:
                continue
            rows, state.set_aside = state.set_aside, []
            left = max(0.0, (state.ends_at or 0.0) - time.monotonic())
            share = left / ceil(len(rows) / self.crew.size)
            self.queue.extend(
                Task([(n, [row])], True, share, stream=True, last=True) for row in rows
            )


def stripes(rows: Sequence[int], count: int) -> list[list[int]]:
    """The rows in at most `count` equal pieces.

    Example:
        >>> stripes([3, 4, 5], 2)
        [[3, 4], [5]]
    """
    size = max(1, ceil(len(rows) / count))
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]
