"""Files of a run: written completely or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from litgrpo.arguments import require
from litgrpo.distributed.messages import warn_once_on_failure

MAX_MIB = 512  # no file of a run that is read as a whole is as large


def read_text(path: Path) -> str:
    """Return the text of a file, or "" if there is none, or a pipe or device in its place.

    One larger than 512 MiB, such as a file with holes, is a ValueError.
    """
    if not path.is_file():
        return ""
    # It may have been replaced by a pipe, and some files of /proc wait for content.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        require(
            size <= MAX_MIB * 2**20,
            f"{path} has {size / 2**20:.0f} MiB, expected at most {MAX_MIB}: move it elsewhere.",
        )
        return file.read(size).decode("utf-8", errors="replace").replace("\r\n", "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file; it gets its name once it is complete.

    Its folder is created if it is missing. A full disk leaves an earlier file of this name as it
    was, and nothing beside it. Escaped bytes of a file name are written as these bytes.
    """
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.unlink(missing_ok=True)  # it may be a link, through which nothing is written
        with unfinished.open("x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def write_if_possible(path: Path, text: str, name: str) -> bool:
    """Write a file that the training does not need, or warn once per name, which is its kind.

    Return True if it was written.
    """
    with warn_once_on_failure(f"writing {name} to {path.parent}"):
        write_text(path, text)
        return True
    return False
