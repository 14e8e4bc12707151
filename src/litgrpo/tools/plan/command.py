"""`plan`: would this recipe fit into the memory of these chips? Asked without chips and weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from litgrpo.cli.trainer_cli import READING, LitGRPOCLI
from litgrpo.models.loading import LoRA
from litgrpo.tools.plan.memory import Item, peak
from litgrpo.tools.plan.recipe import Recipe, read

DOES_NOT_FIT = 1  # exit code
# GB (10^9 bytes) of each chip, from Google Cloud's pages on TPU versions.
CHIPS = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32}
# Left for the runtime, for what the compiler keeps besides, and for holes.
SPARE_FRAC = 0.1
SIZES = (1, 4, 8, 16, 32, 64)


class PlanCLI(LightningCLI):
    """Reads the command line of `fit`, and builds nothing."""

    def __init__(self, words: Sequence[str]) -> None:
        """Parse the words after the verb."""
        self.words = list(words)
        super().__init__(
            **READING,
            parser_kwargs={"usage": "cli.py plan [-c RECIPE.yaml ...] [--chip v5e] [--chips 8]"},
            run=False,
            load_from_checkpoint_support=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Those of `fit`, and those of the plan."""
        LitGRPOCLI.add_arguments_to_parser(self, parser)  # type: ignore[arg-type]
        known = ", ".join(f"{name} {memory} GB" for name, memory in CHIPS.items())
        parser.add_argument("--chip", type=str, default="v5e", help=f"Kind of chip: {known}.")
        parser.add_argument(
            "--chips", type=int | None, default=None, help="Number of chips (default: 8, or 1)."
        )
        parser.add_argument(
            "--model_config",
            type=str | None,
            default=None,
            help="A config.json or its folder, for a model that is not on this machine.",
        )
        parser.add_argument(
            "--report", type=str | None, default=None, help="Write the numbers to this .json, too."
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse our words, not the program's."""
        self.config = parser.parse_args(self.words)

    def _set_seed(self) -> None:
        """Nothing is random here."""

    def instantiate_classes(self) -> None:
        """Nothing is built."""


def plan() -> None:
    """Print what a recipe needs on each chip; exit code 1 if that does not fit."""
    settings = PlanCLI(sys.argv[2:]).config
    chip = settings.chip
    if chip not in CHIPS:
        raise ValueError(f"chip is {chip!r}; it can be {', '.join(CHIPS)}")
    recipe = read(settings)
    number = settings.chips
    if number is None:
        number = 8 if recipe.sharded else 1
    if number < 1:
        raise ValueError(f"chips is {number}; it must be at least 1")
    if number > 1 and not recipe.sharded:
        raise ValueError(
            f"chips is {number}, but trainer.strategy is {recipe.strategy!r}, under which every "
            "chip holds the whole model. Give -c configs/hardware/tpu_spmd.yaml, or --chips 1."
        )
    found = recipe.account(number)
    print("\n".join(as_text(recipe, found, chip, number)))
    if settings.report is not None:
        content = as_dict(found, chip, number)
        Path(settings.report).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if recipe.undivided(number) or not fits(found, chip):
        raise SystemExit(DOES_NOT_FIT)


# --- the verdict ---


def fits(items: Sequence[Item], chip: str) -> bool:
    """Whether there is room on such a chip, with some to spare."""
    return peak(items) <= (1 - SPARE_FRAC) * CHIPS[chip] * 1e9


def remedies(recipe: Recipe, number: int) -> Iterator[tuple[str, Recipe]]:
    """What a user could change, one after another and each on top of those before."""
    if not recipe.checkpointing:
        recipe = replace(recipe, checkpointing=True)
        yield "--model.precision.gradient_checkpointing true", recipe
    for rows in (64, 32, 16, 8, 4, 2, 1):
        if number <= rows < recipe.work.micro_rows:
            recipe = replace(recipe, work=replace(recipe.work, micro_rows=rows))
            yield f"--model.update.micro_batch_size {rows}", recipe
    if recipe.lora is None and recipe.work.rollouts:
        lora = LoRA()
        recipe = replace(recipe, lora=lora, reference=None)
        yield f"--model.lora.rank {lora.rank}", recipe


def as_text(recipe: Recipe, items: Sequence[Item], chip: str, number: int) -> Iterator[str]:
    """The plan in lines."""
    shared = "divided over them" if number > 1 else "whole on it"
    yield f"Each of {number} x {chip} ({CHIPS[chip]} GB); weights {shared}, in {recipe.dtype}"
    yield f"Optimizer {recipe.optimizer_name}, strategy {recipe.strategy}; GB are 10^9 bytes"
    yield ""
    yield from table(
        ("what", "when", "GB", "how counted"),
        [(item.name, item.phase, gigabytes(item.size), item.how) for item in items],
    )
    yield ""
    limit = f"{(1 - SPARE_FRAC) * CHIPS[chip]:.1f} of {CHIPS[chip]} GB"
    verdict = "FITS" if fits(items, chip) else "DOES NOT FIT"
    worst = "always, and the larger of rollout and learning"
    yield f"{verdict}: {gigabytes(peak(items))} GB ({worst}); usable are {limit}"
    if recipe.undivided(number):
        yield f"BUT {recipe.undivided(number)} cannot be divided evenly over {number} chips"
    if recipe.judges:
        yield f"Not counted: reward models ({', '.join(recipe.judges)})"
    yield ""
    sizes = [size for size in SIZES if recipe.sharded or size == 1]
    needed = {size: recipe.account(size) for size in sizes}
    heads = ("chip", *(f"{size} chip{'s' * (size > 1)}" for size in sizes))
    rows = [
        (f"{name}, {memory} GB", *(cell(recipe, needed[size], name, size) for size in sizes))
        for name, memory in CHIPS.items()
    ]
    yield from table(heads, rows)
    if any(recipe.undivided(size) for size in sizes):
        yield "rows: a rollout or a micro-batch cannot be divided evenly over so many chips"
    if not fits(items, chip):
        yield ""
        yield from advice(recipe, chip, number)


def advice(recipe: Recipe, chip: str, number: int) -> Iterator[str]:
    """What would make it fit, in lines."""
    yield "What to change, each on top of those before:"
    for words, changed in remedies(recipe, number):
        found = changed.account(number)
        yield f"  {words:<48} {mark(found, chip)}"
        if fits(found, chip):
            return
    if recipe.sharded:
        more = (size for size in SIZES if size > number and not recipe.undivided(size))
        enough = (size for size in more if fits(recipe.account(size), chip))
        size = next(enough, None)
        yield f"  or --chips {size}, nothing else changed" if size else "  or another kind of chip"
    else:
        yield "  or divide it over several chips: -c configs/hardware/tpu_spmd.yaml"


def mark(items: Sequence[Item], chip: str) -> str:
    """What is needed, and whether it is there."""
    return f"{gigabytes(peak(items))} {'fits' if fits(items, chip) else 'no'}"


def cell(recipe: Recipe, items: Sequence[Item], chip: str, number: int) -> str:
    """The same, or that the rows are too few for so many chips."""
    return "rows" if recipe.undivided(number) else mark(items, chip)


def gigabytes(size: int) -> str:
    """Bytes in GB."""
    return f"{size / 1e9:.2f}" if size > 1e8 else f"{size / 1e9:.4f}"  # noqa: PLR2004 (0.1 GB)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table with aligned columns."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield f"| {' | '.join(cells)} |"


def as_dict(items: Sequence[Item], chip: str, number: int) -> dict[str, Any]:
    """The plan's numbers, in bytes."""
    return {
        "chip": chip,
        "chips": number,
        "chip_bytes": int(CHIPS[chip] * 1e9),
        "peak_bytes": peak(items),
        "fits": fits(items, chip),
        "items": [
            {"name": item.name, "phase": item.phase, "bytes": item.size, "how": item.how}
            for item in items
        ],
    }
