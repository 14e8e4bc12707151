"""What `plan` takes beside the command line of `fit`; nothing slow, as `--help` reads it."""

from __future__ import annotations

from typing import Any

CHIP = "Kind of device, a name of the table (default: v5e; or that of trainer.accelerator)."
CHIPS = "Number of devices that learn (default: the trainer's; 8, or 1)."
DEVICES = "Your .yaml of devices, prices and sessions, over the one in the package."
READ = "Take lengths of rows and of the run from the recipe's data (default: for a cpu)."
CONFIG = "A config.json or its folder, for a model that is not on this machine."
MEASURE = (
    "Run a few iterations here, in a folder that is thrown away, and tell the whole run's time."
)
# {name: (type, default, help)}
PLAN_KEYS: dict[str, tuple[Any, Any, str]] = {
    "chip": (str | None, None, CHIP),
    "chips": (int | None, None, CHIPS),
    "samplers": (int, 0, "Number of further devices that sample, as servers."),
    "devices": (str | None, None, DEVICES),
    "val_prompts": (int | None, None, "Held-out prompts of one validation (default: 500)."),
    "read_data": (bool | None, None, READ),
    "iterations": (int | None, None, "Plan for so many iterations."),
    "model_config": (str | None, None, CONFIG),
    "report": (str | None, None, "Write the numbers to this .json, too."),
    "fit": (bool, False, "Find the smallest change with which it fits."),
    "measure": (bool, False, MEASURE),
}
