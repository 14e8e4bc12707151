"""A limit on time that counts what comes after the last iteration."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_info


class TimeBudget(Callback):
    """Stops the training early enough for the last validation and the last save.

    (Lightning's Timer stops when the time is over, and counts the time of earlier processes too,
    so that a run resumed by a scheduler would stop at once.)

    Args:
        max_time: of this process, from its start of training: `DD:HH:MM:SS`, or as in timedelta.
    """

    def __init__(self, max_time: str | timedelta | dict[str, int]) -> None:
        # Lightning's Timer reads the duration.
        self.limit_s = float(Timer(max_time).time_remaining() or 0.0)
        self.started = self.mark = time.monotonic()
        self.iteration_s = self.validation_s = self.save_s = 0.0

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Start the clock."""
        self.started = time.monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """A validation begins, the one before training included."""
        self.mark = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """How long the last one will take."""
        self.validation_s = time.monotonic() - self.mark

    def on_train_batch_start(self, *_: Any) -> None:
        """An iteration begins."""
        self.mark = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Stop if another iteration would leave too little for the end."""
        now = time.monotonic()
        self.iteration_s = max(0.9 * self.iteration_s, now - self.mark)
        numbers = trainer.callback_metrics
        saving = [float(numbers.get(f"checkpoint/{name}", 0.0)) for name in ("wait_s", "write_s")]
        self.save_s = max(self.save_s, sum(saving))
        needs_s = self.iteration_s + self.validation_s + self.save_s
        over = trainer.strategy.broadcast(now - self.started + needs_s > self.limit_s)
        if over and not trainer.should_stop:
            trainer.should_stop = True
            rank_zero_info(
                f"Time: {now - self.started:.0f} s of {self.limit_s:.0f} s are over; the last "
                f"validation ({self.validation_s:.0f} s) and save need the rest."
            )
