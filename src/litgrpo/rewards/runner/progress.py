"""What is known of each reward function so far, and the time that it has left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from litgrpo.rewards.runner.calls import Call, Scores, failed, joined

PAUSES_S = 0.25  # that a clock stands still while workers are started, in all


@dataclass
class Progress:
    """What is known of one call so far.

    Args:
        call: the call.
        retriable: rows can be asked one by one.
        rows: {row: its scores}.
        ends_at: when its time is over; counted from the first question on, and moved by `count`.
        set_aside: rows that took long the first time.
        error: the first exception.
        whole: the answer to the question for all rows.
        pauses_s: seconds for which its clock may still stand.
    """

    call: Call
    retriable: bool
    rows: dict[int, Scores] = field(default_factory=dict)
    ends_at: float | None = None
    set_aside: list[int] = field(default_factory=list)
    error: Exception | None = None
    whole: Scores | None = None
    pauses_s: float = PAUSES_S

    @property
    def missing(self) -> list[int]:
        """Rows without an answer."""
        if self.whole is not None:
            return []
        return [row for row in range(self.call.num_rows) if row not in self.rows]

    def count(self, seconds: float, computed: float, *, waits: bool) -> None:
        """Let time pass: only what a living worker spends on the rows counts.

        Args:
            seconds: that have passed.
            computed: of these, for how long a worker was at it.
            waits: it was not its turn, which may last; else its workers were being started, which
                may take `PAUSES_S` in all and counts after that.
        """
        if self.ends_at is None:
            return
        pause = max(0.0, seconds - computed)
        if not waits:
            pause = min(pause, self.pauses_s)
            self.pauses_s -= pause
        self.ends_at += pause

    def left(self, now: float, timeout_s: float) -> float:
        """Seconds until its time is over; all of it before the first question."""
        return timeout_s if self.ends_at is None else max(0.0, self.ends_at - now)

    def fail(self, rows: Sequence[int], reason: str) -> None:
        """Enter rows that got no answer; one that compares rows fails for all."""
        if not self.retriable:
            self.whole = failed(self.call.num_rows, reason, self.error)
            return
        for row in rows:
            self.rows.setdefault(row, failed(1, reason))

    def spread(self, rows: Sequence[int], scores: Scores) -> None:
        """Enter one answer for several rows."""
        if len(rows) == self.call.num_rows:
            self.whole = scores
            return
        for place, row in enumerate(rows):
            reason = {0: scores.failures[place]} if place in scores.failures else {}
            self.rows[row] = Scores([scores.values[place]], reason, scores.precision)

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
        share: seconds at most; for a stream, for each row.
        stream: each result at once, so that it is known which row hangs.
        last: the rows' last chance.
        first: of a call that may be asked row by row later, and must leave half of its time for it.
        until: when the worker is ended, or must have begun.
        began_at: when the worker began to compute, by its own clock.
        asked_at: when the newest question was asked.
        answered: numbers of the calls that are done with.
    """

    parts: list[tuple[int, list[int]]]
    split: bool
    share: float
    stream: bool = False
    last: bool = False
    first: bool = False
    until: float = 0.0
    began_at: float | None = None
    asked_at: float = 0.0
    answered: set[int] = field(default_factory=set)

    def computed(self, n: int, since: float, now: float) -> float:
        """Seconds between two moments in which its worker was at the rows of call n.

        What passes after its time, before somebody ends it, is not the rows' time.
        """
        if self.began_at is None or all(n != number for number, _ in self.parts):
            return 0.0
        return max(0.0, min(now, self.until) - max(since, self.began_at))


def stripes(rows: Sequence[int], count: int) -> list[list[int]]:
    """The rows in at most `count` equal pieces.

    Example:
        >>> stripes([3, 4, 5], 2)
        [[3, 4], [5]]
    """
    size = max(1, ceil(len(rows) / count))
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]
