"""What every reward runner shares: a Future of the scores, counting failures, stopping the run.

Reward functions are other people's code. A bad one may cost its own samples, never the run.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from litgrpo.arguments import above, at_least, at_most
from litgrpo.rewards.runner.calls import Call, MalformedResult, Scores
from litgrpo.rewards.runner.troubles import count

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Finish = Callable[[], list[Scores]]


class LazyFuture(Future[Result]):
    """A future that whoever asks for the result finishes, in that thread.

    Reward models compute on the training device. In a thread of their own they would run beside the
    training step, so no thread is used: workers are waited for, and the rest is run, in `result()`.

    Args:
        finish: waits for the result.
    """

    def __init__(self, finish: Callable[[], Result]) -> None:
        super().__init__()
        self._finish = finish

    def result(self, timeout: float | None = None) -> Result:
        """The result; the time-outs of the reward functions end the wait, not `timeout`."""
        self._run()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` would raise."""
        self._run()
        return super().exception(timeout)

    def _run(self) -> None:
        if self.done():
            return
        try:
            self.set_result(self._finish())
        except BaseException as error:  # Ctrl-C, too, is for whoever asked
            self.set_exception(error)


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
        self.pending: Future[list[Scores]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has nothing pending: a future cannot be copied."""
        return vars(self) | {"pending": None}

    @abstractmethod
    def begin(self, calls: Sequence[Call]) -> Finish:
        """Begin with the calls, and return what waits for their scores.

        Neither raises for anything that a reward function does.
        """

    def submit(self, calls: Sequence[Call]) -> Future[list[Scores]]:
        """Begin with the calls of one iteration; workers run while the caller does other things.

        Functions that run in this process do so before this returns or in `result()`, never at the
        same time as other code of the caller. What is still pending is given up.

        Args:
            calls: the calls, one for each reward function.

        Returns:
            The scores of each call, after counting and showing failures. Its `result()` raises
            ValueError where a function that never worked before returned no list of N rewards,
            neither for all rows nor for any alone (a mistake in its code), and RewardFailure where
            more than `max_failed_frac` of a function's rows failed.
        """
        self.give_up()
        finish = self.begin(calls)
        self.pending = LazyFuture(lambda: self._checked(calls, finish))
        return self.pending

    def give_up(self) -> None:
        """Cancel what was submitted and never waited for."""
        if self.pending is not None:
            self.pending.cancel()
        self.pending = None

    def close(self) -> None:
        """Give up what is pending and release what is held; it comes back when needed."""
        self.give_up()

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

    def _checked(self, calls: Sequence[Call], finish: Finish) -> list[Scores]:
        """The scores, after counting and showing failures."""
        results = finish()
        self.pending = None
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
        return results
