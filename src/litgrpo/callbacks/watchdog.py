"""A process that hangs says where, and ends."""

from __future__ import annotations

import faulthandler
from typing import Any

from lightning.pytorch import Callback, Trainer

from litgrpo.arguments import above


class Watchdog(Callback):
    """Ends a training that makes no progress, in every process of it.

    When nothing happens for `timeout_s` (no iteration begins or ends, no optimizer step, no batch
    of a validation), the stacks of all threads go to standard error and the process ends with exit
    code 1. A process that waits for one that hangs makes no progress either, so all of them end.

    Args:
        timeout_s: seconds without progress; null waits for ever. It must be longer than the longest
            rollout.
    """

    def __init__(self, timeout_s: float | None = 3600.0) -> None:
        above("watchdog.timeout_s", timeout_s, 0)
        self.timeout_s = timeout_s

    def _progress(self, *_: Any, **__: Any) -> None:
        """Begin to wait anew."""
        if self.timeout_s is not None:
            # A thread of C code, which runs whatever Python waits for.
            faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=2)

    # What counts as progress.
    on_sanity_check_start = on_train_start = _progress
    on_train_batch_start = on_before_optimizer_step = on_train_batch_end = _progress

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Some held-out prompts are answered."""
        if trainer.state.fn == "fit":
            self._progress()

    def _end(self, *_: Any, **__: Any) -> None:
        """Nothing to watch any more."""
        faulthandler.cancel_dump_traceback_later()

    on_fit_end = on_exception = _end
