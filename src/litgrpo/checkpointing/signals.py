"""What SIGTERM, SIGINT, SIGHUP and SIGUSR1 do: an iteration is dropped or finished, not half done.

SIGUSR1 is what SLURM sends before a job's time is up (`--signal=USR1@90`).
"""

from __future__ import annotations

import os
import signal
import stat
import threading
from contextlib import suppress
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# They come twice: of a terminal that closes from the shell and the kernel, of SLURM from srun too.
TWICE = (signal.SIGHUP, signal.SIGUSR1)
EXIT = 128  # a process that a signal ended has 128 + its number as exit code, as in a shell


class Stopped(SystemExit):
    """The process was asked to stop; everything is saved on the way out.

    It is no `Exception`, so that no reward function or logger can take it for an error of its own.
    """


class StopRequest:
    """Remembers that the process was asked to stop, and acts when nothing is half done.

    Where an iteration may be dropped (`droppable`: before its first optimizer step, and in a
    validation) one process stops in the middle of whatever it does; several first agree, at the
    next `check`.
    """

    def __init__(self) -> None:
        """Not asked."""
        self.signum = 0
        self.droppable = False
        self.alone = True
        self.before: dict[int, Any] = {}  # what signals did that Lightning does not know

    def listen(self, trainer: Any) -> None:
        """Take the signals over; a SIGHUP that is ignored, as under `nohup`, stays so.

        Lightning, which took SIGTERM and SIGINT before, puts the old handlers back.
        """
        self.alone = trainer.world_size == 1
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in SIGNALS:
            before = signal.getsignal(signum)
            if (signum, before) == (signal.SIGHUP, signal.SIG_IGN) or before == self._received:
                continue
            self.before[signum] = before
            signal.signal(signum, self._received)

    def let_go(self) -> None:
        """Give back SIGHUP and SIGUSR1, which Lightning does not know."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in TWICE:
            if signal.getsignal(signum) == self._received:
                signal.signal(signum, self.before.get(signum, signal.SIG_DFL))

    def _received(self, signum: int, _: Any) -> None:
        if self.signum and signum in TWICE:
            return
        if self.signum:
            os._exit(EXIT + signum)
        self.signum = signum
        if signum == signal.SIGHUP:
            leave_terminal()
        name = signal.Signals(signum).name
        at_once = "SIGTERM" if signum in TWICE else "once more"
        with suppress(OSError):  # nobody reads any more
            os.write(2, f"{name}: saving and stopping; {at_once} ends at once\n".encode())
        if self.droppable and self.alone:
            raise Stopped(EXIT + signum)

    def check(self, trainer: Any) -> None:
        """Stop here if this process, or any other, was asked to."""
        asked = bool(self.signum)
        if not self.alone:
            asked = trainer.strategy.reduce_boolean_decision(asked, all=False)
        if asked:
            raise Stopped(EXIT + (self.signum or signal.SIGTERM))


def leave_terminal() -> None:
    """Write to nowhere what would go to a terminal that has been closed: that would fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        if stat.S_ISCHR(os.fstat(output).st_mode):
            os.dup2(nowhere, output)
    os.close(nowhere)
