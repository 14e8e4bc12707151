"""What would make a recipe fit: the smallest change, those that learn the same first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from litgrpo.distributed.device import DIVIDING
from litgrpo.models.loading import LoRA
from litgrpo.tools.plan.devices import Device
from litgrpo.tools.plan.division import Chips, FullShard
from litgrpo.tools.plan.memory import Item, peak
from litgrpo.tools.plan.training import Training

# Left for the runtime, for what a compiler keeps besides, and for holes.
SPARE_FRAC = 0.1
SIZES = (1, 4, 8, 16, 32, 64)
AT_ONCE = (None, 64, 16, 4)  # rows that are decoded at once; others queue
MICRO_BATCHES = (64, 32, 16, 8, 4, 2, 1)
DIVIDES = {"tpu": Chips(), "cuda": FullShard()}
OVERLAYS = {"tpu": "configs/hardware/tpu_spmd.yaml", "cuda": "configs/hardware/fsdp2.yaml"}
Change = list[str]


@dataclass(frozen=True)
class Room:
    """Memory of a device.

    Args:
        device: of which kind.
        program: bytes that the program itself takes of it.
    """

    device: Device
    program: int = 0

    @property
    def usable(self) -> float:
        """Bytes."""
        return (1 - SPARE_FRAC) * self.device.memory

    def items(self, training: Training, number: int) -> list[Item]:
        """What each of so many devices holds."""
        program = Item("program", self.program, "always", "this process, without a model")
        return [program] * bool(self.program) + training.account(number)

    def fits(self, items: Sequence[Item]) -> bool:
        """Whether there is room, with some to spare."""
        return peak(items) <= self.usable

    def takes(self, training: Training, number: int) -> bool:
        """Whether so many devices take a recipe."""
        return not training.undivided(number) and self.fits(self.items(training, number))


def remedies(training: Training, number: int) -> Iterator[tuple[str, Training]]:
    """What a user could change, one after another and each on top of those before."""
    if not training.checkpointing:
        training = training.changed(checkpointing=True)
        yield "--model.precision.gradient_checkpointing true", training
    for rows in smaller(training, number):
        training = training.changed(work=replace(training.work, micro_rows=rows))
        yield f"--model.update.micro_batch_size {rows}", training
    if training.lora is None and training.work.rollouts:
        lora = LoRA()
        yield f"--model.lora.rank {lora.rank}", training.changed(lora=lora, reference=None)


def smaller(training: Training, number: int) -> list[int]:
    """Rows of smaller micro-batches; where one process cuts them, at least one for each device."""
    least = number if training.by_one_process else 1
    return [rows for rows in MICRO_BATCHES if least <= rows < training.work.micro_rows]


def proposal(room: Room, training: Training, number: int) -> Change | None:
    """The words that make it fit, the fewest first; None if none do."""
    changes = _changes(room, training, number)
    return next((change for change, other, n in changes if room.takes(other, n)), None)


def _changes(room: Room, training: Training, number: int) -> Iterator[tuple[Change, Training, int]]:
    """Every change with the recipe that it makes, the smallest first."""
    adapted = training.changed(lora=LoRA(), reference=None)
    both = (training, adapted)[: 1 + (training.lora is None and bool(training.work.rollouts))]
    yield from ((change, other, number) for change, other in _of_recipe(both, number))
    path = DIVIDING.get(room.device.kind, "")
    division = DIVIDES.get(room.device.kind, training.division)
    words: Change = []
    if not training.sharded:
        words = ["--trainer.strategy", path]
        both = tuple(each.changed(division=division, strategy=path) for each in both)
    for size in (size for size in SIZES if size > number and path):
        more = [*words, "--chips", str(size)]
        yield more, both[0], size
        yield from (([*more, *change], other, size) for change, other in _of_recipe(both, size))


def _of_recipe(both: Sequence[Training], number: int) -> Iterator[tuple[Change, Training]]:
    """Changes of the recipe alone: one, two, and with adapters, which learn something else.

    Args:
        both: the recipe, and where it has none the same with adapters.
        number: devices.
    """
    again = (False, True)[: 1 + (not both[0].checkpointing)]
    queues = AT_ONCE if both[0].may_queue else (None,)
    switches = (range(len(both)), queues, again, (None, *smaller(both[0], number)))
    for adapters, at_once, checkpointing, rows in sorted(product(*switches), key=_cost):
        change: Change = []
        other = both[adapters]
        if adapters:
            change += ["--model.lora.rank", str(LoRA().rank)]
        if at_once:
            change += ["--model.engine.init_args.max_rows", str(at_once)]
            other = other.changed(work=replace(other.work, max_rows=at_once))
        if checkpointing:
            change += ["--model.precision.gradient_checkpointing", "true"]
            other = other.changed(checkpointing=True)
        if rows:
            change += ["--model.update.micro_batch_size", str(rows)]
            other = other.changed(work=replace(other.work, micro_rows=rows))
        if change:
            yield change, other


def _cost(switches: tuple[int, int | None, bool, int | None]) -> tuple[int, int, int, int]:
    adapters, at_once, again, rows = switches
    number = again + (rows is not None) + (at_once is not None)
    return adapters, number, -(at_once or 0), -(rows or 0)
