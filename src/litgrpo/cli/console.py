"""Terminal output: hide routine messages of libraries, survive a closed pipe or terminal."""

from __future__ import annotations

import errno
import functools
import io
import logging
import os
import sys
import warnings
from typing import Any, TextIO

from litgrpo.text.secrets import mask_text
from litgrpo.text.visible import visible

# Lines that Lightning prints in every run and that ask nothing of the user.
ROUTINE_LINES: tuple[str, ...] = ("Tip:", "GPU available:", "TPU available:", "HPU available:")
ROUTINE_LINES += ("Seed set to", "Restoring states from", "Restored all states")
ROUTINE_LINES += (
    "was configured so 1 batch",
    "callbacks returned in `LightningModule.configure_call",
)
READER_GONE = (errno.EPIPE, errno.EIO)  # of a pipe; of a terminal that was closed
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of the file that the output goes to


def one_line(message: str) -> str:
    r"""Return a message as one line without keys, in which every character is visible.

    Example:
        >>> one_line("400: a\nerror: \x1b[2J")
        '400: a error: [U+001B][2J'
    """
    return " ".join(visible(mask_text(message)).split("\n"))


@functools.cache
def show_visible_warnings() -> None:
    """Print warnings so that texts of servers and models in them do not act on the terminal."""
    plain = warnings.formatwarning

    def format_visibly(*args: Any, **kwargs: Any) -> str:
        return visible(mask_text(plain(*args, **kwargs)))

    warnings.formatwarning = format_visibly


def keep_quiet() -> None:
    """Hide what Lightning logs in every run, and warnings that need no action."""
    show_visible_warnings()
    for name in ("pytorch", "fabric"):
        for module in ("rank_zero", "seed"):
            logging.getLogger(f"lightning.{name}.utilities.{module}").addFilter(is_informative)
    # Imports Lightning, which --help and completion of options do not need.
    from litgrpo.lightning_compat import ignore_harmless_warnings

    ignore_harmless_warnings()
    warnings.formatwarning = format_warning


def format_warning(message: Warning | str, *_: Any, **__: Any) -> str:
    r"""Return a warning as one line, without the file that issued it.

    Example:
        >>> format_warning(UserWarning("all rewards are 0"), UserWarning, "a.py", 5)
        'warning: all rewards are 0\n'
    """
    return f"warning: {one_line(str(message))}\n"


def is_informative(record: logging.LogRecord) -> bool:
    """Return False for a line of Lightning's log that every run prints."""
    return not any(words in record.getMessage() for words in ROUTINE_LINES)


class PersistentFile(io.FileIO):
    """Output file that writes to the null device once its reader is gone, as after `| head -1`.

    What does not fit on a full disk is dropped.
    """

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in DISK_FULL:
                return len(data)
            if error.errno not in READER_GONE:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return super().write(data)


def survive_closed_output() -> None:
    """Let a run continue when the pipe or the terminal of its output is closed."""
    # Streams that a test or a notebook has put in place are left alone.
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = persistent(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = persistent(sys.stderr)


def persistent(stream: TextIO) -> io.TextIOWrapper:
    """Return a stream to the same file that outlives its reader.

    Characters that its encoding lacks are escaped instead of ending the program.
    """
    stream.flush()
    file: Any = PersistentFile(stream.fileno(), "w", closefd=False)
    # As Python does it: no buffer under PYTHONUNBUFFERED, where the stream writes through.
    write_through = bool(getattr(stream, "write_through", False))
    return io.TextIOWrapper(
        file if write_through else io.BufferedWriter(file),
        write_through=write_through,
        encoding=stream.encoding,
        # A character that a terminal in ASCII or Latin-1 lacks must not end a training.
        errors="backslashreplace",
        line_buffering=getattr(stream, "line_buffering", False),
    )
