"""Several devices that learn and sample: room for rows, publishing, host memory, disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from litgrpo.tools.plan.devices import NOTHING, Span
from litgrpo.tools.plan.division import Chips, FullShard, bytes_of
from litgrpo.tools.plan.fitting import SPARE_FRAC
from litgrpo.tools.plan.memory import Item
from litgrpo.tools.plan.on_devices import Plan

SERVED_BYTES = 2  # of a weight and of a number of the cache in vLLM: bfloat16
PER_HOST = 8  # devices of one machine


@dataclass(frozen=True)
class Layout:
    """What a plan means for rows, hosts and disk.

    Args:
        learning: bytes of a device while it learns.
        rollout: bytes of a device that learns, while others or itself sample; without rows.
        sampler: bytes of a device that samples, without rows.
        tokens: whose keys and values a device that samples has room for.
        rows: of the longest kind that it decodes at once; others queue.
        wanted: rows of a rollout on it.
        published: bytes that go to the samplers in each iteration.
        publishing: seconds of that.
        host_load: bytes of a host's memory while the model is read.
        host_save: the same while a checkpoint is written.
        disk: bytes of one checkpoint.
    """

    learning: int
    rollout: int
    sampler: int
    tokens: int
    rows: int
    wanted: int
    published: int
    publishing: Span
    host_load: int
    host_save: int
    disk: int

    @property
    def samples(self) -> bool:
        """Whether there is room for a single row."""
        return self.rows > 0


def phase_bytes(items: Sequence[Item], phase: str, without: Sequence[str] = ()) -> int:
    """Bytes of what is always there and of one phase, less items of these names."""
    return sum(i.size for i in items if i.phase in ("always", phase) and i.name not in without)


def layout_of(plan: Plan, publisher: str = "Folder") -> Layout:
    """What a plan means for rows, hosts and disk.

    Args:
        plan: of GRPO.
        publisher: class that sends weights to servers.
    """
    training, work = plan.training, plan.training.work
    blueprint = training.models["computed"] or training.models["blueprint"]
    weights = SERVED_BYTES * sum(weight.numel() for weight in blueprint.weights)
    items = plan.items
    caches = ("cache, prompts", "cache, completions")
    rollout = phase_bytes(items, "rollout", without=caches)
    prompts, group = work.rollouts[0]
    here = work.sampled == "here"
    token = blueprint.cache_numbers * (work.cache_bytes if here else SERVED_BYTES)
    used = weights if work.sampled == "elsewhere" else rollout
    tokens = max(0, int((1 - SPARE_FRAC) * plan.device.memory - used) // token)
    # Ours holds a prompt once for its group and, while it writes, a completion twice.
    own = work.prompt_len / group + 2 * work.completion_len
    row = own if here else work.prompt_len + work.completion_len
    samplers = plan.samplers or plan.number
    sends = not here
    size = weights * sends
    # A device of its own that learns has its shard; one that reads the model whole has all of it.
    sharded = isinstance(training.division, FullShard)
    model = bytes_of(training.models["blueprint"].weights)
    local = min(PER_HOST, plan.number)
    hosts = -(-plan.number // PER_HOST)
    disk = plan.estimate.checkpoint_bytes()
    once = isinstance(training.division, Chips) or plan.number == 1
    return Layout(
        learning=phase_bytes(items, "learning"),
        rollout=rollout,
        sampler=used,
        tokens=tokens,
        rows=int(tokens // row),
        wanted=-(-prompts * group // samplers),
        published=size,
        publishing=Span(size, size).per(plan.table.assumed.publish_gb_s[publisher] * 1e9)
        if sends
        else NOTHING,
        host_load=model // hosts if sharded else model * (1 if once else local),
        host_save=disk // hosts if sharded else disk,
        disk=disk,
    )
