"""A recipe on devices: what a command line asks `plan` about."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Any

from litgrpo.arguments import at_least, require
from litgrpo.tools.plan.data_here import sets_of, told_by
from litgrpo.tools.plan.devices import Device, Table, devices
from litgrpo.tools.plan.division import FullShard
from litgrpo.tools.plan.fitting import Room
from litgrpo.tools.plan.memory import Item
from litgrpo.tools.plan.seconds import Estimate
from litgrpo.tools.plan.training import Training, read

# {trainer.accelerator: device}, where --chip does not say.
USUAL = {"cpu": "cpu", "cuda": "a100-80", "gpu": "a100-80"}
USUAL_CHIP, USUAL_NUMBER = "v5e", 8


@dataclass(frozen=True)
class Plan:
    """A recipe on devices.

    Args:
        training: what the recipe asks for.
        device: of which kind.
        number: how many learn.
        samplers: how many others sample.
        table: what is known of devices.
    """

    training: Training
    device: Device
    number: int
    samplers: int
    table: Table

    @property
    def room(self) -> Room:
        """Memory of each device that learns."""
        return Room(self.device, program_bytes() * (self.device.kind == "cpu"))

    @property
    def items(self) -> list[Item]:
        """What each device holds that learns."""
        return self.room.items(self.training, self.number)

    @property
    def estimate(self) -> Estimate:
        """Of its time."""
        return Estimate(self.training, self.device, self.number, self.table.assumed, self.samplers)

    @property
    def fits(self) -> bool:
        """Whether there is room, and rows can be divided."""
        return not self.training.undivided(self.number) and self.room.fits(self.items)


def plan_of(settings: Any) -> Plan:
    """The plan of a command line.

    Args:
        settings: parsed by `PlanCLI`.

    Raises:
        ValueError: of devices that there are not, or that the strategy does not share.
    """
    table = devices(settings.devices)
    accelerator = str(settings.trainer.accelerator)
    device = table.device(settings.chip or USUAL.get(accelerator, USUAL_CHIP))
    training = read(settings, static_shapes=device.kind == "tpu")
    if settings.read_data or (settings.read_data is None and device.kind == "cpu"):
        training = told_by(sets_of(settings), training)
    number = settings.chips or devices_of(training, settings.trainer)
    at_least("chips", settings.chips, 1)
    at_least("samplers", settings.samplers, 0)
    require(
        number == 1 or training.sharded,
        f"chips is {number}, but trainer.strategy is {training.strategy!r}, under which every "
        "chip holds the whole model. Give -c configs/hardware/tpu_spmd.yaml, on GPUs fsdp2.yaml, "
        "or --chips 1.",
    )
    elsewhere = training.work.sampled == "elsewhere"
    require(
        elsewhere or not settings.samplers,
        f"samplers is {settings.samplers}, but model.engine samples where it learns: give "
        "-c configs/hardware/server.yaml, or leave samplers out.",
    )
    samplers = settings.samplers or int(elsewhere)
    return Plan(training, device, number, samplers, table)


def devices_of(training: Training, trainer: Any) -> int:
    """How many devices a trainer has where it says so, else how many are usual."""
    counts = (trainer.devices, trainer.num_nodes)
    usual = (1, USUAL_NUMBER)[training.sharded]
    said = all(str(count).isdigit() for count in counts)
    several = int(counts[0]) * int(counts[1]) if said else usual
    return several if isinstance(training.division, FullShard) else usual


def program_bytes() -> int:
    """What this process holds without a model: the same imports as a run's."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
