"""Apply the doctor's rules during training; log findings and write them to TensorBoard."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from litgrpo.arguments import at_least
from litgrpo.callbacks.loggers import MetricsCSV, loggers_of
from litgrpo.distributed.messages import rank_zero_info, warn_once_on_failure
from litgrpo.protocol import TrainedModule
from litgrpo.run_folder import run_folder
from litgrpo.runs.doctor.finding import SEVERITIES, Severity
from litgrpo.runs.doctor.render import render_line, render_markdown
from litgrpo.runs.run import Run


class Doctor(Callback):
    """Diagnose the run during training, from the files that `litgrpo doctor RUN_FOLDER` reads.

    Each finding is logged once, and again if it becomes more severe; docs/reference/tools.md
    explains the rules. Needs `metrics.csv`, which `--csv false` disables.

    Args:
        every_n_iterations: iterations between two checks; 0 disables them.
    """

    def __init__(self, every_n_iterations: int = 10) -> None:
        at_least("doctor.every_n_iterations", every_n_iterations, 0)
        self.every_n_iterations = every_n_iterations
        # {rule: index in SEVERITIES of the most severe finding that was logged}
        self.logged: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainedModule, *_: object) -> None:
        # By now the last iteration is in the file.
        iteration, interval = pl_module.iteration, self.every_n_iterations
        if not interval or not iteration or iteration % interval or not trainer.is_global_zero:
            return
        # Without this logger a file in the folder is that of another run.
        if loggers_of(trainer, MetricsCSV):
            with warn_once_on_failure("doctor"):
                self._apply_rules(trainer, Run(run_folder(trainer)), iteration)

    def on_train_end(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        self.on_train_batch_start(trainer, pl_module)

    def _apply_rules(self, trainer: Trainer, run: Run, iteration: int) -> None:
        from litgrpo.runs.doctor.diagnosis import examine  # imports pandas

        diagnosis = examine(run)
        new = [
            finding for finding in diagnosis.findings if self.is_new(finding.rule, finding.severity)
        ]
        for finding in new:
            rank_zero_info(render_line(finding))
        for logger in loggers_of(trainer, TensorBoardLogger) if new else ():
            with warn_once_on_failure("logger TensorBoard"):
                logger.experiment.add_text("doctor", render_markdown(diagnosis), iteration)

    def is_new(self, rule: str, severity: Severity) -> bool:
        """Return whether a finding was not logged before, or is more severe now; remember it."""
        level, before = SEVERITIES.index(severity), self.logged.get(rule, -1)
        self.logged[rule] = max(level, before)
        return level > before

    def state_dict(self) -> dict[str, Any]:
        return {"logged": dict(self.logged)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.logged = dict(state_dict["logged"])
