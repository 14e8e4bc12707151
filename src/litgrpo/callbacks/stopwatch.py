"""When the parts of a fit began and ended, in seconds of the clock and of the processor."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer


def now() -> dict[str, float]:
    """Seconds: `wall` of the clock, `cpu` of this process and of children that have ended."""
    used = os.times()
    cpu = used.user + used.system + used.children_user + used.children_system
    return {"wall": time.perf_counter(), "cpu": cpu}


class Stopwatch(Callback):
    """Notes when iterations begin and evaluations begin and end; `plan --measure` reads it.

    Args:
        file: a .jsonl to append to, one line for each event.
    """

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def _note(self, event: str) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **now()}) + "\n")

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """An iteration begins; what the one before it left to do has been done."""
        self._note("iteration")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """An iteration has ended; a checkpoint may follow."""
        self._note("end of iteration")

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """An evaluation begins."""
        self._note("validation")

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """An evaluation has ended."""
        self._note("end of validation")

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """All iterations are done; the last evaluation and the model's files may follow."""
        self._note("end of training")
