"""Progress of a run: a bar over iterations, and lines for log files."""

from __future__ import annotations

import logging
import math
import os
import shutil
import statistics
import sys
import textwrap
import time
from collections.abc import Mapping
from typing import Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import RunningStage
from tqdm import tqdm
from tqdm.utils import disp_len

from litgrpo.argument_types import check_argument_types
from litgrpo.callbacks.formatting import (
    format_number,
    format_report,
    format_success,
    strip_stage,
    terminal_columns,
    without_zero_counts,
)
from litgrpo.lightning_compat import find_trainer, remove_stock_progress_bar
from litgrpo.protocol import TrainedModule
from litgrpo.text.tables import plural

# {name on the bar: metric}, the most important first; metrics that are not logged are left out.
BAR_METRICS = {
    "reward": "reward/mean",
    "loss": "sft/loss",
    "kl": "policy/kl",
    "len": "completion/len_mean",
    "tok/s": "perf/tokens_per_s",
}
MAX_NAMES = 4
MINUTE_S, HOUR_S = 60, 3600
ESTIMATE_AFTER_S = 5.0  # seconds of training that the estimate is computed from
# Titles of a bar over the batches of an evaluation.
TITLES = {
    RunningStage.SANITY_CHECKING: "before training",
    RunningStage.VALIDATING: "validating",
    RunningStage.TESTING: "testing",
}
BAR, TIMES = " |{bar:16}|", " {elapsed}<{remaining}"
ITERATIONS = "{desc} {n_fmt}/{total_fmt}" + BAR + TIMES + "{postfix}"
BATCHES = "{desc} {n_fmt} of {total_fmt}" + BAR + TIMES
NO_METRICS: Mapping[str, Any] = {}


class WholeItems(tqdm):
    """A bar that leaves out items that do not fit into its line; tqdm cuts the line anywhere.

    First the last metrics, then the bar itself, further metrics, and the times.
    """

    @staticmethod
    def format_meter(
        n: float,
        total: float | None,
        elapsed: float,
        ncols: int | None = None,
        *,
        bar_format: str = ITERATIONS,
        postfix: str | None = None,
        **settings: Any,
    ) -> str:
        items = postfix.split(", ") if postfix else []
        counts = range(len(items), -1, -1)
        lines = [(bar_format, items[:count]) for count in counts if count or not items]
        lines += [(bar_format.replace(BAR, ""), items[:count]) for count in counts]
        lines.append((bar_format.split(BAR, maxsplit=1)[0], []))
        line = ""
        for form, metrics in lines:
            texts = {"bar_format": form, "postfix": ", ".join(metrics)} | settings
            line = tqdm.format_meter(n, total, elapsed, ncols=None, **texts)
            if ncols is None or disp_len(line) <= ncols:
                break
        return line


