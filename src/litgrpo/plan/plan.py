"""A recipe on devices: what it needs of their memory, and if it fits."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from functools import cache
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.accelerators import CUDAAccelerator, XLAAccelerator

from litgrpo.arguments import at_least, require
from litgrpo.plan.devices import Device, find_device
from litgrpo.plan.memory import MemoryItem, peak_bytes
from litgrpo.plan.sharding import FSDPSharding
from litgrpo.plan.sizes import RecipeSizes, apply_data, load_data, read_sizes

# {kind of device: its name} if --chip is not given.
DEFAULT_DEVICES = {"cpu": "cpu", "cuda": "a100-80", "tpu": "v5e"}
DEFAULT_NUMBER = 8


@dataclass(frozen=True)
class Plan:
    """A recipe on devices.

    Args:
        recipe: sizes of the recipe.
        device: kind of device.
        number: devices that train.
        has_lengths: lengths of rows are those of the data; otherwise the limits of the recipe.
    """

    recipe: RecipeSizes
    device: Device
    number: int
    has_lengths: bool = False

    def items(self, recipe: RecipeSizes | None = None, number: int = 0) -> list[MemoryItem]:
        """Return the memory that each device needs.

        Args:
            recipe: a changed recipe; None: that of the plan.
            number: another number of devices; 0: that of the plan.
        """
        items = (recipe or self.recipe).count_memory(number or self.number)
        if self.device.kind == "cpu":  # the program shares the memory with the model
            how = "this process, without a model"
            items.insert(0, MemoryItem("program", process_bytes(), "always", how))
        return items

    def peak(self, recipe: RecipeSizes | None = None, number: int = 0) -> int:
        """Return the peak of `items`, in bytes."""
        return peak_bytes(self.items(recipe, number))

    @property
    def uneven(self) -> str | None:
        """What cannot be split evenly over the devices; None if everything can."""
        return self.recipe.uneven_split(self.number)

    @property
    def fits(self) -> bool:
        """True if the memory suffices and the rows can be split evenly."""
        return not self.uneven and self.peak() <= self.device.usable


def make_plan(settings: Namespace) -> Plan:
    """Plan a command line.

    Raises:
        ValueError: the device is unknown, or the strategy cannot use this many.
    """
    at_least("chips", settings.chips, 1)
    accelerator = str(settings.trainer.accelerator)
    if settings.chip is None:
        device = find_device(DEFAULT_DEVICES[device_kind(accelerator)])
    else:  # a number of GB is that of a GPU, also if this machine has none
        device = find_device(settings.chip, device_kind(accelerator.replace("auto", "cuda")))
    recipe = read_sizes(settings, static_shapes=device.kind == "tpu")
    is_chosen = settings.chip is not None or accelerator != "auto"
    reads_data = settings.read_data
    if reads_data is None:
        reads_data = device.kind == "cpu" and is_chosen
    if reads_data:
        recipe = apply_data(load_data(settings).sets["train"], recipe)
    number = settings.chips or count_devices(recipe, settings.trainer)
    require(
        number == 1 or recipe.distributed,
        f"chips is {number}, but with trainer.strategy {recipe.strategy!r} every chip holds the "
        "whole model. Add -c configs/hardware/tpu_spmd.yaml (TPU) or "
        "-c configs/hardware/fsdp2.yaml (GPU), or set --chips 1.",
    )
    return Plan(recipe, device, number, reads_data)


def device_kind(accelerator: str) -> str:
    """Return the kind of device of a trainer's accelerator; `auto` is what this machine has."""
    if accelerator == "auto":
        kinds: dict[str, Any] = {"tpu": XLAAccelerator, "cuda": CUDAAccelerator}
        return next((name for name, kind in kinds.items() if kind.is_available()), "cpu")
    kind = "cuda" if accelerator == "gpu" else accelerator
    return kind if kind in DEFAULT_DEVICES else "cpu"


def count_devices(recipe: RecipeSizes, trainer: Namespace) -> int:
    """Return the number of devices of a trainer, or a default if it gives none."""
    default = DEFAULT_NUMBER if recipe.distributed else 1
    devices, nodes = str(trainer.devices), str(trainer.num_nodes)
    if isinstance(recipe.sharding, FSDPSharding) and devices.isdigit() and nodes.isdigit():
        return int(devices) * int(nodes)
    return default


@cache
def process_bytes() -> int:
    """Return the memory of this process, which has the same imports as a run but no model."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
