"""A progress bar over iterations, and a few plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import RunningStage
from tqdm import tqdm

from litgrpo.callbacks.report import digits, entries, plain_names

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
BATCHES = "{desc} {n_fmt} {elapsed}"
NOTHING: Mapping[str, Any] = {}


class Progress(ProgressBar):
    """Shows iterations, reward, KL, completion length and tokens per second.

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

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Show the finished iterations."""
        n, total = pl_module.iteration, pl_module.max_iterations
        self._show(n, f"training {n}" + (f"/{total}" if total else ""), trainer.callback_metrics)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Leave the last state on the screen."""
        self.bar.close()

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Open a bar over batches; in training its bar stands still meanwhile."""
        if _in_training(trainer):
            self.bar.set_description_str("validating")
        else:
            self._open(STAGES[trainer.state.stage], BATCHES)  # type: ignore[index]

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """One batch further, where the evaluation has its own bar."""
        if not _in_training(trainer):
            n = self.bar.n + 1
            self._show(n, f"{STAGES[trainer.state.stage]} {n}")  # type: ignore[index]

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Print what came out as one line."""
        if _in_training(trainer):
            self.bar.set_description_str("training")
        else:
            self.bar.close()
        if trainer.state.fn == "fit" and pl_module.evaluation_report:
            numbers = entries(plain_names(pl_module.evaluation_report)).items()
            shown = [f"{name} {text}" for name, text in list(numbers)[:MOST_NAMES]]
            self.print(f"iteration {pl_module.iteration}: {', '.join(shown)}")

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