class Progress(ProgressBar):
    """Shows iterations, reward, KL, completion length and tokens per second.

    After the first iteration, or after some seconds if iterations are short, it prints an estimate
    of the run time. (Lightning's bars count the batches of an epoch, and print nothing without a
    terminal.)

    Args:
        every_s: without a terminal, minimum seconds between two lines.

    Example:
        `Trainer(callbacks=[Progress(every_s=60)])`
    """

    @check_argument_types()
    def __init__(self, every_s: float = 30.0) -> None:
        super().__init__()
        self.every_s = every_s
        self.is_enabled = True
        self.bar = tqdm(disable=True)
        self.streams: TerminalLines | None = None  # while a bar is on the screen
        self.last_line = 0.0
        self.total_batches: int | None = None  # of the running evaluation
        self.started = 0.0  # start of the running evaluation or iteration, monotonic clock
        self.evaluation_s: float | None = None  # duration of the evaluation before training
        self.iterations_s: list[float] = []  # durations until the estimate is printed
        self.has_estimate = False

    def disable(self) -> None:
        # Called on all ranks but the first.
        self.is_enabled = False

    def enable(self) -> None:
        self.is_enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_enabled:
            print(*args, **kwargs)

    def on_train_start(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        self._open("training", ITERATIONS, pl_module.max_iterations)
        self.bar.n = pl_module.iteration

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.started = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainedModule, *_: Any) -> None:
        n, total = pl_module.iteration, pl_module.max_iterations
        if total and not self.has_estimate:
            self.iterations_s.append(time.monotonic() - self.started)
            self.has_estimate = sum(self.iterations_s) >= ESTIMATE_AFTER_S
            if self.has_estimate and n < total:
                self._print_estimate(trainer, total - n)
        line = f"training {n}/{total}" if total else f"training {n}"
        self._show(n, line, trainer.callback_metrics)

    def _print_estimate(self, trainer: Trainer, iterations: int) -> None:
        interval = math.inf
        if trainer.enable_validation and trainer.val_check_batch:
            interval = trainer.val_check_batch
        # The first iteration is slower: libraries load, memory is allocated.
        iteration_s = statistics.mean(self.iterations_s[1:] or self.iterations_s)
        self.print(estimate_run_time(iterations, iteration_s, self.evaluation_s, interval))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._close()

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        # Within a training the training's bar stays.
        if _is_within_training(trainer):
            self.bar.set_description_str("validating")
        else:
            self.started, self.total_batches = time.monotonic(), count_batches(trainer)
            self._open(_title(trainer), BATCHES, self.total_batches)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if not _is_within_training(trainer):
            n = self.bar.n + 1
            line = f"{_title(trainer)} {n}"
            if self.total_batches:
                line += f" of {self.total_batches}"
            self._show(n, line)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        if _is_within_training(trainer):
            self.bar.set_description_str("training")
        else:
            self._close()
            self.evaluation_s = time.monotonic() - self.started
        if trainer.state.fn == "fit" and pl_module.evaluation_report:
            report = strip_stage(pl_module.evaluation_report)
            rule = format_success(pl_module.success)
            where = f"iteration {pl_module.iteration}" + (f" ({rule})" if rule else "")
            self.print(fit_to_terminal(f"{where}: {', '.join(main_metrics(report))}"))

    on_test_start, on_test_batch_end = on_validation_start, on_validation_batch_end
    on_test_end = on_validation_end  # type: ignore[assignment]

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: Any) -> None:
        # Before the error message is printed.
        self._close()

    def _open(self, title: str, bar_format: str, total: int | None = None) -> None:
        self._close()
        knows_size = _has_columns(sys.stderr)
        self.bar = WholeItems(
            total=total,
            desc=title,
            bar_format=bar_format,
            # Terminals that do not know their size report 0 columns, in which tqdm prints nothing.
            ncols=None if knows_size else shutil.get_terminal_size().columns,
            dynamic_ncols=knows_size,
            leave=title == "training",
            # Without a terminal tqdm would fill a log file with carriage returns.
            disable=not (self.is_enabled and sys.stderr.isatty()),
        )
        if not self.bar.disable:
            self.streams = TerminalLines(self.bar)
        self.last_line = time.monotonic()

    def _close(self) -> None:
        if self.streams is not None:
            self.streams.restore()
            self.streams = None
        self.bar.close()

    def _show(self, n: int, line: str, metrics: Mapping[str, Any] = NO_METRICS) -> None:
        """Move the bar to n; without a terminal, print the line if it is due."""
        numbers = format_metrics(metrics)
        self.bar.n = n
        self.bar.set_postfix(numbers)
        now = time.monotonic()
        if self.is_enabled and self.bar.disable and now - self.last_line >= self.every_s:
            self.last_line = now
            print(line, *(f"{name} {text}" for name, text in numbers.items()))


class LineAboveBar:
    """A stream to the terminal that writes whole lines above a bar."""

    def __init__(self, stream: TextIO, bar: Any) -> None:
        self.stream, self.bar = stream, bar
        self.unfinished = ""

    def write(self, text: str) -> int:
        """Write the lines that are complete; keep the beginning of the next one."""
        with self.bar.get_lock():  # other threads print as well
            *lines, self.unfinished = (self.unfinished + text).split("\n")
            if lines:
                self.bar.clear()
                self.bar.fp.flush()
                self.stream.write("\n".join([*lines, ""]))
                self.stream.flush()
                self.bar.refresh()
        return len(text)

    def flush(self) -> None:
        """Do nothing: lines are written when they are complete."""

    def __getattr__(self, name: str) -> Any:
        """Return anything else of the stream."""
        return getattr(self.stream, name)


