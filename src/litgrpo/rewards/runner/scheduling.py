"""One iteration of reward functions in worker processes: who is asked what, until when.

Each call is asked for all its rows at once first. If that raises, hangs, crashes or floods the
terminal, its rows are asked one by one: those that hang are set aside after a short while, so that
the others get their turn, and are given the rest of the time at the end.

A function's clock runs only while a worker computes its rows: not while they wait for a worker that
is at another function, nor while nobody looks, nor (up to a limit) while one is being started.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Mapping
from math import ceil
from multiprocessing.connection import wait
from typing import Any

from litgrpo.rewards.runner.calls import (
    MAX_PRINTED,
    Call,
    MalformedResult,
    Scores,
    is_coroutine,
    is_marked,
)
from litgrpo.rewards.runner.in_process import RewardRunner
from litgrpo.rewards.runner.processes import Crew, Worker
from litgrpo.rewards.runner.progress import Progress, Task, stripes
from litgrpo.rewards.runner.worker import Answer, Job

log = logging.getLogger(__name__)

TIMEOUT, FLOOD = "TimeoutError", f"printed more than {MAX_PRINTED // 1_000_000} MB"
NO_TURN = "no time was left for it"  # other rows of the function used it up
# A row's first chance: this share of what is left by then, so that something always is.
SHORT_SHARE, SHORTEST_S = 32, 0.02
GRACE_S = 0.25  # for coroutines to be stopped from within


class WorkerError(Exception):
    """An exception of a reward function in a worker; its text is the traceback there."""


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
        guard: RewardRunner,
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
        self.counted_at = time.monotonic()
        self.attended = False
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
        self._count()
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
        self._hear(0.0)
        self._count()
        self.attended = True
        while self.at_work or self.queue:
            self.start()
            if any(task.stream for task in self.at_work.values()):
                self.crew.stock()  # some of them will be ended
            untils = [task.until for task in self.at_work.values()]
            self._hear(max(0.0, min(untils) - time.monotonic()) if untils else 0.0)
            self._end_overdue()
            self._last_chances()

    def _hear(self, patience: float) -> None:
        """Read what workers say and print; wait for it, but not too long."""
        sources: dict[Any, Worker] = {}
        for worker in self.at_work:
            sources |= {worker.output: worker, worker.connection: worker}
        for source in wait(sources, patience):
            worker = sources[source]
            if worker in self.at_work:
                worker.drain()
                if source is worker.connection:
                    self._read(worker)

    def _count(self) -> None:
        """Let the clocks run on, those of the functions that were computed since the last look."""
        since, now = self.counted_at, time.monotonic()
        self.counted_at = now
        tasks, all_busy = self.at_work.values(), len(self.at_work) >= self.crew.size
        for n, state in self.states.items():
            computed = max((task.computed(n, since, now) for task in tasks), default=0.0)
            at_it = any(n == number for task in tasks for number, _ in task.parts)
            waits = not self.attended or (all_busy and not at_it)
            state.count(now - since, computed, waits=waits)

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
        if state.ends_at is None or now < self._limit(n, task):
            return True
        if task.first and now < state.ends_at:
            self._again(n, rows, TIMEOUT)
        else:
            state.fail(rows, _over(state, task))
        return False

    def _limit(self, n: int, task: Task) -> float:
        """When a task of a call that was asked must be over."""
        ends_at = self.states[n].ends_at
        assert ends_at is not None
        return ends_at - self.guard.timeout_s / 2 if task.first else ends_at

    def _send(self, worker: Worker, task: Task) -> None:
        self._count()
        now = task.asked_at = time.monotonic()
        limits = []
        for n, _ in task.parts:
            state = self.states[n]
            if state.ends_at is None:
                state.ends_at = now + self.guard.timeout_s
            limits.append(self._limit(n, task))
        limit_s = max(0.0, min(now + task.share, *limits) - now)
        task.until = min(limits) + min(self.states[n].pauses_s for n, _ in task.parts)
        jobs = [self._job(n, rows, task, limit_s) for n, rows in task.parts]
        self.at_work[worker] = task
        try:
            worker.connection.send(jobs)
        except OSError as error:  # it died while it was idle; the answer will be its end
            log.debug("worker %d: %s", worker.pid, error)

    def _begin(self, task: Task, now: float) -> None:
        """The worker took the message up; from now on it counts."""
        task.began_at = task.asked_at = now
        task.until = min(now + task.share, *(self._limit(n, task) for n, _ in task.parts))
        if is_coroutine(self.states[task.parts[0][0]].call.function):
            task.until += GRACE_S

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
            message: list[Answer] | float | None = worker.connection.recv()
        except (EOFError, OSError):
            self._lost(worker, task, None)
            return
        if isinstance(message, float):
            self._begin(task, message)
            return
        self._count()
        for answer in message or []:
            self._take(task, answer)
        if task.stream:
            now = time.monotonic()
            task.asked_at = now
            task.until = min(now + task.share, *(self._limit(n, task) for n, _ in task.parts))
        if message is None:
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
            state.spread(rows, answer.scores)
        else:
            reason = next(iter(answer.scores.failures.values()))
            self._again(n, rows, reason, together=is_coroutine(state.call.function))
        if not task.split:
            task.answered.add(n)

    def _again(self, n: int, rows: list[int], reason: str, *, together: bool = False) -> None:
        """Ask row by row what could not be answered as one; coroutines may still run together."""
        state = self.states[n]
        if not state.retriable:
            state.fail(rows, reason)
            return
        left = state.left(time.monotonic(), self.guard.timeout_s)
        if together:
            self.queue.append(Task([(n, rows)], True, left))
            return
        for stripe in stripes(rows, self.crew.size):
            self.queue.append(Task([(n, stripe)], True, _short(left), stream=True))

    def _end_overdue(self) -> None:
        """End workers that take too long or print too much."""
        self._count()
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
        self._count()
        del self.at_work[worker]
        died_of = self.crew.dismiss(worker, wait=reason is None)
        story = f"the worker {died_of}" if reason is None else f"the worker was ended: {reason}"
        story = f"{story}. {worker.take_prints()}".strip()
        reason = reason or died_of
        seconds = time.monotonic() - task.asked_at
        for n, rows in task.parts:
            state = self.states[n]
            left = [row for row in rows if row not in state.rows]
            if n in task.answered or not left:
                continue
            if task.began_at is None and reason == TIMEOUT:  # and so is the call's time over
                state.fail(left, _over(state, task))
                continue
            state.error = state.error or WorkerError(story)
            if not task.stream:
                self.guard.note_time(state.call, seconds, left)
                self._again(n, left, reason)
                continue
            self.guard.note_time(state.call, seconds, left[:1])
            self._without(n, left, task, reason)

    def _without(self, n: int, rows: list[int], task: Task, reason: str) -> None:
        """Go on behind the row of a stream that cost a worker."""
        state = self.states[n]
        if reason == TIMEOUT and not task.last:
            state.set_aside.append(rows[0])
        else:
            state.fail(rows[:1], reason)
        share = _short(state.left(time.monotonic(), self.guard.timeout_s))
        idle = max(1, self.crew.size - len(self.at_work) - len(self.queue))
        for stripe in reversed(stripes(rows[1:], idle)):
            self.queue.appendleft(Task([(n, stripe)], True, share, stream=True))

    def _last_chances(self) -> None:
        """Rows that were set aside get what time is left, once all others have had their turn.

        Those of other functions too: a last chance takes long and would keep them waiting.
        """
        first_chances = (
            task for task in [*self.queue, *self.at_work.values()] if task.stream and not task.last
        )
        if any(first_chances):
            return
        self._count()
        for n, state in self.states.items():
            if not state.set_aside:
                continue
            rows, state.set_aside = state.set_aside, []
            left = state.left(time.monotonic(), self.guard.timeout_s)
            share = left / ceil(len(rows) / self.crew.size)
            self.queue.extend(
                Task([(n, [row])], True, share, stream=True, last=True) for row in rows
            )


def _short(left: float) -> float:
    """Seconds of a row's first chance where a function has so many left."""
    return max(SHORTEST_S, left / SHORT_SHARE)


def _over(state: Progress, task: Task) -> str:
    """Why rows fail that wait when their function's time is over: their own doing, or not."""
    return TIMEOUT if task.last or not state.retriable else NO_TURN
