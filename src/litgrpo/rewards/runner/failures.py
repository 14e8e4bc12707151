"""How the failure of a reward function is named; also used inside worker processes."""

from __future__ import annotations

import traceback
from pathlib import Path

MAX_CAUSE = 300  # characters of an exception's own text in a one-line message
HERE = str(Path(__file__).parent)


class MalformedResult(ValueError):
    """A function returned something that is not one reward per completion."""


class WorkerError(Exception):
    """What happened to a reward function in a worker: the cause in a line, and the whole story."""

    def __init__(self, cause: str, story: str = "") -> None:
        super().__init__(cause, story)
        self.cause = cause

    def __str__(self) -> str:
        """Both."""
        return ". ".join(filter(None, self.args))


def reason_of(error: BaseException) -> str:
    """The name under which a failure is counted."""
    return "wrong length" if isinstance(error, MalformedResult) else type(error).__name__


def as_exception(error: BaseException) -> Exception:
    """What can be raised again without ending the program."""
    return error if isinstance(error, Exception) else WorkerError(cause_of(error))


def cause_of(error: BaseException) -> str:
    """What went wrong in one line, and where in the function's own file."""
    if isinstance(error, WorkerError):
        return error.cause
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not frame.filename.startswith(HERE)]
    place = [f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in foreign[-1:]]
    return "".join([text[:MAX_CAUSE], *place])
