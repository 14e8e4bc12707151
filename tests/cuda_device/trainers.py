"""Pytest plugin: give each single-device Trainer of the tests the simulated device.

    python -m tests.cuda_device -m pytest -p tests.cuda_device.trainers --precision bf16-mixed \\
        tests/test_recipes.py -k runs_an_iteration
"""

from __future__ import annotations

import functools
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --precision."""
    parser.addoption("--precision", default="32-true", help="of trainers that set none")


def pytest_configure(config: pytest.Config) -> None:
    """Replace the constructor of Lightning's Trainer."""
    from lightning.pytorch.trainer.trainer import Trainer

    construct, precision = Trainer.__init__, config.getoption("precision")

    @functools.wraps(construct)
    def on_cuda(self: Any, *args: Any, **options: Any) -> None:
        one_device = options.get("devices", 1) in (1, "auto", None)
        if one_device and options.get("strategy", "auto") == "auto":
            options |= {"accelerator": "cuda", "devices": 1}
            if options.get("precision") in (None, "32-true"):
                options["precision"] = precision
        construct(self, *args, **options)

    Trainer.__init__ = on_cuda  # type: ignore[method-assign]
