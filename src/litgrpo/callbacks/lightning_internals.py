"""All that callbacks and checkpointing use of Lightning without a public name; read in 2.6.6."""

from __future__ import annotations

from typing import Any

# How a strategy that insists on its own CheckpointIO (single_xla) accepts another.
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO

__all__ = ["WrappingCheckpointIO", "numbers_to_log", "validate_now", "validation_is_due"]


def validate_now(trainer: Any) -> None:
    """Validate between two iterations, as `_TrainingEpochLoop.on_advance_end` does."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.restarting = False  # a resumed run would skip the batches that its checkpoint counted
    trainer.validating = True
    loop.run()
    trainer.training = True


def validation_is_due(trainer: Any) -> bool:
    """Whether Lightning validates after the iteration that just ended."""
    loop = trainer.fit_loop
    return trainer.enable_validation and bool(
        loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
    )


def numbers_to_log(trainer: Any) -> dict[str, Any]:
    """What Lightning hands to the loggers when all callbacks have seen the iteration.

    (`trainer.logged_metrics` adds what was logged long ago.)
    """
    return dict(trainer._logger_connector.metrics["log"])
