"""Standard output and error that outlive whoever read them."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

READER_GONE = (errno.EPIPE, errno.EIO)  # of a pipe; of a terminal that was closed


class LastingFile(io.FileIO):
    """Goes on to nowhere when its reader is gone, as of `| head -1`."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        """Write, here or to nowhere."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in READER_GONE:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return super().write(data)


def outlive_readers() -> None:
    """Let the process's own output streams end in no error; those of others are left alone."""
    for name in ("stdout", "stderr"):
        stream = vars(sys)[name]
        if stream is None or stream is not vars(sys)[f"__{name}__"]:
            continue
        stream.flush()
        lasting = io.TextIOWrapper(
            io.BufferedWriter(LastingFile(stream.fileno(), "w", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
        )
        setattr(sys, name, lasting)
