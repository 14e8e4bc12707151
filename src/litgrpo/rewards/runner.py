"""Reward runners: start calls, wait for their scores, count what failed."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

from litgrpo.argument_types import check_argument_types
from litgrpo.arguments import above, at_least, at_most
from litgrpo.event_loops import drop_event_loop, event_loop
from litgrpo.rewards.calls import (
    LOOP,
    Call,
    MalformedResult,
    Scores,
    UnusableReward,
    call_function,
    is_marked,
    make_failed_scores,
    score_coroutine,
)
from litgrpo.workers.failures import cause_of

log = logging.getLogger(__name__)
GRACE_S = 5.0  # for a coroutine to be stopped from within, on a busy machine


class RewardFailure(RuntimeError):
    """More rewards of one function failed than `max_failed_frac` allows.

    The message is one line; the cause has the traceback.
    """

    exit_code = 2


def record_failures(
    counts: Counter[str], call: Call, scores: Scores, max_failed_frac: float
) -> None:
    """Count the failures of a call; show the first, and stop the run if there are too many.

    Args:
        counts: {reason: rows of this function so far}, added to.
        call: the call.
        scores: what came of it, with at least one failure.
        max_failed_frac: share of the rows that may fail.

    Raises:
        RewardFailure: more failed.
    """
    before, first = counts.total(), min(scores.failures)
    counts.update(scores.failures.values())
    summary = f"reward '{call.name}': {len(scores.failures)} of {call.num_rows} completions failed"
    if len(scores.failures) > max_failed_frac * call.num_rows:
        raise RewardFailure(_failure_message(call, scores, summary)) from scores.error
    if not before:
        given = (f"{name} {values[first]!r:.200}" for name, values in call.rows.items())
        log.warning(
            "%s and are left out (%s); the first is %s, which got %s",
            *(summary, _list_counts(counts), _row(call, first), ", ".join(given)),
            exc_info=scores.error,
        )
    elif counts.total().bit_length() > before.bit_length():  # each time that the total doubles
        log.warning("%s; so far %d (%s)", summary, counts.total(), _list_counts(counts))


def _failure_message(call: Call, scores: Scores, summary: str) -> str:
    """One line: the reasons, the first row, the first cause, and what to do."""
    reasons, first = (
        _list_counts(Counter(scores.failures.values())),
        _row(call, min(scores.failures)),
    )
    cause = "" if scores.error is None else f"; the first cause: {cause_of(scores.error)}"
    return (
        f"{summary} ({reasons}), first {first}{cause}.{_suggest_format(call, scores)} Fix the"
        " function, or raise model.reward_runner.max_failed_frac; --debug shows its traceback."
    )


# What functions for lists of messages raise for texts, and the other way round.
NOT_TEXTS = re.compile(
    "string (?:indices|index) must be|'str' object has no attribute '(?:get|items|keys)'"
)
NOT_MESSAGES = re.compile(
    "'(?:list|dict)' object has no attribute|got '(?:list|dict)'|not \"?(?:list|dict)"
)


def _suggest_format(call: Call, scores: Scores) -> str:
    """Name `reward_format` if a function expects completions in the other format."""
    completions = call.rows.get("completions") or call.rows.get("prompts")
    if not completions or scores.error is None:
        return ""
    is_text, cause = isinstance(completions[0], str), cause_of(scores.error)
    if is_text and NOT_TEXTS.search(cause):
        return (
            " It reads texts as messages: set model.reward_format to chat for functions with TRL's"
            " conversational format."
        )
    if not is_text and NOT_MESSAGES.search(cause):
        return " It reads messages as texts: set model.reward_format to text."
    return ""


def _list_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in counts.items())


def _row(call: Call, row: int) -> str:
    """Name a row, with its prompt and completion if they are known."""
    return f"row {row} ({call.places[row]})" if call.places else f"row {row}"


class StartedCalls(ABC):
    """The calls of one iteration, whose worker processes are running; `wait` for the scores.

    Args:
        runner: runner that started them.
        calls: one call per reward function.
    """

    def __init__(self, runner: RewardRunner, calls: Sequence[Call]) -> None:
        self.runner = runner
        self.calls = list(calls)
        self.cancelled = False
        self._scores: list[Scores] | None = None
        self._coroutines = {
            n: asyncio.run_coroutine_threadsafe(
                score_coroutine(call, self._limit_s(call)),
                # A function that blocks its loop must not stop a judge.
                event_loop("judges" if self._limit_s(call) is None else LOOP),
            )
            for n, call in enumerate(self.calls)
            if call.is_coroutine and self.is_here(n)
        }

    def wait(self) -> list[Scores]:
        """Call the functions that run in this process, then wait for the worker processes.

        Returns:
            The scores of each call. Failures have been counted and logged.

        Raises:
            ValueError: a function that never worked before returned no list of N rewards, neither
                for all rows together nor for any row alone: a mistake in its code; or it raised
                `UnusableReward`.
            RewardFailure: more than `max_failed_frac` of a function's rows failed.
            RuntimeError: the runner was closed, or has started other calls.
        """
        if self.cancelled:
            raise RuntimeError(
                "these reward calls were cancelled: the runner was closed or started other calls"
                " before wait()"
            )
        if self._scores is None:
            scores = self.collect()
            self.runner.started = None
            self.runner.count_failures(self.calls, scores)
            self._scores = scores
        return self._scores

    @abstractmethod
    def is_here(self, number: int) -> bool:
        """Return True if a call runs in this process, by its number."""

    @abstractmethod
    def collect(self) -> list[Scores]:
        """Return the scores of each call; raises nothing that a reward function raised."""

    def cancel(self) -> None:
        """Cancel the calls, whose scores are not needed."""
        self.cancelled = True
        for coroutine in self._coroutines.values():
            coroutine.cancel()

    def score_here(self) -> dict[int, Scores]:
        """Return {number: scores} of the calls that run in this process.

        Functions run in the caller's thread, where reward models do not compete with the training
        step; coroutines have begun before, in a thread of their own.
        """
        functions = {n: call for n, call in enumerate(self.calls) if self.is_here(n)}
        scores = {
            n: _score(self.runner, call)
            for n, call in functions.items()
            if n not in self._coroutines
        }
        return scores | {n: self._await(n) for n in self._coroutines}

    def _limit_s(self, call: Call) -> float | None:
        """Seconds that a coroutine has for all rows; a judge limits its requests itself."""
        is_judge = is_marked(call.function, "in_process")
        return None if is_judge else self.runner.timeout_s / 2

    def _await(self, number: int) -> Scores:
        """Return the scores of a coroutine; one that blocks its thread loses it."""
        call = self.calls[number]
        limit_s = self._limit_s(call)
        try:
            return self._coroutines[number].result(limit_s and 2 * limit_s + GRACE_S)
        except TimeoutError as error:
            drop_event_loop(LOOP)
            return make_failed_scores(call.num_rows, error)


class RewardRunner(ABC):
    """Runs reward functions, counts failures, and stops the run if too many rows fail.

    Args:
        timeout_s: seconds that one function may take per iteration: half of them for all rows
            together; where that fails, the other half for the rows one by one.
        max_failed_frac: share of one function's rows in one iteration that may fail; more stops the
            run.
        slow_warning_s: log a warning for the first call of a function that takes longer.
    """

    @check_argument_types()
    def __init__(
        self, timeout_s: float = 60.0, max_failed_frac: float = 0.5, slow_warning_s: float = 1.0
    ) -> None:
        above("model.reward_runner.timeout_s", timeout_s, 0)
        above("model.reward_runner.slow_warning_s", slow_warning_s, 0)
        at_least("model.reward_runner.max_failed_frac", max_failed_frac, 0)
        at_most("model.reward_runner.max_failed_frac", max_failed_frac, 1)
        self.timeout_s = timeout_s
        self.max_failed_frac = max_failed_frac
        self.slow_warning_s = slow_warning_s
        self.failures: dict[str, Counter[str]] = {}
        self.proven: set[str] = set()  # functions that have scored a row
        self.warned: set[str] = set()
        self.started: StartedCalls | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copy the settings and the counts.

        Started calls hold pipes to this runner's workers, which another process cannot use.
        """
        return self.__dict__ | {"started": None}

    def start(self, calls: Sequence[Call]) -> StartedCalls:
        """Start the calls of one iteration; worker processes run while the caller continues.

        Calls that were started before and not waited for are cancelled.

        Args:
            calls: one call per reward function.
        """
        self.cancel()
        self.started = self.dispatch(calls)
        return self.started

    @abstractmethod
    def dispatch(self, calls: Sequence[Call]) -> StartedCalls:
        """Give the calls to worker processes; raises nothing that a reward function raised."""

    def cancel(self) -> None:
        """Cancel started calls that were not waited for."""
        if self.started is not None:
            self.started.cancel()
        self.started = None

    def close(self) -> None:
        """Cancel started calls and release resources, which come back when needed."""
        self.cancel()

    def warn_once(self, name: str, message: str, *values: object) -> None:
        """Warn, but only the first time for this reward and message."""
        if name + message not in self.warned:
            self.warned.add(name + message)
            log.warning(message, *values)

    def warn_if_slow(self, call: Call, seconds: float, rows: Sequence[int]) -> None:
        """Warn of the first call of a function that took long, for `rows` of its rows."""
        if seconds > self.slow_warning_s:
            texts = call.rows.get("completions") or [""] * call.num_rows  # not all read them
            self.warn_once(
                *(call.name, "reward '%s' took %.1f s for %d rows, the first of them %.200r"),
                *(call.name, seconds, len(rows), texts[rows[0]]),
            )

    def count_failures(self, calls: Sequence[Call], results: Sequence[Scores]) -> None:
        """Count and log the failures of an iteration.

        Raises:
            ValueError: see `StartedCalls.wait`.
            RewardFailure: see `StartedCalls.wait`.
        """
        for call, scores in zip(calls, results, strict=True):
            worked = len(scores.failures) < call.num_rows
            if isinstance(scores.error, UnusableReward):
                raise ValueError(f"reward '{call.name}': {scores.error}")
            if worked:
                self.proven.add(call.name)
            elif isinstance(scores.error, MalformedResult) and call.name not in self.proven:
                raise ValueError(f"reward '{call.name}' {scores.error}")
            if scores.failures:
                counts = self.failures.setdefault(call.name, Counter())
                record_failures(counts, call, scores, self.max_failed_frac)
            elif scores.error is not None:
                self.warn_once(
                    call.name,
                    "reward '%s' failed for %d rows together and was called row by row: %s",
                    *(call.name, call.num_rows, scores.error),
                )


