"""Reward functions are other people's code: a bad one may cost its own samples, never the run.

A guard runs the calls of one iteration and hands back one float per row, with the rows that failed
and why. This file holds what every guard shares (counting, showing, stopping) and the one that runs
the functions in this process; it cannot interrupt a function that hangs. `process_guard.py` can.
"""

from __future__ import annotations

import asyncio
import io
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from litgrpo.rewards.runner.calls import (
    MAX_PRINTED,
    MAX_SHOWN,
    Call,
    MalformedResult,
    Scores,
    failed,
    is_coroutine,
    is_marked,
    joined,
    pure,
    read_result,
    reason_of,
    whole_batch,
)

__all__ = ["InProcessRunner", "RewardFailure", "RewardRunner", "pure", "whole_batch"]

log = logging.getLogger(__name__)

MAX_SLOW = 20  # entries of the list of slow samples
CAUGHT = (Exception, SystemExit)

Gather = Callable[[], list[Scores]]  # waits for the answers to what was asked


class RewardFailure(RuntimeError):
    """So many rewards of one function failed that going on would train on noise."""


class PrintedTooMuch(RuntimeError):
    """A reward function floods the terminal."""


@dataclass(frozen=True)
class Slow:
    """A question that took long.

    Args:
        seconds: how long; a question that was ended counts until then.
        name: the reward function.
        num_rows: rows that were asked about; 1 names the sample.
        completion: the first of them.
    """

    seconds: float
    name: str
    num_rows: int
    completion: str


class RewardRunner(ABC):
    """Runs reward functions, counts what fails, stops the run when too much does.

    Args:
        timeout_s: seconds that one function may take per iteration: half of them for all rows
            together; where that fails, the other half for the rows one by one.
        max_failed_frac: share of one function's rows in one iteration that may fail; more stops the
            run.
        slow_s: questions that take longer are listed in `slowest`.
    """

    def __init__(
        self, timeout_s: float = 60.0, max_failed_frac: float = 0.5, slow_s: float = 1.0
    ) -> None:
        """See the class."""
        if not (timeout_s > 0 and 0 <= max_failed_frac <= 1 and slow_s > 0):
            raise ValueError(
                "a guard needs timeout_s > 0, max_failed_frac in [0, 1] and slow_s > 0, got"
                f" {timeout_s}, {max_failed_frac} and {slow_s}"
            )
        self.timeout_s = timeout_s
        self.max_failed_frac = max_failed_frac
        self.slow_s = slow_s
        self.failures: dict[str, Counter[str]] = {}
        self.slowest: list[Slow] = []
        self.proven: set[str] = set()
        self.told: set[str] = set()

    @abstractmethod
    def run(self, calls: Sequence[Call]) -> list[Scores]:
        """Run every call and read its result; raises for nothing that a reward function does."""

    def begin(self, calls: Sequence[Call]) -> Gather:
        """Like `run`, but where other processes do the work, there is time before it is gathered.

        Args:
            calls: what to ask; one set at a time, a new one ends an old one that was not gathered.
        """
        results = self.run(calls)
        return lambda: results

    def start(self, calls: Sequence[Call]) -> Gather:
        """Ask now; what is returned waits for the scores, and counts and shows failures as a call.

        Args:
            calls: see `begin`.
        """
        gather = self.begin(calls)
        return lambda: self._settled(calls, gather())

    def __call__(self, calls: Sequence[Call]) -> list[Scores]:
        """The scores of every call, after counting and showing failures.

        Raises:
            ValueError: a function that never worked before returned no list of N rewards, neither
                for all rows nor for any alone: a mistake in its code.
            RewardFailure: more than `max_failed_frac` of a function's rows failed.
        """
        return self.start(calls)()

    def _settled(self, calls: Sequence[Call], results: list[Scores]) -> list[Scores]:
        """The same results, counted and shown."""
        for call, scores in zip(calls, results, strict=True):
            worked = len(scores.failures) < call.num_rows
            if isinstance(scores.error, MalformedResult) and not worked:
                if call.name not in self.proven:
                    raise ValueError(f"reward '{call.name}' {scores.error}")
            elif scores.error is not None and not scores.failures:
                self.tell_once(
                    call.name,
                    "reward '%s' failed for %d rows together and was asked row by row: %s",
                    *(call.name, call.num_rows, scores.error),
                )
            if scores.failures:
                self._count(call, scores)
            if worked:
                self.proven.add(call.name)
        return results

    def close(self) -> None:  # noqa: B027 (most guards hold nothing)
        """Give back whatever is held between iterations; it comes back when needed."""

    def tell_once(self, name: str, message: str, *values: object) -> None:
        """Warn, but only the first time for this reward and message."""
        if name + message not in self.told:
            self.told.add(name + message)
            log.warning(message, *values)

    def note_time(self, call: Call, seconds: float, rows: Sequence[int]) -> None:
        """Remember a question that took long."""
        if seconds > self.slow_s and rows:
            texts = call.rows.get("completions")
            text = "" if texts is None else str(texts[rows[0]])
            self.slowest.append(Slow(seconds, call.name, len(rows), text))
            self.slowest.sort(key=lambda slow: -slow.seconds)
            del self.slowest[MAX_SLOW:]
            self.tell_once(
                *(call.name, "reward '%s' took %.1f s for %d rows, the first of them %.200r"),
                *(call.name, seconds, len(rows), text),
            )

    def _count(self, call: Call, scores: Scores) -> None:
        counts = self.failures.setdefault(call.name, Counter())
        before, first = counts.total(), min(scores.failures)
        counts.update(scores.failures.values())
        reasons = ", ".join(f"{reason}: {count}" for reason, count in counts.items())
        summary = (
            f"reward '{call.name}': {len(scores.failures)} of {call.num_rows} completions failed"
        )
        if not before:
            given = (f"{name} {values[first]!r:.200}" for name, values in call.rows.items())
            log.warning(
                "%s and are left out (%s); the first is row %d, which got %s",
                *(summary, reasons, first, ", ".join(given)),
                exc_info=scores.error,
            )
        elif counts.total().bit_length() > before.bit_length():  # each time that the total doubles
            log.warning("%s; so far %d (%s)", summary, counts.total(), reasons)
        if len(scores.failures) > self.max_failed_frac * call.num_rows:
            raise RewardFailure(
                f"{summary}, more than max_failed_frac = {self.max_failed_frac} allows."
                f" Reasons so far: {reasons}."
            ) from scores.error


