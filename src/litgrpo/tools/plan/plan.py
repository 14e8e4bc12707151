"""A recipe on devices: memory, time, and what the layout needs of hosts, network and disk."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.accelerators import CUDAAccelerator, XLAAccelerator

from litgrpo.arguments import at_least, require
from litgrpo.tools.plan.devices import ZERO, Bounds, Device, DeviceTable, load_devices
from litgrpo.tools.plan.fitting import SPARE_FRAC, MemoryBudget
from litgrpo.tools.plan.memory import MemoryItem
from litgrpo.tools.plan.sharding import FSDPSharding, XLASharding, total_bytes
from litgrpo.tools.plan.sizes import RecipeSizes, apply_data, load_data, read_sizes
from litgrpo.tools.plan.time_model import TimeEstimate

# {trainer.accelerator: device} if --chip is not given; `auto` is what this machine has.
DEFAULT_DEVICES = {"cpu": "cpu", "cuda": "a100-80", "gpu": "a100-80", "tpu": "v5e"}
DEFAULT_NUMBER = 8
VLLM_BYTES = 2  # per weight and per number of the KV cache in vLLM: bfloat16
DEVICES_PER_HOST = 8


@dataclass(frozen=True)
class Plan:
    """A recipe on devices.

    Args:
        recipe: sizes of the recipe.
        device: kind of device.
        number: devices that train.
        samplers: further devices that generate.
        table: known devices.

    Example:
        plan = make_plan(PlanCLI(["-c", "configs/quickstart.yaml", "--chip", "h100"]).config)
        plan.device.name, plan.number, plan.fits  # ("h100", 1, True)
    """

    recipe: RecipeSizes
    device: Device
    number: int
    samplers: int
    table: DeviceTable

    @property
    def budget(self) -> MemoryBudget:
        """Memory of each device that trains."""
        # On a CPU the program shares the memory with the model.
        program = process_bytes() if self.device.kind == "cpu" else 0
        return MemoryBudget(self.device, program)

    @property
    def items(self) -> list[MemoryItem]:
        """Memory that each device that trains needs."""
        return self.budget.items(self.recipe, self.number)

    @property
    def estimate(self) -> TimeEstimate:
        """Run time."""
        return TimeEstimate(
            self.recipe, self.device, self.number, self.table.assumptions, self.samplers
        )

    @property
    def fits(self) -> bool:
        """True if the memory suffices and the rows can be split evenly."""
        return not self.recipe.uneven_split(self.number) and self.budget.fits(self.items)


def make_plan(settings: Namespace) -> Plan:
    """Plan a command line.

    Args:
        settings: parsed by `PlanCLI`.

    Raises:
        ValueError: the device is unknown, or the strategy cannot use this many.
    """
    table = load_devices(settings.devices)
    accelerator = str(settings.trainer.accelerator)
    device = table.device(settings.chip or default_device(accelerator))
    recipe = read_sizes(settings, static_shapes=device.kind == "tpu")
    is_chosen = settings.chip is not None or accelerator != "auto"
    if settings.read_data or (settings.read_data is None and device.kind == "cpu" and is_chosen):
        recipe = apply_data(load_data(settings), recipe)
    number = settings.chips or count_devices(recipe, settings.trainer)
    at_least("chips", settings.chips, 1)
    at_least("samplers", settings.samplers, 0)
    require(
        number == 1 or recipe.distributed,
        f"chips is {number}, but with trainer.strategy {recipe.strategy!r} every chip holds the "
        "whole model. Add -c configs/hardware/tpu_spmd.yaml (TPU) or "
        "-c configs/hardware/fsdp2.yaml (GPU), or set --chips 1.",
    )
    uses_servers = recipe.work.sampling == "servers"
    require(
        uses_servers or not settings.samplers,
        f"samplers is {settings.samplers}, but model.engine generates on the devices that train. "
        "Add -c configs/hardware/server.yaml, or leave out samplers.",
    )
    samplers = settings.samplers or int(uses_servers)
    return Plan(recipe, device, number, samplers, table)


def default_device(accelerator: str) -> str:
    """Return the device of the table for a trainer's accelerator."""
    if accelerator == "auto":
        found: dict[str, Any] = {"tpu": XLAAccelerator, "cuda": CUDAAccelerator}
        accelerator = next((name for name, each in found.items() if each.is_available()), "cpu")
    return DEFAULT_DEVICES.get(accelerator, "cpu")


