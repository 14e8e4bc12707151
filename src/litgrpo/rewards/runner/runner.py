"""Base class of reward runners: start calls, wait for their scores, count what failed.

Reward functions are user code. A faulty one may lose its own rows, but must never stop the run.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

from litgrpo.arguments import above, at_least, at_most
from litgrpo.rewards.runner.calls import Call, MalformedResult, Scores
from litgrpo.rewards.runner.troubles import count

log = logging.getLogger(__name__)


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

    def wait(self) -> list[Scores]:
        """Call the functions that run in this process, then wait for the worker processes.

        Returns:
            The scores of each call. Failures have been counted and logged.

        Raises:
            ValueError: a function that never worked before returned no list of N rewards, neither
                for all rows together nor for any row alone: a mistake in its code.
            RewardFailure: more than `max_failed_frac` of a function's rows failed.
            RuntimeError: the runner was closed, or has started other calls.
        """
        if self.cancelled:
            raise RuntimeError(
                "these reward calls were cancelled: the runner was closed or started other calls"
                " before wait()"
            )
        if self._scores is None:
            # Reward models compute on the training device. They run here, in the caller's thread:
            # in a thread of their own they would run beside the training step.
            scores = self.collect()
            self.runner.started = None
            self.runner.count_failures(self.calls, scores)
            self._scores = scores
        return self._scores

    @abstractmethod
    def collect(self) -> list[Scores]:
        """Return the scores of each call; raises nothing that a reward function raised."""


class RewardRunner(ABC):
    """Runs reward functions, counts what fails, stops the run when too much does.

    Args:
        timeout_s: seconds that one function may take per iteration: half of them for all rows
            together; where that fails, the other half for the rows one by one.
        max_failed_frac: share of one function's rows in one iteration that may fail; more stops the
            run.
        slow_s: the first call of a function that takes longer is warned of.
    """

    def __init__(
        self, timeout_s: float = 60.0, max_failed_frac: float = 0.5, slow_s: float = 1.0
    ) -> None:
        above("reward_runner.timeout_s", timeout_s, 0)
        above("reward_runner.slow_s", slow_s, 0)
        at_least("reward_runner.max_failed_frac", max_failed_frac, 0)
        at_most("reward_runner.max_failed_frac", max_failed_frac, 1)
        self.timeout_s = timeout_s
        self.max_failed_frac = max_failed_frac
        self.slow_s = slow_s
        self.failures: dict[str, Counter[str]] = {}
        self.proven: set[str] = set()  # functions that have scored a row
        self.told: set[str] = set()
        self.started: StartedCalls | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copy everything but started calls, which belong to this runner."""
        return vars(self) | {"started": None}

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
            self.started.cancelled = True
        self.started = None

    def close(self) -> None:
        """Cancel started calls and release resources, which come back when needed."""
        self.cancel()

    def tell_once(self, name: str, message: str, *values: object) -> None:
        """Warn, but only the first time for this reward and message."""
        if name + message not in self.told:
            self.told.add(name + message)
            log.warning(message, *values)

    def note_time(self, call: Call, seconds: float, rows: Sequence[int]) -> None:
        """Warn of the first call of a function that took long, for `rows` of its rows."""
        if seconds > self.slow_s:
            texts = call.rows.get("completions") or [""] * call.num_rows  # not all read them
            self.tell_once(
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
            if worked:
                self.proven.add(call.name)
            elif isinstance(scores.error, MalformedResult) and call.name not in self.proven:
                raise ValueError(f"reward '{call.name}' {scores.error}")
            if scores.failures:
                counts = self.failures.setdefault(call.name, Counter())
                count(counts, call, scores, self.max_failed_frac)
            elif scores.error is not None:
                self.tell_once(
                    call.name,
                    "reward '%s' failed for %d rows together and was called row by row: %s",
                    *(call.name, call.num_rows, scores.error),
                )
