"""All that callbacks and checkpointing use of Lightning without a public name; read in 2.6.6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# How a strategy that insists on its own CheckpointIO (single_xla) accepts another.
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from torch import Tensor

__all__ = [
    "WrappingCheckpointIO",
    "log_numbers",
    "numbers_to_log",
    "validate_now",
    "validation_is_due",
]


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


def log_numbers(module: Any, numbers: Mapping[str, Tensor]) -> None:
    """Log an iteration's numbers as `LightningModule.log_dict` does, in a fifth of its time.

    `log_dict` looks for tensors to move in everything that belongs to a number, each time. Here
    only names that are new, and the first, which resets what an epoch before left, go that way.

    Args:
        module: in a step or hook of training.
        numbers: scalars on the device of those logged before under the same names.
    """
    hook, results = module._current_fx_name, module.trainer._results
    for place, (name, value) in enumerate(numbers.items()):
        key = f"{hook}.{name}"
        if place and results is not None and key in results:
            results.update_metrics(key, value, batch_size=1)
        else:
            module.log(name, value)


def numbers_to_log(trainer: Any) -> dict[str, Any]:
    """What Lightning hands to the loggers when all callbacks have seen the iteration.

    (`trainer.logged_metrics` adds what was logged long ago.)
    """
    return dict(trainer._logger_connector.metrics["log"])
