"""On devices that compile programs: how many were compiled, and what made them necessary."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from litgrpo.parallel.device import counters, new_shapes

MOST_NAMED = 3


class Recompilation(Callback):
    """Counts compiled programs, and tells when that does not end.

    A device that compiles (XLA) needs seconds to minutes for each program, so that a run whose
    shapes keep changing hardly moves. Logged for each iteration, with what came between it and the
    one before: `perf/compilations`, `perf/host_reads` (times that the host waited for values) and
    `perf/cpu_fallbacks` (operators that the device does not have). Other devices log none of it.

    Args:
        warm_up: iterations after the start, or after a resume, in which compiling is expected; the
            first optimizer step makes the optimizer's state, so at least 2.
        allowed: programs that may be compiled after that.
        stop: stop the training when there are more; else warn, once for each iteration.
    """

    def __init__(self, warm_up: int = 2, allowed: int = 8, stop: bool = False) -> None:
        """Check the numbers."""
        if warm_up < 0 or allowed < 0:
            raise ValueError(
                f"recompilation.warm_up is {warm_up} and recompilation.allowed {allowed}; both "
                "must be 0 or more."
            )
        self.warm_up = warm_up
        self.allowed = allowed
        self.stop = stop
        self.before: dict[str, int] = {}
        self.since_warm_up = 0
        self.iterations = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Count from here; what a validation before the training took is not logged."""
        self.before, self.since_warm_up, self.iterations = counters(pl_module.device), 0, 0
        new_shapes()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what the iteration took.

        Raises:
            ValueError: too many programs were compiled and the recipe says to stop.
        """
        now = counters(pl_module.device)
        if not now:
            return
        new = {name: value - self.before[name] for name, value in now.items()}
        self.before = now
        self.iterations += 1
        pl_module.log_dict({f"perf/{name}": float(value) for name, value in new.items()})
        shapes = new_shapes()
        if self.iterations <= self.warm_up or not new["compilations"]:
            return
        self.since_warm_up += new["compilations"]
        if self.since_warm_up > self.allowed:
            self._tell(f"iteration {pl_module.iteration}: {self._said(new, shapes)}")

    def _said(self, new: dict[str, int], shapes: list[str]) -> str:
        said = f"{new['compilations']} programs were compiled, {self.since_warm_up} since the "
        said += f"{self.warm_up} iterations of warm-up ({self.allowed} are allowed). "
        if shapes:
            rest = len(shapes) - MOST_NAMED
            named = "; ".join(shapes[:MOST_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
            return said + f"New shapes: {named}. Give fewer widths (engine.prompt_buckets)"
        return said + (
            "No program was given a new shape, so something computes outside of them, such as a "
            "callback that works with tensors of the device"
        )

    def _tell(self, said: str) -> None:
        if self.stop:
            raise ValueError(f"Stopped at {said}, or raise recompilation.allowed.")
        rank_zero_warn(said)
