"""The command `plan`: does a recipe fit on a device?

Neither the device nor the weights are needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from litgrpo.arguments import require, require_folder_of
from litgrpo.plan import render
from litgrpo.plan.measure import measure_recipe, read_length
from litgrpo.plan.plan import make_plan

DOES_NOT_FIT = 1  # exit code


def plan(
    cli: Any,
    /,
    chip: str | None = None,
    chips: int | None = None,
    read_data: bool | None = None,
    model_config: str | None = None,
    measure: bool = False,
    report: str | None = None,
) -> None:
    """Count the memory of a recipe, and what to change if it does not fit (exit code 1).

    Args:
        cli: a parsed command line, `RecipeCLI(words, "plan", extra=plan)`.
        chip: kind of device: a name, or its memory as a number of GB (default: v5e, a100-80 or cpu,
            by trainer.accelerator; with auto what this machine has).
        chips: number of devices that train (default: the trainer's; 8, or 1).
        read_data: take the length of prompts from the recipe's data (default: if a CPU is chosen).
        model_config: a config.json or its folder, for a model that is not on this machine.
        measure: run five iterations here, in a temporary folder, and extrapolate to the whole run.
        report: also write the numbers to this .json file.
    """
    require_folder_of("report", report)
    if measure:
        require(chip is None, "measure runs on this machine: leave out either chip or measure.")
        length, times = read_length(cli.config), measure_recipe(cli.recipe)
        _show(render.measured_lines(times, length), render.measured_dict(times, length), report)
        return
    recipe_plan = make_plan(cli.config)
    _show(render.plan_lines(recipe_plan), render.plan_dict(recipe_plan), report)
    if not recipe_plan.fits:
        raise SystemExit(DOES_NOT_FIT)


def _show(lines: Iterable[str], numbers: dict[str, Any], path: str | None) -> None:
    print("\n".join(lines))
    if path is not None:
        Path(path).write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
