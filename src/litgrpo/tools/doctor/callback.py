"""The doctor's rules on a run while it trains: a line in the log, a text in TensorBoard."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from litgrpo.arguments import at_least
from litgrpo.callbacks.completions import sample_rows
from litgrpo.callbacks.metrics_csv import loggers_of
from litgrpo.callbacks.run_folder import CONFIG, run_folder
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.tools.doctor.config import Config
from litgrpo.tools.doctor.diagnosis import examine
from litgrpo.tools.doctor.finding import LEVELS
from litgrpo.tools.doctor.metrics import Metrics, Series, read_csv
from litgrpo.tools.doctor.run_files import Run, config_of
from litgrpo.tools.doctor.telling import as_markdown, line


class Doctor(Callback):
    """Says what is wrong with the run, once for each finding and again where it becomes worse.

    The same rules as `python cli.py doctor RUN_FOLDER`; docs/doctor.md explains them.

    Args:
        every_n_iterations: how often it looks; 0 switches it off.
    """

    def __init__(self, every_n_iterations: int = 10) -> None:
        at_least("doctor.every_n_iterations", every_n_iterations, 0)
        self.every_n_iterations = every_n_iterations
        self.numbers: dict[str, dict[int, float]] = defaultdict(dict)
        self.samples: list[dict[str, Any]] = []
        self.said: dict[str, int] = {}
        self.config: Config | None = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Read the numbers that a resumed run has written."""
        folder = run_folder(trainer)
        if pl_module.iteration and (folder / "metrics.csv").is_file():
            self.remember(folder / "metrics.csv", pl_module.iteration)

    def remember(self, path: Path, iteration: int) -> None:
        """Take up the numbers of a file up to an iteration."""
        for name, series in read_csv(path).series.items():
            pairs = zip(series.steps.tolist(), series.values.tolist(), strict=True)
            self.numbers[name] = {int(step): x for step, x in pairs if step <= iteration}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Note the numbers of the last iteration, now that everyone has logged; look at them."""
        n = pl_module.iteration
        if not self.every_n_iterations or not n:
            return
        for name, value in trainer.callback_metrics.items():
            if not name.startswith(("val/", "test/")):  # they stay there until the next evaluation
                self.numbers[name][n] = float(value)
        if n % self.every_n_iterations == 0 and trainer.is_global_zero:
            self.look(trainer, n)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Keep the samples of the iterations that are looked at."""
        due = self.every_n_iterations and pl_module.iteration % self.every_n_iterations == 0
        if due and isinstance(outputs, dict) and "rollout" in outputs:
            shown = (outputs[name] for name in ("rollout", "rewards", "advantages"))
            self.samples = sample_rows(pl_module.iteration, *shown)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Note the evaluation."""
        for name, value in pl_module.evaluation_report.items():
            self.numbers[name][pl_module.iteration] = float(value)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Look once more."""
        self.on_train_batch_start(trainer, pl_module)

    def look(self, trainer: Trainer, iteration: int) -> None:
        """Say what is new."""
        if self.config is None:  # by now the recipe of this start is in its folder
            self.config = config_of(run_folder(trainer) / CONFIG)
        known = {
            name: Series(np.array([*values], dtype=float), np.array([*values.values()]))
            for name, values in self.numbers.items()
            if values
        }
        diagnosis = examine(Run(Metrics(known), tuple(self.samples), self.config))
        new = [each for each in diagnosis.findings if self.is_news(each.rule, each.severity)]
        for each in new:
            rank_zero_info(line(each))
        for board in loggers_of(trainer, TensorBoardLogger) if new else []:
            board.experiment.add_text("doctor", as_markdown(diagnosis), iteration)

    def is_news(self, rule: str, severity: str) -> bool:
        """Whether it was not said before, or is worse now."""
        level = LEVELS.index(severity)
        news = level > self.said.get(rule, -1)
        self.said[rule] = max(level, self.said.get(rule, -1))
        return news

    def state_dict(self) -> dict[str, Any]:
        """What was said, so that a resumed run does not repeat it."""
        return {"said": dict(self.said)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it up."""
        self.said = dict(state_dict["said"])
