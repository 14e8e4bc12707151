"""What SIGTERM and SIGINT do: an iteration is dropped or finished, never half done."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
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

    def listen(self, trainer: Any) -> None:
        """Take the signals over; Lightning, which took them before, puts the old handlers back."""
        self.alone = trainer.world_size == 1
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                signal.signal(signum, self._received)

    def _received(self, signum: int, _: Any) -> None:
        if self.signum:
            os._exit(EXIT + signum)
        self.signum = signum
        name = signal.Signals(signum).name
        os.write(2, f"{name}: saving and stopping; once more ends at once\n".encode())
        if self.droppable and self.alone:
            raise Stopped(EXIT + signum)

    def check(self, trainer: Any) -> None:
        """Stop here if this process, or any other, was asked to."""
        asked = bool(self.signum)
        if not self.alone:
            asked = trainer.strategy.reduce_boolean_decision(asked, all=False)
        if asked:
            raise Stopped(EXIT + (self.signum or signal.SIGTERM))
