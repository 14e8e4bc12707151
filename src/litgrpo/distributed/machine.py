"""Check that this machine has what a trainer needs, before one is built."""

from typing import Any

from litgrpo.arguments import import_by_path
from litgrpo.distributed import device


def check_machine(trainer: Any, rows: int | None) -> None:
    """Check the machine for what this trainer needs.

    Args:
        trainer: settings of the Trainer, `accelerator` and `strategy` among them.
        rows: N = B * G rows of a rollout, or None.

    Raises:
        ValueError: what is missing and what to do.
    """
    for path in device.PREFLIGHTS:
        import_by_path(path)(trainer, rows)
