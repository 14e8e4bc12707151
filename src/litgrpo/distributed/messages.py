"""Messages to the user, once per run: only the first of several processes writes them."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed

from litgrpo.text.secrets import mask_text
from litgrpo.text.visible import visible

# Every launcher sets one of these. SLURM comes last: its variable may be set although another
# launcher started the processes.
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")

log = logging.getLogger("litgrpo")


def rank() -> int:
    """Number of this process; the only process of a run has 0."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(next((os.environ[name] for name in RANKS if name in os.environ), 0))


def rank_zero_info(message: str) -> None:
    """Write a line to the log, which is stderr unless the program has configured logging."""
    if rank() == 0:
        log.info(message)


def rank_zero_warn(message: str) -> None:
    """Issue a warning that names the line of the caller."""
    if rank() == 0:
        warnings.warn(message, stacklevel=2)


class VisibleFormatter(logging.Formatter):
    """Writes records without keys, and so that foreign texts do not act on the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return visible(mask_text(super().format(record)))


_warned: set[str] = set()  # of this run


def forget_warnings() -> None:
    """Let `warn_once_on_failure` warn again, in the next run of this process."""
    _warned.clear()


@contextmanager
def warn_once_on_failure(name: str) -> Iterator[None]:
    """Continue if something that is not the training fails; warn at the first failure of a run.

    Args:
        name: of what may fail, for the warning.
    """
    try:
        yield
    except Exception as error:  # third-party code, a full disk, a lost connection
        if name not in _warned:
            _warned.add(name)
            rank_zero_warn(
                f"{name} failed ({type(error).__name__}: {error}); training continues, and "
                "further failures are not reported"
            )


def _is_unhandled(record: logging.LogRecord) -> bool:
    """Return True if the root logger has no handler, which would write the record again."""
    return not logging.getLogger().handlers


def _show_lines() -> None:
    """Write lines to stderr without a prefix, in programs that have not configured logging."""
    console = logging.StreamHandler()
    console.addFilter(_is_unhandled)
    console.setFormatter(VisibleFormatter())
    log.addHandler(console)
    log.setLevel(logging.INFO)


_show_lines()
