"""The calls of one iteration in worker processes: which rows are asked together, and for how long.

Each function is called for all its rows at once, for half of its time. If that raises, hangs,
crashes or floods its output, the other half is for the rows one by one, by all workers: each gets
an equal share of what is left, so a row that hangs takes nothing from the others. Only the time in
which a worker runs a function counts, without what it waits for a processor.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import ceil, nan

from litgrpo.rewards.runner.calls import Call, Scores, failed
from litgrpo.rewards.runner.marks import is_marked
from litgrpo.rewards.runner.runner import RewardRunner
from litgrpo.rewards.runner.worker import Message, Question
from litgrpo.workers.failures import WorkerError
from litgrpo.workers.pool import Worker, WorkerPool

GRACE_S = 0.5  # for coroutines to be stopped from within

Rows = tuple[int, list[int]]  # number of a call, and some of its rows


class Attempt(IntEnum):
    """How rows are asked for."""

    WHOLE = 0  # all at once
    TOGETHER = 1  # coroutines, one for each row, all together
    ROW = 2  # one row


@dataclass
class Task:
    """What a worker is asked at once: one question, or coroutines that wait together.

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
        pool: WorkerPool,
        calls: Mapping[int, Call],
        known: Mapping[int, Mapping[int, float]],
    ) -> None:
        self.runner, self.pool, self.calls = runner, pool, calls
        self.results = {n: Scores([nan] * call.num_rows) for n, call in calls.items()}
        # Seconds of workers that are left for single rows, and rows that have had none of it.
        half = runner.timeout_s * pool.size / 2
        self.left_s = {n: half / (1 + call.is_coroutine) for n, call in calls.items()}
        self.single: Counter[int] = Counter()
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
            for piece in stripes(rows, pool.size if is_marked(call.function, "pure") else 1):
                self._ask(Attempt.WHOLE, [(n, piece)])
        if coroutines:
            self._ask(Attempt.WHOLE, coroutines, together=True)

    def dispatch(self) -> None:
        """Hand out tasks while workers are free, without waiting for answers."""
        while self.queue:
            task = self.queue[0]
            self._refuse(task)
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
            self.pool.ask(worker, message, task.limit_s + GRACE_S * task.together)

    def finish(self) -> dict[int, Scores]:
        """Wait until every row has a score or its time is over."""
        while self.queue or self.running:
            self.dispatch()
            for worker, answer, last in self.pool.answers(wait=True):
                task = self.running.pop(worker) if last else self.running[worker]
                if isinstance(answer, WorkerError):
                    seconds = min(time.monotonic() - task.began, task.limit_s)
                    for number in list(task.unanswered):
                        rows = task.unanswered[number][1]
                        scores = failed(len(rows), answer, answer.cause)
                        self._enter(task, number, scores, seconds, lost=True)
                elif answer is not None:
                    self._enter(task, *answer)
        return self.results

    def _ask(self, attempt: Attempt, rows: Iterable[Rows], *, together: bool = False) -> None:
        self.queue.append(Task(attempt, dict(enumerate(rows)), together))

    def _limit_s(self, task: Task) -> float:
        """Seconds that each question of a task may take."""
        n = min(n for n, _ in task.unanswered.values())
        half = self.runner.timeout_s / 2
        whole = half * (1 + is_marked(self.calls[n].function, "whole_batch"))
        share = self.left_s[n] / max(self.single[n], self.pool.size)
        return (whole, half / 2, share)[task.attempt]

    def _question(self, n: int, rows: list[int]) -> Question:
        call = self.calls[n]
        return Question(call.name, call.select(rows) | call.context, len(rows), call.notes)

    def _refuse(self, task: Task) -> None:
        """Fail the rows of functions that broke the process which loaded them."""
        for number, (n, rows) in list(task.unanswered.items()):
            broken = self.pool.failed.get(self.calls[n].name)
            if broken is not None:
                self.results[n].put(rows, failed(len(rows), broken, broken.cause))
                del task.unanswered[number]

    def _enter(
        self, task: Task, number: int, scores: Scores, seconds: float, *, lost: bool = False
    ) -> None:
        """Enter the scores of a question, or ask for each row what failed for several."""
        n, rows = task.unanswered.pop(number)
        call, result = self.calls[n], self.results[n]
        self.runner.note_time(call, seconds, rows)
        if task.attempt is Attempt.ROW:
            self.left_s[n] -= seconds
            self.single[n] -= 1
        # Coroutines that wait together fail each for itself, unless their worker was lost.
        alone = task.attempt is Attempt.ROW or (task.attempt is Attempt.TOGETHER and not lost)
        if alone or scores.error is None or is_marked(call.function, "whole_batch"):
            result.put(rows, scores)
            return
        result.error = result.error or scores.error
        if task.together and task.attempt is Attempt.WHOLE:
            self._ask(Attempt.TOGETHER, [(n, [row]) for row in rows], together=True)
            return
        self.single[n] += len(rows)
        for row in rows:
            self._ask(Attempt.ROW, [(n, [row])])


def stripes(rows: Sequence[int], count: int) -> list[list[int]]:
    """The rows in at most `count` equal pieces.

    Example:
        >>> stripes([3, 4, 5], 2)
        [[3, 4], [5]]
    """
    size = max(1, ceil(len(rows) / count))
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]
