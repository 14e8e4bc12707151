"""A progress bar over iterations, and a few plain lines where there is no terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import RunningStage
from tqdm import tqdm

from litgrpo.callbacks.number_texts import digits, entries, plain_names

# What the bar calls a logged number, in order of interest; only what the module logs is shown.
NAMES = {
    "reward": "reward/mean",
    "loss": "sft/loss",
    "kl": "policy/kl",
    "len": "completion/len_mean",
    "tok/s": "perf/tokens_per_s",
}
MOST_NAMES = 4
# What a bar over batches of an evaluation is called.
STAGES = {
    RunningStage.SANITY_CHECKING: "before training",
    RunningStage.VALIDATING: "validating",
    RunningStage.TESTING: "testing",
}
ITERATIONS = "{desc} {n_fmt}/{total_fmt} |{bar:16}| {elapsed}<{remaining}{postfix}"
BATCHES = "{desc} {n_fmt} of {total_fmt} |{bar:16}| {elapsed}<{remaining}"
NOTHING: Mapping[str, Any] = {}


class Progress(ProgressBar):
    """Shows iterations, reward, KL, completion length and tokens per second.

    After the first iteration it says how long the whole run will take, about.

    (Lightning's bars count batches of an epoch, and print nothing where there is no terminal.)

    Args:
        every_s: without a terminal, print a line at most every so many seconds.
    """

    def __init__(self, every_s: float = 30.0) -> None:
        super().__init__()
        self.every_s = every_s
        self.is_enabled = True
        self.bar = tqdm(disable=True)
        self.last_line = 0.0
        self.total_batches: int | None = None  # of the evaluation at hand
        self.began = 0.0  # the evaluation or the iteration at hand, on the monotonic clock
        self.evaluation_s: float | None = None  # what the evaluation before training took
        self.estimated = False

    def disable(self) -> None:
        """Show nothing (all processes but the first)."""
        self.is_enabled = False

    def enable(self) -> None:
        """Show the bar."""
        self.is_enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        if self.is_enabled:
            tqdm.write(kwargs.get("sep", " ").join(map(str, args)))

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Open the bar at the iteration that the run starts or resumes from."""
        self._open("training", ITERATIONS, pl_module.max_iterations)
        self.bar.n = pl_module.iteration

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Note when the iteration began."""
        self.began = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Show the finished iterations; after the first one, what the whole will take."""
        n, total = pl_module.iteration, pl_module.max_iterations
        if total and n < total and not self.estimated:
            batches = trainer.val_check_batch if trainer.enable_validation else None
            interval = batches or math.inf
            taken_s = time.monotonic() - self.began
            self.print(estimate(total - n, taken_s, self.evaluation_s, interval))
        self.estimated = True
        self._show(n, f"training {n}" + (f"/{total}" if total else ""), trainer.callback_metrics)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Leave the last state on the screen."""
        self.bar.close()

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Open a bar over batches; in training its bar stands still meanwhile."""
        if _in_training(trainer):
            self.bar.set_description_str("validating")
        else:
            self.began, self.total_batches = time.monotonic(), num_batches(trainer)
            self._open(STAGES[trainer.state.stage], BATCHES, self.total_batches)  # type: ignore[index]

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """One batch further, where the evaluation has its own bar."""
        if not _in_training(trainer):
            n = self.bar.n + 1
            of = f" of {self.total_batches}" if self.total_batches else ""
            self._show(n, f"{STAGES[trainer.state.stage]} {n}{of}")  # type: ignore[index]

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Print what came out as one line."""
        if _in_training(trainer):
            self.bar.set_description_str("training")
        else:
            self.bar.close()
            self.evaluation_s = time.monotonic() - self.began
        if trainer.state.fn == "fit" and pl_module.evaluation_report:
            report = plain_names(pl_module.evaluation_report)
            self.print(f"iteration {pl_module.iteration}: {', '.join(headlines(report))}")

    on_test_start, on_test_batch_end = on_validation_start, on_validation_batch_end
    on_test_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: Any) -> None:
        """Leave the terminal clean for the message that follows."""
        self.bar.close()

    def _open(self, what: str, bar_format: str, total: int | None = None) -> None:
        self.bar = tqdm(
            total=total,
            desc=what,
            bar_format=bar_format,
            dynamic_ncols=True,
            leave=what == "training",
            # Without a terminal tqdm would fill a log file with carriage returns.
            disable=not (self.is_enabled and sys.stderr.isatty()),
        )
        self.last_line = time.monotonic()

    def _show(self, n: int, line: str, metrics: Mapping[str, Any] = NOTHING) -> None:
        """Move the bar to n; without one, print the line if it is time."""
        numbers = short(metrics)
        self.bar.n = n
        self.bar.set_postfix(numbers)
        now = time.monotonic()
        if self.is_enabled and self.bar.disable and now - self.last_line >= self.every_s:
            self.last_line = now
            print(line, *(f"{name} {text}" for name, text in numbers.items()))


def num_batches(trainer: Trainer) -> int | None:
    """How many batches the evaluation at hand has; None where that is not known."""
    counts = {
        RunningStage.SANITY_CHECKING: trainer.num_sanity_val_batches,
        RunningStage.VALIDATING: trainer.num_val_batches,
        RunningStage.TESTING: trainer.num_test_batches,
    }[trainer.state.stage]  # type: ignore[index]
    total = sum(counts) if isinstance(counts, list) else counts
    return int(total) if math.isfinite(total) else None


def estimate(
    iterations: int, iteration_s: float, evaluation_s: float | None, interval: float
) -> str:
    """A line that says how long the rest of a run will take.

    Args:
        iterations: still to come.
        iteration_s: what the first one took.
        evaluation_s: what an evaluation takes; None where none was seen.
        interval: iterations from one evaluation to the next.

    Example:
        >>> estimate(249, 0.8, 20.0, 125)
        'about 4 min to go: 249 iterations of 0.800 s, 2 evaluations of 20.0 s'
        >>> estimate(10_000, 3.6, None, 50)
        'about 10.0 h to go: 10000 iterations of 3.600 s'
    """
    evaluations = 0 if evaluation_s is None else math.ceil(iterations / interval)
    total = iterations * iteration_s + evaluations * (evaluation_s or 0.0)
    parts = f"{iterations} iteration{'s' * (iterations > 1)} of {digits(iteration_s)} s"
    several = f"{evaluations} evaluation{'s' * (evaluations > 1)}"
    parts += f", {several} of {digits(evaluation_s or 0.0)} s" * bool(evaluations)
    return f"about {duration(total)} to go: {parts}"


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best.

    Example:
        >>> duration(42.3), duration(600), duration(36_000)
        ('42 s', '10 min', '10.0 h')
    """
    units = {120.0: (1.0, "s", 0), 7200.0: (60.0, "min", 0), math.inf: (3600.0, "h", 1)}
    size, unit, places = next(units[limit] for limit in units if seconds < limit)
    return f"{seconds / size:.{places}f} {unit}"


def headlines(report: Mapping[str, float]) -> list[str]:
    """The first numbers of a report as text; with several sets of prompts the first of each set.

    Args:
        report: {name or set/name: number}.

    Example:
        >>> headlines({"easy/avg@4": 0.9, "easy/greedy": 0.8, "hard/avg@4": 0.25})
        ['easy/avg@4 0.900', 'easy/greedy 0.800', 'hard/avg@4 0.250']
    """
    sets: dict[str, list[str]] = {}
    for name, text in entries(dict(report)).items():
        sets.setdefault(name.rpartition("/")[0], []).append(f"{name} {text}")
    each = max(1, MOST_NAMES // max(1, len(sets)))
    return [text for texts in sets.values() for text in texts[:each]]


def _in_training(trainer: Trainer) -> bool:
    """Whether a validation interrupts a training."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def short(metrics: Mapping[str, Any]) -> dict[str, str]:
    """At most four numbers under short names.

    Example:
        >>> short({"reward/mean": 0.51234, "perf/tokens_per_s": 15234.0, "optim/lr": 0.1})
        {'reward': '0.512', 'tok/s': '15234'}
    """
    known = {name: float(metrics[key]) for name, key in NAMES.items() if key in metrics}
    return {name: digits(value) for name, value in list(known.items())[:MOST_NAMES]}
