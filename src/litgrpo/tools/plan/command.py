"""`plan`: what would a recipe need of memory, time and money? Without devices and weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from litgrpo.arguments import at_least, require
from litgrpo.cli.plan_keys import PLAN_KEYS
from litgrpo.cli.trainer_cli import OF_ONE_CALL, READING, LitGRPOCLI, keep_quiet
from litgrpo.tools.plan import telling
from litgrpo.tools.plan.fitting import proposal
from litgrpo.tools.plan.measuring import measured
from litgrpo.tools.plan.on_devices import Plan, plan_of
from litgrpo.tools.plan.schedule import schedule_of

DOES_NOT_FIT = 1  # exit code


class PlanCLI(LightningCLI):
    """Reads the command line of `fit`, and builds nothing."""

    def __init__(self, words: Sequence[str]) -> None:
        """Parse the words after the verb."""
        self.words = switched_on(words)
        super().__init__(
            **READING,
            parser_kwargs={"usage": "cli.py plan [-c RECIPE.yaml ...] [--chip v5e] [--chips 8]"},
            run=False,
            load_from_checkpoint_support=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Those of `fit`, and those of the plan."""
        LitGRPOCLI.add_arguments_to_parser(self, parser)  # type: ignore[arg-type]
        for name, (kind, default, text) in PLAN_KEYS.items():
            parser.add_argument(f"--{name}", type=kind, default=default, help=text)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse our words, not the program's."""
        self.config = parser.parse_args(self.words)

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings of `fit`, as plain values."""
        text = self.parser.dump(self.config, skip_unset=False, skip_link_targets=False)
        unwanted = OF_ONE_CALL | PLAN_KEYS.keys()
        return {name: each for name, each in yaml.safe_load(text).items() if name not in unwanted}

    def _set_seed(self) -> None:
        """Nothing is random here."""

    def instantiate_classes(self) -> None:
        """Nothing is built."""


def switched_on(words: Sequence[str]) -> list[str]:
    """Switches without their value are on."""
    following = [*words[1:], "--"]
    pairs = zip(words, following, strict=True)
    switches = [f"--{name}" for name, (kind, *_) in PLAN_KEYS.items() if kind is bool]
    return [f"{w}=true" if w in switches and after.startswith("-") else w for w, after in pairs]


def plan() -> None:
    """Print what a recipe needs; exit code 1 if that does not fit."""
    keep_quiet()
    words = sys.argv[2:]
    asked = PlanCLI(words)
    settings = asked.config
    at_least("iterations", settings.iterations, 1)
    at_least("val_prompts", settings.val_prompts, 1)
    if settings.measure:
        require(settings.chip is None, "measure runs on this machine: leave chip out, or measure.")
        tell_measured(asked)
        return
    found = plan_of(settings)
    print("\n".join(telling.as_text(found)))
    if settings.report is not None:
        content = json.dumps(telling.as_dict(found), indent=1)
        Path(settings.report).write_text(content + "\n", encoding="utf-8")
    fits = found.fits
    if settings.fit:
        fits = fits or tell_proposal(found, words)
    if not fits:
        raise SystemExit(DOES_NOT_FIT)


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
