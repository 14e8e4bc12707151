"""Files of a run: written completely or not at all."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from litgrpo.distributed.messages import warn_once_on_failure


def write_text(path: Path, text: str) -> None:
    """Write a file; it gets its name once it is complete.

    A full disk leaves an earlier file of this name as it was, and nothing beside it.

    Args:
        path: its folder is created if it is missing.
        text: content. Escaped bytes of a file name are written as these bytes.

    Raises:
        OSError: the disk is full, for example.
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
    """Write a file that the training does not need; a failure is warned about once per name.

    Args:
        path: the file.
        text: its content.
        name: kind of the file, for the warning.

    Returns:
        True if the file was written.
    """
    with warn_once_on_failure(f"writing {name} to {path.parent}"):
        write_text(path, text)
        return True
    return False
