"""`plan`: would this recipe fit into the memory of these chips? Asked without chips and weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch.optim import AdamW, Optimizer

from litgrpo.arguments import at_least, require
from litgrpo.cli.trainer_cli import READING, LitGRPOCLI
from litgrpo.learner.optimization import DefaultAdamW
from litgrpo.models.loading import LoRA
from litgrpo.tools.plan.memory import Item, peak
from litgrpo.tools.plan.training import Training, read

DOES_NOT_FIT = 1  # exit code
# GB (10^9 bytes) of each chip, from Google Cloud's pages on TPU versions.
CHIPS = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32}
# Left for the runtime, for what the compiler keeps besides, and for holes.
SPARE_FRAC = 0.1
SIZES = (1, 4, 8, 16, 32, 64)
MICRO_BATCHES = (64, 32, 16, 8, 4, 2, 1)


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
    require(chip in CHIPS, f"chip is {chip!r}; it can be {', '.join(CHIPS)}")
    training = read(settings)
    number = (8 if training.sharded else 1) if settings.chips is None else settings.chips
    at_least("chips", number, 1)
    require(
        number == 1 or training.sharded,
        f"chips is {number}, but trainer.strategy is {training.strategy!r}, under which every "
        "chip holds the whole model. Give -c configs/hardware/tpu_spmd.yaml, or --chips 1.",
    )
    found = training.account(number)
    print("\n".join(as_text(training, found, chip, number)))
    if settings.report is not None:
        content = as_dict(found, chip, number)
        Path(settings.report).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if training.undivided(number) or not fits(found, chip):
        raise SystemExit(DOES_NOT_FIT)


def fits(items: Sequence[Item], chip: str) -> bool:
    """Whether there is room on such a chip, with some to spare."""
    return peak(items) <= (1 - SPARE_FRAC) * CHIPS[chip] * 1e9


def remedies(training: Training, number: int) -> Iterator[tuple[str, Training]]:
    """What a user could change, one after another and each on top of those before."""
    if not training.checkpointing:
        training = training.changed(checkpointing=True)
        yield "--model.precision.gradient_checkpointing true", training
    most = training.work.micro_rows
    for rows in (rows for rows in MICRO_BATCHES if number <= rows < most):
        training = training.changed(work=replace(training.work, micro_rows=rows))
        yield f"--model.update.micro_batch_size {rows}", training
    if training.lora is None and training.work.rollouts:
        lora = LoRA()
        yield f"--model.lora.rank {lora.rank}", training.changed(lora=lora, reference=None)


def as_text(training: Training, items: Sequence[Item], chip: str, number: int) -> Iterator[str]:
    """The plan in lines."""
    shared = "divided over them" if number > 1 else "whole on it"
    yield f"Each of {number} x {chip} ({CHIPS[chip]} GB); weights {shared}, in {training.dtype}"
    optimizer = optimizer_name(training.optimizer)
    yield f"Optimizer {optimizer}, strategy {training.strategy}; GB are 10^9 bytes"
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
    if training.undivided(number):
        yield f"BUT {training.undivided(number)} cannot be divided evenly over {number} chips"
    if training.judges:
        yield f"Not counted: reward models ({', '.join(training.judges)})"
    yield ""
    yield from chip_table(training)
    if not fits(items, chip):
        yield ""
        yield from advice(training, chip, number)


def optimizer_name(optimizer: partial[Optimizer]) -> str:
    """Class and learning rate."""
    kind = optimizer.func
    lr = optimizer.keywords.get("lr")
    name = AdamW.__name__ if kind is DefaultAdamW else kind.__name__
    return name if lr is None else f"{name}, lr {lr:.3g}"


def chip_table(training: Training) -> Iterator[str]:
    """What is needed on each kind and number of chips, and whether it is there."""
    sizes = [size for size in SIZES if training.sharded or size == 1]
    needed = {f"{size} x": training.account(size) for size in sizes if not training.undivided(size)}
    rows = [
        (f"{name}, {memory} GB", *(mark(items, name) for items in needed.values()))
        for name, memory in CHIPS.items()
    ]
    yield from table(("chip", *needed), rows)
    if len(needed) < len(sizes):
        yield "More chips than these cannot divide the rows of a rollout evenly."


def advice(training: Training, chip: str, number: int) -> Iterator[str]:
    """What would make it fit, in lines."""
    yield "What to change, each on top of those before:"
    for words, changed in remedies(training, number):
        found = changed.account(number)
        yield f"  {words:<48} {mark(found, chip)}"
        if fits(found, chip):
            return
    if not training.sharded:
        yield "  or divide it over several chips: -c configs/hardware/tpu_spmd.yaml"
        return
    more = (size for size in SIZES if size > number and not training.undivided(size))
    enough = (size for size in more if fits(training.account(size), chip))
    found_size = next((f"--chips {size}, nothing else changed" for size in enough), None)
    yield f"  or {found_size or 'another kind of chip'}"


def mark(items: Sequence[Item], chip: str) -> str:
    """What is needed, and whether it is there."""
    return f"{gigabytes(peak(items))} {'fits' if fits(items, chip) else 'no'}"


def gigabytes(size: int) -> str:
    """Bytes in GB."""
    return f"{size / 1e9:.2f}" if size > 1e8 else f"{size / 1e9:.4f}"  # noqa: PLR2004 (0.1 GB)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for line in (head, ["-" * width for width in widths], *rows):
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
