"""How a failure of foreign code is named; also used inside worker processes."""

from __future__ import annotations

import traceback
from pathlib import Path

MAX_CAUSE = 300  # characters of an exception's own text in a one-line message
MAX_TRACEBACK = 20_000  # characters
MAX_PRINTED = 5_000_000  # characters that may be printed while one message is answered
MAX_SHOWN = 20_000  # of which so many are shown
TIMEOUT, FLOOD = "TimeoutError", f"printed more than {MAX_PRINTED // 1_000_000} MB"
# Files whose stack frames are not the user's.
OURS = tuple(
    str(Path(__file__).parents[1] / path)
    for path in ("workers", "rewards/calls", "rewards/runner", "environments/episode")
)


class WorkerError(Exception):
    """What happened to foreign code: the cause in a line, and the whole story."""

    def __init__(self, cause: str, story: str = "") -> None:
        super().__init__(cause, story)
        self.cause = cause

    def __str__(self) -> str:
        """Both."""
        return ". ".join(filter(None, self.args))


def cause_of(error: BaseException) -> str:
    """What went wrong in one line, and where in the foreign file."""
    if isinstance(error, WorkerError):
        return error.cause
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not frame.filename.startswith(OURS)]
    place = [f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in foreign[-1:]]
    return "".join([text[:MAX_CAUSE], *place])


def portable(error: BaseException) -> WorkerError:
    """An exception for the journey to another process: only its text is sure to survive that."""
    if isinstance(error, WorkerError):
        return error
    story = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    return WorkerError(cause_of(error), story)
