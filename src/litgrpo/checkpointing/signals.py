"""Signals that stop a run: an iteration is dropped or finished, never left half done.

SIGTERM, SIGINT, SIGHUP, and SIGUSR1, which SLURM sends before a job's time is up
(`--signal=USR1@90`).
"""

from __future__ import annotations

import os
import signal
import stat
import threading
from contextlib import suppress
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# These arrive twice: from the shell and the kernel when a terminal closes, from SLURM and srun.
SENT_TWICE = (signal.SIGHUP, signal.SIGUSR1)
EXIT = 128  # a shell reports 128 + the signal's number for a process that a signal terminated


class Stopped(SystemExit):
    """A signal asked the process to stop; everything is saved on the way out.

    It is not an `Exception`, so that no reward function or logger can catch it as its own error.
    """


class StopRequest:
    """Remembers that a signal arrived, and stops the run when nothing is half done.

    While an iteration can be dropped (`droppable`: before its first optimizer step, and in a
    validation) a single process stops at once. Several ranks first agree, at the next `check`.
    """

    def __init__(self) -> None:
        self.signum = 0
        self.droppable = False
        self.is_single_process = True
        self.previous: dict[int, Any] = {}  # handlers that were installed before

    def install(self, trainer: Any) -> None:
        """Install the handlers; a SIGHUP that is ignored, as under `nohup`, stays ignored.

        Lightning, which handled SIGTERM and SIGINT before, restores the old handlers itself.
        """
        self.is_single_process = trainer.world_size == 1
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in SIGNALS:
            previous = signal.getsignal(signum)
            is_ignored_hangup = signum == signal.SIGHUP and previous == signal.SIG_IGN
            if is_ignored_hangup or previous == self._receive:
                continue
            self.previous[signum] = previous
            signal.signal(signum, self._receive)

    def restore(self) -> None:
        """Restore the handlers of SIGHUP and SIGUSR1, which Lightning does not know."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in SENT_TWICE:
            if signal.getsignal(signum) == self._receive:
                signal.signal(signum, self.previous.get(signum, signal.SIG_DFL))

    def _receive(self, signum: int, _: Any) -> None:
        if self.signum and signum in SENT_TWICE:
            return
        if self.signum:
            os._exit(EXIT + signum)
        self.signum = signum
        if signum == signal.SIGHUP:
            detach_from_terminal()
        name = signal.Signals(signum).name
        again = "SIGTERM" if signum in SENT_TWICE else "once more"
        with suppress(OSError):  # the reader of stderr may be gone
            start = "\n" if os.isatty(2) else ""  # below the progress bar
            os.write(2, f"{start}{name}: saving and stopping; {again} exits at once\n".encode())
        if self.droppable and self.is_single_process:
            raise Stopped(EXIT + signum)

    def check(self, trainer: Any) -> None:
        """Raise `Stopped` if this rank, or any other, received a signal."""
        is_asked = bool(self.signum)
        if not self.is_single_process:
            is_asked = trainer.strategy.reduce_boolean_decision(is_asked, all=False)
        if is_asked:
            raise Stopped(EXIT + (self.signum or signal.SIGTERM))


def detach_from_terminal() -> None:
    """Redirect output to /dev/null if it goes to a closed terminal, where writing would fail."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        if stat.S_ISCHR(os.fstat(output).st_mode):
            os.dup2(devnull, output)
    os.close(devnull)
