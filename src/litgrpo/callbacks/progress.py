"""A progress bar over iterations, and a few plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
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
FORMAT = "{desc} {n_fmt}/{total_fmt} |{bar:16}| {elapsed}<{remaining}{postfix}"


class Progress(ProgressBar):
    """Shows iterations, reward, KL, completion length and tokens per second.

    Args:
        every_s: without a terminal, print a line at most every so many seconds.
    """

    def __init__(self, every_s: float = 30.0) -> None:
        """Nothing is shown before the first hook."""
        super().__init__()
        self.every_s = every_s
        self.is_enabled = True
        self.bar: tqdm | None = None
        self.what = ""
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
        self._open("training", pl_module.max_iterations, pl_module.iteration)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the finished iterations."""
        self._show(pl_module.iteration, short(trainer.callback_metrics))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Leave the last state on the screen."""
        self._close()

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Say that the bar stands because held-out problems are being solved."""
        if self.bar is not None:
            self.bar.set_description_str("validating")
        else:
            self._open("before training" if trainer.sanity_checking else "validating")

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """One batch further, where validation has its own bar."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            self._show_next()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Print what came out as one line."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            self._close()
        elif self.bar is not None:
            self.bar.set_description_str("training")
        if trainer.state.fn == "fit" and pl_module.evaluation_report:
            numbers = entries(plain_names(pl_module.evaluation_report)).items()
            shown = [f"{name} {text}" for name, text in list(numbers)[:MOST_NAMES]]
            self.print(f"iteration {pl_module.iteration}: {', '.join(shown)}")

    def on_test_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Open a bar over batches."""
        self._open("testing")

    def on_test_batch_end(self, *_: Any) -> None:
        """One batch further."""
        self._show_next()

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: Any) -> None:
        """Leave the terminal clean for the message that follows."""
        self._close()

    def _open(self, what: str, total: int | None = None, initial: int = 0) -> None:
        if not self.is_enabled:
            return
        live = sys.stderr.isatty()
        self.what = what
        self.bar = tqdm(
            total=total,
            initial=initial,
            desc=what,
            bar_format=FORMAT if total else "{desc} {n_fmt} {elapsed}",
            dynamic_ncols=True,
            leave=what == "training",
            # Without a terminal tqdm would fill a log file with carriage returns.
            disable=not live,
        )
        self.bar.n = initial
        self.last_line = time.monotonic()

    def _show_next(self) -> None:
        if self.bar is not None:
            self._show(self.bar.n + 1, {})

    def _show(self, n: int, numbers: dict[str, str]) -> None:
        if self.bar is None:
            return
        self.bar.n = n
        self.bar.set_postfix(numbers, refresh=False)
        self.bar.refresh()
        if self.bar.disable and time.monotonic() - self.last_line >= self.every_s:
            self.last_line = time.monotonic()
            of = f"/{self.bar.total}" if self.bar.total else ""
            shown = (f"{name} {text}" for name, text in numbers.items())
            print(f"{self.what} {self.bar.n}{of}", *shown)

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def short(metrics: dict[str, Any]) -> dict[str, str]:
    """At most four numbers under short names.

    Example:
        >>> short({"reward/mean": 0.51234, "perf/tokens_per_s": 15234.0, "optim/lr": 0.1})
        {'reward': '0.512', 'tok/s': '15234'}
    """
    known = {name: float(metrics[key]) for name, key in NAMES.items() if key in metrics}
    return {name: digits(value) for name, value in list(known.items())[:MOST_NAMES]}