class InProcessRunner(RewardRunner):
    """Runs the functions here, one after the other; coroutine functions together.

    A call that raises is repeated row by row until the deadline, so that only the bad rows are
    lost. A function that hangs cannot be interrupted, and one that crashes ends the run.
    """

    def run(self, calls: Sequence[Call]) -> list[Scores]:
        """See RewardRunner."""
        waiting = {n: call for n, call in enumerate(calls) if is_coroutine(call.function)}
        finished = _finish([self._score_async(call) for call in waiting.values()])
        results = dict(zip(waiting, finished, strict=True))
        return [results[n] if n in results else self.score(call) for n, call in enumerate(calls)]

    def score(self, call: Call) -> Scores:
        """Run one call: together, else row by row."""
        deadline = time.monotonic() + self.timeout_s
        try:
            return self._ask(call, None)
        except CAUGHT as error:
            first = _as_exception(error)
            if is_marked(call.function, "whole_batch"):
                return failed(call.num_rows, reason_of(error), first)
        rows = []
        for row in range(call.num_rows):
            try:
                if time.monotonic() > deadline:
                    raise TimeoutError
                rows.append(self._ask(call, row))
            except CAUGHT as error:
                rows.append(failed(1, reason_of(error)))
        return joined(rows, first)

    def _ask(self, call: Call, row: int | None) -> Scores:
        started, limit = time.monotonic(), _Limited(sys.stdout)
        try:
            with redirect_stdout(limit), redirect_stderr(limit):
                result = call.function(**call.arguments(row))
            if limit.printed > MAX_PRINTED:  # the function caught our exception
                raise PrintedTooMuch
            return read_result(result, call.num_rows if row is None else 1)
        finally:
            rows = range(call.num_rows) if row is None else [row]
            self.note_time(call, time.monotonic() - started, rows)

    async def _score_async(self, call: Call) -> Scores:
        async def attempt(row: int | None, num_rows: int) -> Scores:
            # Can be interrupted: half of the deadline for the whole, half for the rows.
            answer = call.function(**call.arguments(row))
            return read_result(await asyncio.wait_for(answer, self.timeout_s / 2), num_rows)

        try:
            return await attempt(None, call.num_rows)
        except Exception as error:
            if is_marked(call.function, "whole_batch"):
                return failed(call.num_rows, reason_of(error), error)
            first = error
        attempts = (attempt(row, 1) for row in range(call.num_rows))
        rows = await asyncio.gather(*attempts, return_exceptions=True)
        return joined(
            (row if isinstance(row, Scores) else failed(1, reason_of(row)) for row in rows), first
        )


class _Limited(io.TextIOBase):
    """Hands on what is printed, until it is too much."""

    def __init__(self, target: Any) -> None:
        self.target, self.printed = target, 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.printed += len(text)
        if self.printed > MAX_PRINTED:
            raise PrintedTooMuch(f"more than {MAX_PRINTED} characters in one call")
        self.target.write(text[: max(0, MAX_SHOWN + len(text) - self.printed)])
        return len(text)

    def flush(self) -> None:
        self.target.flush()


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


def _finish(coroutines: Sequence[Coroutine[Any, Any, Scores]]) -> list[Scores]:
    """Run coroutines together, in a thread of their own: a notebook has a loop in this one."""

    async def together() -> list[Scores]:
        return list(await asyncio.gather(*coroutines))

    if not coroutines:
        return []
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, together()).result()
