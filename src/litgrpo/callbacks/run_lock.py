"""One training at a time in a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"


@contextmanager
def held(folder: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Keep every other training out of a run folder.

    The kernel holds the lock and lets it go with the process, however that ends; forks do not
    inherit it. The file is taken away at the end, and so is a folder in which nothing was written.

    Args:
        folder: the run folder; made if it is missing.
        patience_s: how long to wait for another process to let go, in seconds.

    Raises:
        ValueError: another training holds it, or nothing can be written there.
    """
    made = not folder.exists()
    lock = FileLock(folder / LOCK, timeout=patience_s)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"another training is running in {folder}: wait for its end, or choose another folder "
            "with --run_dir ({seed} in its name stands for the seed)."
        ) from error
    except OSError as error:
        raise ValueError(
            f"run_dir is {folder}, where nothing can be written ({error.strerror}): choose a "
            "folder of yours with --run_dir."
        ) from error
    try:
        yield
    finally:
        # Before it is released: whoever opened it meanwhile sees that it has lost its name.
        (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        if made:
            with suppress(OSError):  # it is not empty: something was written
                folder.rmdir()
