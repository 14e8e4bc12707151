"""Causes of failures in user code and their counts; also used inside worker processes."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

MAX_CAUSE = 300  # characters of an exception's own text in a one-line message
MAX_TRACEBACK = 20_000  # characters
TIMEOUT = "TimeoutError"
# Stack frames of these files are skipped: a cause names the line of the user's code.
INTERNAL = tuple(
    str(Path(__file__).parents[1] / path)
    for path in (
        "workers",
        "rewards/calls",
        "rewards/runner",
        "environments/episode",
        "environments/agent",
    )
)


class WorkerError(Exception):
    """Failure of user code: the cause in one line, and the traceback or stack."""

    def __init__(self, cause: str, story: str = "") -> None:
        super().__init__(cause, story)
        self.cause = cause

    def __str__(self) -> str:
        """Return the cause and the details."""
        return ". ".join(filter(None, self.args))


def cause_of(error: BaseException) -> str:
    """Return the error in one line, with the file and line of the user's code."""
    if isinstance(error, WorkerError):
        return error.cause
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not frame.filename.startswith(INTERNAL)]
    location = [f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in foreign[-1:]]
    return "".join([text[:MAX_CAUSE], *location])


def to_picklable(error: BaseException) -> WorkerError:
    """Return an error that can be sent to another process.

    The exception itself may not be picklable, or its class not importable there; its text is.
    """
    if isinstance(error, WorkerError):
        return error
    story = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    return WorkerError(cause_of(error), story)


class FailureCounter(Counter[str]):
    """Numbers of failures by reason, to be logged at the first one and each time they doubled.

    Example:
        >>> failures = FailureCounter()
        >>> [failures.add([reason]) for reason in ("late", "late", "KeyError", "late")]
        [True, True, False, True]
        >>> print(failures)
        late: 3, KeyError: 1
    """

    def add(self, reasons: Iterable[str]) -> bool:
        """Count failures; return True if they are the first, or their number has doubled."""
        before = self.total()
        self.update(reasons)
        return self.total().bit_length() > before.bit_length()

    def __str__(self) -> str:
        """Return the most frequent reasons with their numbers."""
        return ", ".join(f"{reason}: {count}" for reason, count in self.most_common(5))
