"""Find the smallest change that makes a recipe fit; changes that keep the gradient come first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from litgrpo.distributed.device import DIVIDING
from litgrpo.models.loading import LoRA
from litgrpo.tools.plan.devices import Device
from litgrpo.tools.plan.memory import MemoryItem, peak_bytes
from litgrpo.tools.plan.sharding import FSDPSharding, XLASharding
from litgrpo.tools.plan.sizes import RecipeSizes

# Fraction of the memory left for the runtime, compiler buffers and fragmentation.
SPARE_FRAC = 0.1
DEVICE_COUNTS = (1, 4, 8, 16, 32, 64)
ROW_LIMITS = (64, 16, 4)  # rows decoded at once; others queue
MICRO_BATCHES = (64, 32, 16, 8, 4, 2, 1)
SHARDINGS = {"tpu": XLASharding(), "cuda": FSDPSharding()}
HARDWARE_CONFIGS = {"tpu": "configs/hardware/tpu_spmd.yaml", "cuda": "configs/hardware/fsdp2.yaml"}
Change = list[str]  # words to add to the command line


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of a device.

    Args:
        device: kind of device.
        program: bytes that the program itself takes.

    Example:
        >>> from litgrpo.tools.plan.devices import load_devices
        >>> MemoryBudget(load_devices().device("h100")).usable
        72000000000.0
    """

    device: Device
    program: int = 0

    @property
    def usable(self) -> float:
        """Usable bytes."""
        return (1 - SPARE_FRAC) * self.device.memory

    def items(self, recipe: RecipeSizes, number: int) -> list[MemoryItem]:
        """Return the memory that each of `number` devices needs."""
        items = recipe.count_memory(number)
        if self.program:
            how = "this process, without a model"
            items.insert(0, MemoryItem("program", self.program, "always", how))
        return items

    def fits(self, items: Sequence[MemoryItem]) -> bool:
        """Return whether the memory suffices, with some to spare."""
        return peak_bytes(items) <= self.usable

    def can_hold(self, recipe: RecipeSizes, number: int) -> bool:
        """Return whether a recipe fits on `number` devices."""
        return not recipe.uneven_split(number) and self.fits(self.items(recipe, number))


def suggest_changes(recipe: RecipeSizes, number: int) -> Iterator[tuple[str, RecipeSizes]]:
    """Yield changes in the order to try them, each in addition to those before."""
    if not recipe.checkpointing:
        recipe = recipe.with_settings(checkpointing=True)
        yield "--model.precision.gradient_checkpointing true", recipe
    for rows in smaller_micro_batches(recipe, number):
        recipe = recipe.with_settings(work=replace(recipe.work, micro_rows=rows))
        yield f"--model.update.micro_batch_size {rows}", recipe
    if recipe.lora is None and recipe.work.rollouts:
        lora = LoRA()
        yield f"--model.lora.rank {lora.rank}", recipe.with_settings(lora=lora, reference=None)


def smaller_micro_batches(recipe: RecipeSizes, number: int) -> list[int]:
    """Return smaller micro-batches; if one process splits them, at least a row per device."""
    least = number if recipe.single_process else 1
    return [rows for rows in MICRO_BATCHES if least <= rows < recipe.work.micro_rows]


def propose_change(budget: MemoryBudget, recipe: RecipeSizes, number: int) -> Change | None:
    """Return the smallest change that makes a recipe fit; None if no known one does."""
    for change, changed, devices in _changes(budget, recipe, number):
        if budget.can_hold(changed, devices):
            return change
    return None


def _changes(
    budget: MemoryBudget, recipe: RecipeSizes, number: int
) -> Iterator[tuple[Change, RecipeSizes, int]]:
    """Yield changes with the changed recipe and its number of devices, the smallest first."""
    adapted = None
    if recipe.lora is None and recipe.work.rollouts:
        adapted = recipe.with_settings(lora=LoRA(), reference=None)
    for change, changed in _recipe_changes(recipe, adapted, number):
        yield change, changed, number
    strategy = DIVIDING.get(budget.device.kind, "")
    if not strategy:
        return
    words: Change = []
    if not recipe.distributed:
        words = ["--trainer.strategy", strategy]
        sharding = SHARDINGS.get(budget.device.kind, recipe.sharding)
        recipe = recipe.with_settings(sharding=sharding, strategy=strategy)
        adapted = adapted and adapted.with_settings(sharding=sharding, strategy=strategy)
    for count in DEVICE_COUNTS:
        if count <= number:
            continue
        with_devices = [*words, "--chips", str(count)]
        yield with_devices, recipe, count
        for change, changed in _recipe_changes(recipe, adapted, count):
            yield [*with_devices, *change], changed, count


def _recipe_changes(
    recipe: RecipeSizes, adapted: RecipeSizes | None, number: int
) -> Iterator[tuple[Change, RecipeSizes]]:
    """Yield changes of the recipe alone, the smallest first.

    LoRA comes last, because it changes what is trained.

    Args:
        recipe: the recipe.
        adapted: the same with LoRA; None if it has LoRA already.
        number: devices.
    """
    bases = [recipe] if adapted is None else [recipe, adapted]
    checkpointing = [False] if recipe.checkpointing else [False, True]
    row_limits = [None, *ROW_LIMITS] if recipe.can_queue else [None]
    micro_batches = [None, *smaller_micro_batches(recipe, number)]
    switches = product(range(len(bases)), row_limits, checkpointing, micro_batches)
    for with_lora, max_rows, with_checkpointing, micro_rows in sorted(switches, key=_cost):
        change: Change = []
        changed = bases[with_lora]
        if with_lora:
            change += ["--model.lora.rank", str(LoRA().rank)]
        if max_rows:
            change += ["--model.engine.init_args.max_rows", str(max_rows)]
            changed = changed.with_settings(work=replace(changed.work, max_rows=max_rows))
        if with_checkpointing:
            change += ["--model.precision.gradient_checkpointing", "true"]
            changed = changed.with_settings(checkpointing=True)
        if micro_rows:
            change += ["--model.update.micro_batch_size", str(micro_rows)]
            changed = changed.with_settings(work=replace(changed.work, micro_rows=micro_rows))
        if change:
            yield change, changed


def _cost(switches: tuple[int, int | None, bool, int | None]) -> tuple[int, int, int, int]:
    """Order changes: LoRA last, then by their number, then the larger limits first."""
    with_lora, max_rows, with_checkpointing, micro_rows = switches
    number = with_checkpointing + (max_rows is not None) + (micro_rows is not None)
    return with_lora, number, -(max_rows or 0), -(micro_rows or 0)
