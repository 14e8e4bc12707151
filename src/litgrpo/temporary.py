"""Temporary folders that are removed even if the process that made them is killed."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

# Only this module gives such names, so folders that match may be removed.
PREFIX = "litgrpo-temporary-"
NAME = re.compile(rf"{PREFIX}[a-z]+-\w{{8}}")


class TemporaryFolder:
    """Temporary folder, removed with this object or when the process exits.

    A process that is killed cannot remove anything. Its folders are removed by the next process
    that makes one. The kernel releases the lock on a folder when its process ends, however it
    ended.
    """

    def __init__(self, purpose: str) -> None:
        remove_leftovers()
        self.path, lock = _make(purpose)
        self.remove = weakref.finalize(self, _remove, self.path, lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.remove()


def remove_leftovers() -> None:
    """Remove the folders of this user's processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if NAME.fullmatch(path.name) is None:
            continue
        with suppress(OSError):  # in use, removed in the meantime, or of another user
            if path.stat(follow_symlinks=False).st_uid == os.geteuid():
                lock = _lock(path)
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _make(purpose: str) -> tuple[Path, int | None]:
    """Return a new folder and its lock; None in a file system or system without locks."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
        try:
            lock = _lock(path)
        except OSError:
            lock = None
        # Another process may have removed it before it was locked.
        if path.is_dir():
            return path, lock
        if lock is not None:
            os.close(lock)


def _lock(path: Path) -> int:
    """Lock a folder and return it opened, which holds the lock; an OSError if another process does.

    Systems without such locks raise an OSError, too.
    """
    if sys.platform == "win32":
        raise OSError("a folder cannot be opened")
    import fcntl

    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(folder)
        raise
    return folder


def _remove(path: Path, lock: int | None) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)
