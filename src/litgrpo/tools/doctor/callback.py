"""Apply the doctor's rules during training; log findings and write them to TensorBoard."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from litgrpo.arguments import at_least
from litgrpo.callbacks.completions import completion_rows
from litgrpo.callbacks.loggers import loggers_of
from litgrpo.callbacks.protocol import TrainedModule
from litgrpo.callbacks.run_folder import CONFIG, run_folder
from litgrpo.distributed.messages import rank_zero_info, warn_once_on_failure
from litgrpo.tools.doctor.diagnosis import examine
from litgrpo.tools.doctor.finding import SEVERITIES, Severity
from litgrpo.tools.doctor.render import render_line, render_markdown
from litgrpo.tools.doctor.run import RunConfig, RunLog, RunMetrics, read_config
from litgrpo.tools.run_folder import METRICS, read_metrics


class Doctor(Callback):
    """Diagnose the run during training.

    Each finding is logged once, and again if it becomes more severe. The rules are those of
    `litgrpo doctor RUN_FOLDER`; docs/reference/doctor.md explains them.

    Args:
        every_n_iterations: iterations between two checks; 0 disables them.
    """

    def __init__(self, every_n_iterations: int = 10) -> None:
        at_least("doctor.every_n_iterations", every_n_iterations, 0)
        self.every_n_iterations = every_n_iterations
        self.columns: dict[str, dict[int, float]] = defaultdict(dict)
        self.samples: list[dict[str, Any]] = []
        # {rule: index in SEVERITIES of the most severe finding that was logged}
        self.logged: dict[str, int] = {}
        self.config: RunConfig | None = None

    def on_train_start(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        """Load the metrics that a resumed run logged before."""
        if pl_module.iteration:
            self.load_metrics(run_folder(trainer) / METRICS, pl_module.iteration)

    def load_metrics(self, path: Path, iteration: int) -> None:
        """Load the metrics of a file up to an iteration; later ones will be logged again."""
        for name, values in read_metrics(path).items():
            self.columns[name] = {step: x for step, x in values.items() if step <= iteration}

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainedModule, *_: object) -> None:
        """Collect the metrics of the last iteration and apply the rules if they are due.

        Only now has every callback logged its metrics of that iteration.
        """
        iteration = pl_module.iteration
        if not self.every_n_iterations or not iteration:
            return
        # Unlike `callback_metrics` without numbers that only earlier iterations measured.
        for name, value in trainer.logged_metrics.items():
            # Held-out metrics stay in logged_metrics until the next evaluation.
            if not name.startswith(("val/", "test/")):
                self.columns[name][iteration] = float(value)
        if iteration % self.every_n_iterations == 0 and trainer.is_global_zero:
            self._apply_rules(trainer, iteration)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainedModule, outputs: object, *_: object
    ) -> None:
        """Keep the completions of an iteration after which the rules are due."""
        due = self.every_n_iterations and pl_module.iteration % self.every_n_iterations == 0
        if due and isinstance(outputs, dict) and "rollout" in outputs:
            self.samples = completion_rows(
                pl_module.iteration, outputs["rollout"], outputs["rewards"], outputs["advantages"]
            )

    def on_validation_end(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        """Collect the metrics of the evaluation."""
        for name, value in pl_module.evaluation_report.items():
            self.columns[name][pl_module.iteration] = float(value)

    def on_train_end(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        """Apply the rules to the last iteration."""
        self.on_train_batch_start(trainer, pl_module)

    def _apply_rules(self, trainer: Trainer, iteration: int) -> None:
        if self.config is None:  # the CLI writes it after on_train_start
            self.config = read_config(run_folder(trainer) / CONFIG)
        metrics = RunMetrics.from_columns(self.columns)
        diagnosis = examine(RunLog(metrics, tuple(self.samples), self.config))
        new = [each for each in diagnosis.findings if self.is_new(each.rule, each.severity)]
        if not new:
            return
        for finding in new:
            rank_zero_info(render_line(finding))
        for logger in loggers_of(trainer, TensorBoardLogger):
            with warn_once_on_failure("logger TensorBoard"):
                logger.experiment.add_text("doctor", render_markdown(diagnosis), iteration)

    def is_new(self, rule: str, severity: Severity) -> bool:
        """Return whether a finding was not logged before, or is more severe now; remember it."""
        level, before = SEVERITIES.index(severity), self.logged.get(rule, -1)
        self.logged[rule] = max(level, before)
        return level > before

    def state_dict(self) -> dict[str, Any]:
        """Return the logged findings, so that a resumed run does not repeat them."""
        return {"logged": dict(self.logged)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the logged findings."""
        self.logged = dict(state_dict["logged"])