class TerminalLines:
    """Writes what the program prints or logs above a bar, until `restore` is called."""

    def __init__(self, bar: Any) -> None:
        self.replaced: dict[str, LineAboveBar] = {}
        self.handlers: list[tuple[logging.StreamHandler[Any], Any]] = []
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream.isatty():
                self.replaced[name] = LineAboveBar(stream, bar)
                setattr(sys, name, self.replaced[name])
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        for logger in loggers:
            for handler in getattr(logger, "handlers", ()):
                self._redirect(handler)

    def _redirect(self, handler: logging.Handler) -> None:
        """Let a handler that writes to one of the streams write above the bar."""
        if type(handler) is not logging.StreamHandler:  # files and other targets
            return
        for line in self.replaced.values():
            if handler.stream is line.stream:
                self.handlers.append((handler, handler.setStream(line)))

    def restore(self) -> None:
        """Let everything write to the terminal itself again."""
        for handler, stream in self.handlers:
            handler.setStream(stream)
        for name, line in self.replaced.items():
            if line.unfinished:
                line.write("\n")
            if getattr(sys, name) is line:
                setattr(sys, name, line.stream)


def replace_stock_bar(module: LightningModule) -> list[Callback]:
    """Return a `Progress` for `configure_callbacks` if the trainer has Lightning's own bar."""
    trainer = find_trainer(module)
    if trainer is None or not remove_stock_progress_bar(trainer):
        return []
    return [Progress()]


def _has_columns(stream: TextIO) -> bool:
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        return False


def _is_within_training(trainer: Trainer) -> bool:
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def _title(trainer: Trainer) -> str:
    stage = trainer.state.stage
    assert stage is not None
    return TITLES[stage]


def count_batches(trainer: Trainer) -> int | None:
    """Number of batches of the running evaluation; None if it is unknown."""
    counts = {
        RunningStage.SANITY_CHECKING: trainer.num_sanity_val_batches,
        RunningStage.VALIDATING: trainer.num_val_batches,
        RunningStage.TESTING: trainer.num_test_batches,
    }[trainer.state.stage]  # type: ignore[index]
    total = sum(counts) if isinstance(counts, list) else counts
    return int(total) if math.isfinite(total) else None


def estimate_run_time(
    iterations: int, iteration_s: float, evaluation_s: float | None, interval: float
) -> str:
    """A line with the estimated time of the rest of a run.

    Args:
        iterations: number of remaining iterations.
        iteration_s: duration of one.
        evaluation_s: duration of an evaluation; None if it is unknown.
        interval: iterations between two evaluations.
    """
    total_s = iterations * iteration_s
    text = f"{plural(iterations, 'iteration')} at {_format_s(iteration_s)} s"
    if evaluation_s is not None:
        evaluations = math.ceil(iterations / interval)
        if evaluations > 0:
            total_s += evaluations * evaluation_s
            text += f", {plural(evaluations, 'evaluation')} at {_format_s(evaluation_s)} s"
    return f"about {format_duration(total_s)} left: {text}"


def _format_s(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"


def format_duration(seconds: float) -> str:
    """Seconds in a readable unit."""
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR_S:
        return f"{seconds / MINUTE_S:.0f} min"
    return f"{seconds / HOUR_S:.1f} h"


def main_metrics(report: Mapping[str, float]) -> list[str]:
    """The first metrics of a report as text; with several validation sets, of each set.

    Args:
        report: {name or set/name: number}.
    """
    sets: dict[str, list[str]] = {}
    for name, text in format_report(without_zero_counts(report)).items():
        sets.setdefault(name.rpartition("/")[0], []).append(f"{name} {text}")
    per_set = max(1, MAX_NAMES // max(1, len(sets)))
    return [text for texts in sets.values() for text in texts[:per_set]]


def fit_to_terminal(line: str) -> str:
    """Break a long line between words if it goes to a terminal."""
    columns = terminal_columns()
    if not math.isfinite(columns):
        return line
    return textwrap.fill(line, int(columns), subsequent_indent="  ", break_long_words=False)


def format_metrics(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Up to four metrics under the short names of the bar."""
    numbers = {name: float(metrics[key]) for name, key in BAR_METRICS.items() if key in metrics}
    return {name: format_number(value) for name, value in list(numbers.items())[:MAX_NAMES]}
