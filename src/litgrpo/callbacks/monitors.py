"""Check that callbacks that monitor a metric will act: when, and on a metric that is logged."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from litgrpo.arguments import did_you_mean, require
from litgrpo.callbacks.protocol import TrainedModule
from litgrpo.distributed.messages import rank_zero_warn
from litgrpo.training.lightning_compat import acts_after_validation

EVALUATIONS = ("val/", "test/")
EPOCH_OPTION = {
    EarlyStopping: "check_on_train_epoch_end: true (after each pass over the data)",
    ModelCheckpoint: "every_n_train_steps: N, or save_on_train_epoch_end: true",
}


class MonitorChecks(Callback):
    """Stops a run in which EarlyStopping or ModelCheckpoint would never act.

    Both act after a validation by default, so they do nothing in a run without one; and a metric
    that is never logged would end the run at the first validation.

    Example:
        `Trainer(callbacks=[MonitorChecks()])`; `GRPO.configure_callbacks` adds it.
    """

    def __init__(self) -> None:
        self.is_checked = False

    def on_train_start(self, trainer: Any, pl_module: TrainedModule) -> None:
        """Check that the callbacks will act.

        Raises:
            ValueError: a callback waits for a validation, and the run has none.
        """
        self.is_checked = False
        if trainer.enable_validation or trainer.fast_dev_run:
            return
        if any(saves_never(each, trainer) for each in trainer.callbacks):
            rank_zero_warn(
                "ModelCheckpoint saves after each validation, but this run has none, so it never "
                "will: set data.val or data.val_fraction, or of the callback "
                f"{EPOCH_OPTION[ModelCheckpoint]}."
            )
        for callback in find_monitors(trainer):
            require(
                not acts_after_validation(callback, trainer),
                f"{type(callback).__name__} monitors {callback.monitor!r} after each validation, "
                "but this run has none, so it would never act. Set data.val or "
                f"data.val_fraction, or of the callback {epoch_option(callback)}.",
            )

    def on_train_batch_start(self, trainer: Any, pl_module: TrainedModule, *_: object) -> None:
        """After the first iteration, check that the monitored metrics are logged.

        Raises:
            ValueError: a metric is unknown.
        """
        if self.is_checked or not trainer.fit_loop.epoch_loop.batch_idx:
            return
        self.is_checked = True
        known = [*trainer.callback_metrics, *pl_module.evaluation_report]
        for callback in find_monitors(trainer):
            is_evaluation = callback.monitor.startswith(EVALUATIONS)
            if is_evaluation and not pl_module.evaluation_report:  # there was no validation yet
                continue
            near = did_you_mean(callback.monitor, known) or f"; logged: {', '.join(sorted(known))}"
            require(
                callback.monitor in known or not getattr(callback, "strict", True),
                f"{type(callback).__name__} monitors {callback.monitor!r}, which is not logged"
                f"{near}",
            )


def find_monitors(trainer: Any) -> list[Any]:
    """Return the callbacks that monitor a metric."""
    kinds = tuple(EPOCH_OPTION)
    return [
        each
        for each in trainer.callbacks
        if isinstance(each, kinds) and getattr(each, "monitor", None) is not None
    ]


def saves_never(callback: Any, trainer: Any) -> bool:
    """Return whether a ModelCheckpoint without a metric waits for a validation."""
    is_plain = isinstance(callback, ModelCheckpoint) and callback.monitor is None
    return is_plain and acts_after_validation(callback, trainer)


def epoch_option(callback: Any) -> str:
    """Return the options with which a callback acts without a validation."""
    return next(text for kind, text in EPOCH_OPTION.items() if isinstance(callback, kind))
