"""Validation at moments of our own; Lightning has no public name for either."""

from __future__ import annotations

from typing import Any


def validate_now(trainer: Any) -> None:
    """What Lightning does to validate between two iterations."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.restarting = False  # a resumed run would skip what its checkpoint has counted
    trainer.validating = True
    loop.run()
    trainer.training = True


def validation_is_due(trainer: Any) -> bool:
    """Whether Lightning validates after the iteration that just ended."""
    loop = trainer.fit_loop
    return trainer.enable_validation and bool(
        loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
    )
