"""Reward functions in the training process, one after the other; coroutine functions together."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from math import nan
from typing import Any

from litgrpo.rewards.runner.calls import Call, Scores, answer, failed
from litgrpo.rewards.runner.coroutines import scored_together
from litgrpo.rewards.runner.marks import is_marked
from litgrpo.rewards.runner.runner import RewardRunner, StartedCalls
from litgrpo.workers.failures import MAX_PRINTED, MAX_SHOWN


class PrintedTooMuch(RuntimeError):
    """A reward function floods the terminal."""


class InProcessRunner(RewardRunner):
    """Runs the functions here, one after the other; coroutine functions together.

    A call that raises is repeated row by row until the deadline, so that only the bad rows are
    lost. A function that hangs cannot be interrupted, and one that crashes ends the run.
    """

    def dispatch(self, calls: Sequence[Call]) -> StartedCalls:
        """Leave everything to `wait`."""
        return CallsInProcess(self, calls)


class CallsInProcess(StartedCalls):
    """Calls that run in `wait`, in the caller's thread."""

    def collect(self) -> list[Scores]:
        """Call each function."""
        return run_here(self.runner, self.calls)


def run_here(runner: RewardRunner, calls: Sequence[Call]) -> list[Scores]:
    """The scores of every call, computed in this thread.

    Args:
        runner: its time-out holds, and its list of slow calls is added to.
        calls: the calls.
    """
    waiting = [n for n, call in enumerate(calls) if call.is_coroutine]
    together = scored_together([calls[n] for n in waiting], runner.timeout_s / 2) if waiting else []
    results = dict(zip(waiting, together, strict=True))
    results |= {n: _score(runner, call) for n, call in enumerate(calls) if n not in results}
    return [results[n] for n in range(len(calls))]


def _score(runner: RewardRunner, call: Call) -> Scores:
    """Call the function for all rows; if that fails, for each row until the deadline."""
    deadline = time.monotonic() + runner.timeout_s
    whole = _ask(runner, call, range(call.num_rows))
    if whole.error is None or is_marked(call.function, "whole_batch"):
        return whole
    scores = Scores([nan] * call.num_rows, error=whole.error)
    for row in range(call.num_rows):
        late = time.monotonic() > deadline
        only = range(row, row + 1)
        scores.put([row], failed(1, TimeoutError()) if late else _ask(runner, call, only))
    return scores


def _ask(runner: RewardRunner, call: Call, rows: range) -> Scores:
    """Call the function for some rows."""
    started, limit = time.monotonic(), _Limited(sys.stdout)
    given = call.arguments(slice(rows.start, rows.stop))
    with redirect_stdout(limit), redirect_stderr(limit):
        scores = answer(call.function, given, len(rows), call.notes)
    runner.note_time(call, time.monotonic() - started, rows)
    # Also where the function caught it.
    return scores if limit.printed <= MAX_PRINTED else failed(len(rows), PrintedTooMuch())


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
        with suppress(ValueError):  # this may be collected, which flushes, when that is closed
            self.target.flush()
