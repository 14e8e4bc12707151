"""A process that hangs says where, and ends."""

from __future__ import annotations

import faulthandler
from typing import Any

from lightning.pytorch import Callback, Trainer


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
        """Check the number."""
        if timeout_s is not None and timeout_s <= 0:
            raise ValueError(f"watchdog.timeout_s is {timeout_s}; give seconds, or null for never.")
        self.timeout_s = timeout_s

    def _progress(self) -> None:
        if self.timeout_s is not None:
            # A thread of C code, which runs whatever Python waits for.
            faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=2)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Begin to watch."""
        self._progress()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Begin to watch."""
        self._progress()

    def on_train_batch_start(self, *_: Any) -> None:
        """An iteration begins."""
        self._progress()

    def on_before_optimizer_step(self, *_: Any) -> None:
        """A gradient is complete."""
        self._progress()

    def on_train_batch_end(self, *_: Any) -> None:
        """An iteration ended."""
        self._progress()

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Some held-out prompts are answered."""
        if trainer.state.fn == "fit":
            self._progress()

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Nothing to watch any more."""
        faulthandler.cancel_dump_traceback_later()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Nothing to watch any more."""
        faulthandler.cancel_dump_traceback_later()
