"""The command `plan`: estimate memory, run time and cost of a recipe.

Neither the devices nor the weights are needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from litgrpo.arguments import at_least, require
from litgrpo.cli.parser import RecipeCLI
from litgrpo.tools.plan import render
from litgrpo.tools.plan.fitting import propose_change
from litgrpo.tools.plan.measuring import measure_recipe
from litgrpo.tools.plan.plan import Plan, make_plan
from litgrpo.tools.plan.schedule import read_schedule

DOES_NOT_FIT = 1  # exit code


def plan(  # noqa: PLR0913, PLR0917 (each is an option)
    given: Any,
    chip: str | None = None,
    chips: int | None = None,
    samplers: int = 0,
    devices: str | None = None,
    val_prompts: int | None = None,
    read_data: bool | None = None,
    iterations: int | None = None,
    model_config: str | None = None,
    report: str | None = None,
    fit: bool = False,
    measure: bool = False,
) -> None:
    """Estimate memory, run time and cost of a recipe; exit code 1 if it does not fit.

    Args:
        given: a parsed command line, `PlanCLI(words)`.
        chip: kind of device, a name of the table (default: v5e, a100-80 or cpu, by
            trainer.accelerator; with auto what this machine has).
        chips: number of devices that train (default: the trainer's; 8, or 1).
        samplers: number of further devices that generate, as servers.
        devices: your .yaml of devices, prices and sessions, over the one in the package.
        val_prompts: held-out prompts of one validation (default: 500).
        read_data: take lengths of rows and of the run from the recipe's data (default: if a CPU is
            chosen).
        iterations: number of iterations to plan for.
        model_config: a config.json or its folder, for a model that is not on this machine.
        report: also write the numbers to this .json file.
        fit: find the smallest change with which it fits.
        measure: run a few iterations here, in a temporary folder, and estimate the run's time.
    """
    cli: PlanCLI = given
    at_least("iterations", iterations, 1)
    at_least("val_prompts", val_prompts, 1)
    if measure:
        require(chip is None, "measure runs on this machine: leave out either chip or measure.")
        print_measured(cli)
        return
    found = make_plan(cli.config)
    print("\n".join(render.render_text(found)))
    if report is not None:
        _write_json(report, render.to_dict(found))
    fits = found.fits
    if fit and not fits:
        fits = print_proposal(found, cli.typed)
    if not fits:
        raise SystemExit(DOES_NOT_FIT)


class PlanCLI(RecipeCLI):
    """Parse the command line of `fit`, with the options of `plan`; build nothing.

    Args:
        words: words after the command.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.typed = list(words)
        super().__init__(words, "plan", extra=plan)


def print_measured(cli: PlanCLI) -> None:
    """Run a few iterations; print their times and the estimate for the whole run."""
    settings = cli.config
    schedule = read_schedule(settings, is_grpo="objective" in settings.model.init_args)
    times = measure_recipe(cli.recipe)
    print("\n".join(render.render_measured(times, schedule)))
    if settings.report is not None:
        content = {kind: asdict(each) | {"run": each.run(schedule)} for kind, each in times.items()}
        _write_json(settings.report, content | {"iterations": schedule.iterations})


def print_proposal(found: Plan, words: Sequence[str]) -> bool:
    """Print the smallest change that makes a recipe fit; return whether there is one.

    The plan with the change is computed from its command line, like any other.
    """
    change = propose_change(found.budget, found.recipe, found.number)
    print()
    if change is None:
        print("No known change makes it fit; use a smaller model or larger devices.")
        return False
    changed = make_plan(PlanCLI([*words, *change]).config)
    print(f"With {' '.join(change)}")
    print(f"  {render.render_verdict(changed)}")
    return changed.fits


def _write_json(path: str, content: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