class InProcessRunner(RewardRunner):
    """Runs the functions in the training process, one after the other; coroutines concurrently.

    A call that raises is repeated row by row until the deadline, so that only the bad rows are
    lost. A function that hangs cannot be interrupted, and one that crashes ends the run.

    Example:
        >>> from litgrpo.rewards import InProcessRunner, Scorer
        >>> def is_two(completions):
        ...     return [float(text == "2") for text in completions]
        >>> scorer = Scorer([is_two], runner=InProcessRunner())
        >>> scorer(["1+1?"] * 2, ["2", "3"], {}, group_size=2).total.tolist()
        [[1.0, 0.0]]
    """

    def dispatch(self, calls: Sequence[Call]) -> StartedCalls:
        """Leave everything to `wait`."""
        return CallsInProcess(self, calls)


class CallsInProcess(StartedCalls):
    """Calls that run in this process."""

    def is_here(self, number: int) -> bool:
        """Return True."""
        return True

    def collect(self) -> list[Scores]:
        """Call each function."""
        scores = self.score_here()
        return [scores[n] for n in range(len(self.calls))]


def _score(runner: RewardRunner, call: Call) -> Scores:
    """Call the function for all rows; if that fails, for each row until the deadline."""
    deadline = time.monotonic() + runner.timeout_s
    whole = _call_rows(runner, call, range(call.num_rows))
    final = whole.error is None or isinstance(whole.error, UnusableReward)
    if final or is_marked(call.function, "whole_batch"):
        return whole
    scores = Scores([nan] * call.num_rows, error=whole.error)
    for row in range(call.num_rows):
        late = time.monotonic() > deadline
        only = range(row, row + 1)
        scores.put(
            [row], make_failed_scores(1, TimeoutError()) if late else _call_rows(runner, call, only)
        )
    return scores


def _call_rows(runner: RewardRunner, call: Call, rows: range) -> Scores:
    """Call the function for some rows."""
    started = time.monotonic()
    given = call.arguments(slice(rows.start, rows.stop))
    scores = call_function(call.function, given, len(rows), call.notes)
    runner.warn_if_slow(call, time.monotonic() - started, rows)
    return scores
