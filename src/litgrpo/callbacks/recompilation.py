"""Counts the programs that a device compiled, and names the shapes that made them necessary."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from litgrpo.arguments import at_least
from litgrpo.distributed.device import backend

MOST_NAMED = 3


class Recompilation(Callback):
    """Counts compiled programs, and warns when there are ever more.

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
        at_least("recompilation.warm_up", warm_up, 0)
        at_least("recompilation.allowed", allowed, 0)
        self.warm_up = warm_up
        self.allowed = allowed
        self.stop = stop
        self.before: dict[str, int] = {}
        self.since_warm_up = 0
        self.iterations = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Count from here; what a validation before the training took is not logged."""
        device = backend(pl_module.device)
        self.before, self.since_warm_up, self.iterations = device.counters(), 0, 0
        device.new_shapes()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what the iteration took.

        Raises:
            ValueError: too many programs were compiled and the recipe says to stop.
        """
        device = backend(pl_module.device)
        now = device.counters()
        new = {name: count - self.before[name] for name, count in now.items()}
        self.before = now
        pl_module.log_dict({f"perf/{name}": float(count) for name, count in new.items()})
        self.iterations += 1
        compiled, shapes = new.get("compilations", 0), device.new_shapes()
        if compiled == 0 or self.iterations <= self.warm_up:
            return
        self.since_warm_up += compiled
        if self.since_warm_up > self.allowed:
            self._report(f"iteration {pl_module.iteration}: {self._message(compiled, shapes)}")

    def _message(self, compiled: int, shapes: list[str]) -> str:
        counts = (
            f"{compiled} programs were compiled, {self.since_warm_up} since the {self.warm_up} "
            f"iterations of warm-up ({self.allowed} are allowed). "
        )
        if not shapes:
            return counts + (
                "No program was given a new shape, so something computes outside of them, such as "
                "a callback that works with tensors of the device"
            )
        more = [f"and {len(shapes) - MOST_NAMED} more"] if len(shapes) > MOST_NAMED else []
        named = "; ".join(shapes[:MOST_NAMED] + more)
        return f"{counts}New shapes: {named}. Give fewer widths (engine.prompt_buckets)"

    def _report(self, message: str) -> None:
        if self.stop:
            raise ValueError(f"Stopped at {message}, or raise recompilation.allowed.")
        rank_zero_warn(message)
