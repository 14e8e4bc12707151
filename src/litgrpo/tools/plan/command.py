"""`plan`: what would a recipe need of memory, time and money? Without devices and weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from litgrpo.arguments import at_least, require
from litgrpo.cli.parser import RecipeCLI
from litgrpo.tools.plan import telling
from litgrpo.tools.plan.fitting import proposal
from litgrpo.tools.plan.measuring import measured
from litgrpo.tools.plan.on_devices import Plan, plan_of
from litgrpo.tools.plan.schedule import schedule_of

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
        chip: kind of device, a name of the table (default: v5e, or the one of trainer.accelerator).
        chips: number of devices that train (default: the trainer's; 8, or 1).
        samplers: number of further devices that generate, as servers.
        devices: your .yaml of devices, prices and sessions, over the one in the package.
        val_prompts: held-out prompts of one validation (default: 500).
        read_data: take lengths of rows and of the run from the recipe's data (default: for a CPU).
        iterations: number of iterations to plan for.
        model_config: a config.json or its folder, for a model that is not on this machine.
        report: also write the numbers to this .json file.
        fit: find the smallest change with which it fits.
        measure: run a few iterations here, in a temporary folder, and estimate the run's time.
    """
    asked: PlanCLI = given
    at_least("iterations", iterations, 1)
    at_least("val_prompts", val_prompts, 1)
    if measure:
        require(chip is None, "measure runs on this machine: leave out either chip or measure.")
        tell_measured(asked)
        return
    found = plan_of(asked.config)
    print("\n".join(telling.as_text(found)))
    if report is not None:
        content = json.dumps(telling.as_dict(found), indent=1)
        Path(report).write_text(content + "\n", encoding="utf-8")
    fits = found.fits
    if fit:
        fits = fits or tell_proposal(found, asked.typed)
    if not fits:
        raise SystemExit(DOES_NOT_FIT)


class PlanCLI(RecipeCLI):
    """Parse the command line of `fit`, with the options of `plan`; build nothing.

    Args:
        words: what follows the command.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.typed = list(words)
        super().__init__(words, "plan", extra=plan)


def tell_measured(asked: PlanCLI) -> None:
    """Print what a few iterations took, and what the whole run takes after them."""
    settings = asked.config
    schedule = schedule_of(settings, samples="objective" in settings.model.init_args)
    found = measured(asked.recipe)
    print("\n".join(telling.measured_text(found, schedule)))
    if settings.report is not None:
        content = {kind: asdict(each) | {"run": each.run(schedule)} for kind, each in found.items()}
        text = json.dumps(content | {"iterations": schedule.iterations}, indent=1)
        Path(settings.report).write_text(text + "\n", encoding="utf-8")


def tell_proposal(found: Plan, words: Sequence[str]) -> bool:
    """Print the smallest change that makes it fit, planned anew from the command line with it."""
    change = proposal(found.room, found.training, found.number)
    print()
    if change is None:
        print(
            "No change that plan knows makes it fit: a smaller model or larger devices are needed."
        )
        return False
    changed = plan_of(PlanCLI([*words, *change]).config)
    print(f"With {' '.join(change)}")
    print(f"  {telling.verdict(changed)}")
    return changed.fits
