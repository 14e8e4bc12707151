"""Callbacks that stop a run: numbers that are not finite, no progress, time, recompilation."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from litgrpo.arguments import above, at_least
from litgrpo.callbacks.completions import completion_rows, write_jsonl
from litgrpo.distributed.device import backend
from litgrpo.distributed.messages import rank
from litgrpo.protocol import TrainedModule
from litgrpo.run_folder import run_folder, writes_files
from litgrpo.types import Iteration, StepReport

MAX_SHAPES = 3  # that a warning names
# Seconds after the watchdog's time limit at which a process exits that never releases the GIL.
GIL_S = 5.0
EXIT_DELAY_S = 1.0  # before a process exits whose time is over


class NonFinite(Callback):
    """Counts optimizer steps that were skipped, and stops the run after too many in a row.

    A step whose loss, gradient, log-probability or advantage is NaN or infinite is skipped: weights
    and optimizer state stay unchanged. The affected completions are written to
    `non_finite/iteration-000123.jsonl`.

    Args:
        stop_after: number of consecutive skipped steps after which training stops; null never
            stops.
    """

    def __init__(self, stop_after: int | None = 10) -> None:
        at_least("non_finite.stop_after", stop_after, 1)
        self.stop_after = stop_after
        self.skipped = 0
        self.in_a_row = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainedModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        iteration: Iteration | None = outputs.get("iteration")  # None: of SFT
        reports = outputs.get("reports", []) if iteration is None else iteration.steps
        skipped = [report.skipped for report in reports if report.skipped is not None]
        self.skipped += len(skipped)
        if skipped:
            reasons = self._write_rows(trainer, pl_module.iteration, reports, iteration)
            rank_zero_warn(
                f"iteration {pl_module.iteration}: {len(skipped)} of {len(reports)} optimizer "
                f"steps skipped because of NaN or infinity: {reasons}"
            )
        for report in reports:
            self.in_a_row = 0 if report.skipped is None else self.in_a_row + 1
            if self.stop_after is not None and self.in_a_row >= self.stop_after:
                raise ValueError(
                    f"Stopped in iteration {pl_module.iteration}: {self.in_a_row} consecutive "
                    "optimizer steps were skipped because of NaN or infinity "
                    "(non_finite.stop_after). The weights are unchanged; see "
                    f"{run_folder(trainer) / 'non_finite'}. Lower the learning rate or "
                    "max_grad_norm, or use a wider precision."
                )
        if self.skipped:
            pl_module.log("optim/skipped_steps", float(self.skipped))

    def _write_rows(
        self, trainer: Trainer, n: int, reports: list[StepReport], iteration: Iteration | None
    ) -> str:
        """Write the affected rows to a file, and return the reasons as text."""
        reasons: dict[int, str] = {}
        for report in reports:
            reasons |= report.skipped or {}
        if not reasons:
            return "the norm of the whole gradient"
        counts = Counter(reasons.values()).items()
        text = ", ".join(f"{reason} of {count} rows" for reason, count in counts)
        if iteration is not None and writes_files(trainer):
            rows = completion_rows(n, iteration.rollout, iteration.rewards, iteration.advantages)
            path = run_folder(trainer) / "non_finite" / f"iteration-{n:06d}.jsonl"
            affected = [rows[row] | {"not_finite": reasons[row]} for row in sorted(reasons)]
            if write_jsonl(path, affected, "non_finite"):
                text += f"; they are in {path}"
        return text

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.skipped, self.in_a_row = state_dict["skipped"], state_dict["in_a_row"]


class Watchdog(Callback):
    """Terminates a training that makes no progress, on every rank.

    If nothing happens for `timeout_s` (no iteration starts or ends, no optimizer step, no batch of
    a validation), the reason and the stacks of all threads are written to standard error and the
    process exits with code 1. A rank that waits for one that hangs, or that a network no longer
    connects to the others, makes no progress either, so all of them exit.

    Args:
        timeout_s: seconds without progress; null waits forever. It must be longer than the longest
            rollout.
    """

    def __init__(self, timeout_s: float | None = 3600.0) -> None:
        above("watchdog.timeout_s", timeout_s, 0)
        self.timeout_s = timeout_s
        self._ends_at = 0.0  # time.monotonic() at which the process exits
        self._cancelled: threading.Event | None = None  # of the running timer
        self._has_warned = False

    def _restart(self, *_: Any, **__: Any) -> None:
        """Restart the timer."""
        if self.timeout_s is None:
            return
        self._ends_at = time.monotonic() + self.timeout_s
        try:
            self._start(self.timeout_s)
        except RuntimeError as error:  # the limit of threads is reached; the next call tries again
            if not self._has_warned:
                self._has_warned = True
                rank_zero_warn(f"watchdog: {error}; training continues without it for now")

    def _start(self, timeout_s: float) -> None:
        # faulthandler waits in a C thread, which runs even if Python holds the GIL forever.
        faulthandler.dump_traceback_later(timeout_s + GIL_S, exit=True, file=2)
        if self._cancelled is None:
            cancelled = threading.Event()
            arguments = (timeout_s, cancelled)
            threading.Thread(target=self._wait, args=arguments, daemon=True).start()
            self._cancelled = cancelled

    def _wait(self, timeout_s: float, cancelled: threading.Event) -> None:
        """Exit with the reason when the time is over."""
        while not cancelled.wait(self._ends_at - time.monotonic()):
            if time.monotonic() >= self._ends_at:
                text = (
                    f"error: rank {rank()} made no progress for {timeout_s:g} s "
                    "(watchdog.timeout_s). A rank hangs, or the network between ranks is down; "
                    "the stacks of all threads follow. Resume with --auto_resume true.\n"
                )
                os.write(2, text.encode())
                faulthandler.dump_traceback(file=2)
                # The other ranks' time is over at about this moment. The first exit ends them, so
                # it waits until they have written their stacks as well.
                time.sleep(EXIT_DELAY_S)
                os._exit(1)

    on_sanity_check_start = on_train_start = _restart
    on_train_batch_start = on_before_optimizer_step = on_train_batch_end = _restart

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.state.fn == "fit":
            self._restart()

    def _cancel(self, *_: Any, **__: Any) -> None:
        """Stop the timer."""
        faulthandler.cancel_dump_traceback_later()
        if self._cancelled is not None:
            self._cancelled.set()
            self._cancelled = None

    on_fit_end = on_exception = _cancel


class TimeBudget(Callback):
    """Stops training early enough for the last validation and the last checkpoint.

    (Lightning's Timer stops when the time is over. It also counts the time of earlier processes,
    so that a run that a scheduler resumed would stop at once.)

    Args:
        max_time: time of this process from its start of training: `DD:HH:MM:SS`, or as in
            timedelta.
    """

    def __init__(self, max_time: str | timedelta | dict[str, int]) -> None:
        # Lightning's Timer parses the duration.
        self.limit_s = float(Timer(max_time).time_remaining() or 0.0)
        self.started = self.mark = time.monotonic()
        self.iteration_s = self.validation_s = self.save_s = 0.0

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.started = time.monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.mark = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.validation_s = time.monotonic() - self.mark

    def on_train_batch_start(self, *_: Any) -> None:
        self.mark = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        now = time.monotonic()
        self.iteration_s = max(0.9 * self.iteration_s, now - self.mark)
        metrics = trainer.callback_metrics
        saving = [float(metrics.get(f"checkpoint/{name}", 0.0)) for name in ("wait_s", "write_s")]
        self.save_s = max(self.save_s, sum(saving))
        needed_s = self.iteration_s + self.validation_s + self.save_s
        is_over = trainer.strategy.broadcast(now - self.started + needed_s > self.limit_s)
        if is_over and not trainer.should_stop:
            trainer.should_stop = True
            rank_zero_info(
                f"trainer.max_time: stopping after {now - self.started:.0f} of "
                f"{self.limit_s:.0f} s; the last validation ({self.validation_s:.0f} s) and "
                "checkpoint need the rest."
            )


class Recompilation(Callback):
    """Counts compiled programs, and warns or stops if their number keeps growing.

    A device that compiles (XLA) needs seconds to minutes for each program, so a run whose shapes
    keep changing hardly progresses. Each iteration logs the counts since the previous one:
    `perf/compilations`, `perf/host_reads` (times that the host waited for values) and
    `perf/cpu_fallbacks` (operators that the device lacks). Other devices log none of them.

    Args:
        warm_up: iterations after the start, or after a resume, in which compiling is expected; the
            first optimizer step creates the optimizer state, so at least 2.
        allowed: number of programs that may be compiled after that.
        stop: stop the training if there are more; otherwise warn, once per iteration.
    """

    def __init__(self, warm_up: int = 2, allowed: int = 8, stop: bool = False) -> None:
        at_least("recompilation.warm_up", warm_up, 0)
        at_least("recompilation.allowed", allowed, 0)
        self.warm_up = warm_up
        self.allowed = allowed
        self.stop = stop
        self.previous: dict[str, int] = {}
        self.since_warm_up = 0
        self.iterations = 0

    def on_train_start(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        # The validation before training is not counted.
        device = backend(pl_module.device)
        self.previous, self.since_warm_up, self.iterations = device.counters(), 0, 0
        device.new_shapes()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainedModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        device = backend(pl_module.device)
        now = device.counters()
        new = {name: count - self.previous[name] for name, count in now.items()}
        self.previous = now
        pl_module.log_dict({f"perf/{name}": float(count) for name, count in new.items()})
        self.iterations += 1
        compiled, shapes = new.get("compilations", 0), device.new_shapes()
        if compiled == 0 or self.iterations <= self.warm_up:
            return
        self.since_warm_up += compiled
        if self.since_warm_up > self.allowed:
            message = f"iteration {pl_module.iteration}: {self._describe(compiled, shapes)}"
            if self.stop:
                raise ValueError(f"Stopped at {message}, or raise recompilation.allowed.")
            rank_zero_warn(message)

    def _describe(self, compiled: int, shapes: list[str]) -> str:
        counts = (
            f"{compiled} programs were compiled, {self.since_warm_up} since the {self.warm_up} "
            f"warm-up iterations ({self.allowed} are allowed). "
        )
        if not shapes:
            return counts + (
                "No program has a new shape, so something computes outside of them, such as a "
                "callback that works with tensors of the device"
            )
        names = shapes[:MAX_SHAPES]
        if len(shapes) > MAX_SHAPES:
            names.append(f"and {len(shapes) - MAX_SHAPES} more")
        advice = "Give fewer widths (model.engine.prompt_buckets)"
        return f"{counts}New shapes: {'; '.join(names)}. {advice}"