def count_devices(recipe: RecipeSizes, trainer: Namespace) -> int:
    """Return the number of devices of a trainer, or a default if it gives none."""
    default = DEFAULT_NUMBER if recipe.distributed else 1
    devices, nodes = str(trainer.devices), str(trainer.num_nodes)
    if isinstance(recipe.sharding, FSDPSharding) and devices.isdigit() and nodes.isdigit():
        return int(devices) * int(nodes)
    return default


def process_bytes() -> int:
    """Return the memory of this process, which has the same imports as a run but no model."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class ClusterLayout:
    """Requirements of a plan with several devices.

    Args:
        learning: bytes of a device during the update.
        rollout: bytes of a device that trains, during the rollout, without its rows.
        sampler: bytes of a device that generates, without its rows.
        tokens: tokens whose keys and values fit on a device that generates.
        rows: rows of full length that it decodes at once; others queue.
        rows_per_rollout: rows of a rollout on it.
        published: bytes sent to the samplers in each iteration.
        publishing: seconds of that.
        host_load: bytes of a host's memory while the model is loaded.
        host_save: bytes of a host's memory while a checkpoint is written.
        disk: bytes of one checkpoint.

    Example:
        layout = make_layout(plan)
        layout.rows, layout.rows_per_rollout  # (512, 64): all rows are decoded at once
    """

    learning: int
    rollout: int
    sampler: int
    tokens: int
    rows: int
    rows_per_rollout: int
    published: int
    publishing: Bounds
    host_load: int
    host_save: int
    disk: int


def phase_bytes(items: Sequence[MemoryItem], phase: str, without: Sequence[str] = ()) -> int:
    """Add the bytes that are always needed and those of one phase, without some items."""
    return sum(i.size for i in items if i.phase in ("always", phase) and i.name not in without)


def make_layout(plan: Plan) -> ClusterLayout:
    """Compute the requirements for rows, hosts, network and disk.

    Args:
        plan: of GRPO.
    """
    recipe, work, models = plan.recipe, plan.recipe.work, plan.recipe.models
    policy = models.compute or models.policy
    vllm_weights = VLLM_BYTES * sum(weight.numel() for weight in policy.weights)
    caches = ("cache, prompts", "cache, completions")
    rollout = phase_bytes(plan.items, "rollout", without=caches)
    prompts, group = work.rollouts[0]
    if work.sampling == "trainer":
        token = policy.cache_numbers * work.cache_bytes
        # LocalEngine caches a prompt once per group, and a completion twice while it grows.
        row = work.prompt_len / group + 2 * work.completion_len
        published, publishing = 0, ZERO
    else:
        token = policy.cache_numbers * VLLM_BYTES
        row = work.prompt_len + work.completion_len
        published = vllm_weights
        rate = plan.table.assumptions.publish_gb_s[recipe.publisher]
        publishing = Bounds(published, published).per(rate * 1e9)
    sampler = vllm_weights if work.sampling == "servers" else rollout
    tokens = max(0, int((1 - SPARE_FRAC) * plan.device.memory - sampler) // token)
    disk = plan.estimate.checkpoint_bytes()
    model = total_bytes(models.policy.weights)
    num_hosts = -(-plan.number // DEVICES_PER_HOST)
    if isinstance(recipe.sharding, FSDPSharding):
        # Each process reads its shard.
        host_load, host_save = model // num_hosts, disk // num_hosts
    elif isinstance(recipe.sharding, XLASharding):
        # One process per host reads the model.
        host_load, host_save = model, disk
    else:
        # Each process on the host reads the whole model.
        host_load, host_save = model * min(DEVICES_PER_HOST, plan.number), disk
    return ClusterLayout(
        learning=phase_bytes(plan.items, "learning"),
        rollout=rollout,
        sampler=sampler,
        tokens=tokens,
        rows=int(tokens // row),
        rows_per_rollout=-(-prompts * group // (plan.samplers or plan.number)),
        published=published,
        publishing=publishing,
        host_load=host_load,
        host_save=host_save,
        disk=disk,
    )
