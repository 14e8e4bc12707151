"""Render a plan as lines of at most 80 columns and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from torch.optim import AdamW, Optimizer

from litgrpo.callbacks.progress import format_duration
from litgrpo.learning.optim import DefaultAdamW
from litgrpo.plan.advice import DEVICE_COUNTS, suggest_changes
from litgrpo.plan.devices import GB, devices_of
from litgrpo.plan.measure import ITERATIONS, MeasuredTimes, RunLength
from litgrpo.plan.plan import Plan
from litgrpo.plan.sharding import FSDPSharding, XLASharding
from litgrpo.text.tables import markdown_table, plural

SHARDING_CONFIGS = {"tpu": "configs/hardware/tpu_spmd.yaml", "cuda": "configs/hardware/fsdp2.yaml"}


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan."""
    recipe, items = plan.recipe, plan.items()
    is_sharded = plan.number > 1 and isinstance(recipe.sharding, XLASharding | FSDPSharding)
    dtype = str(recipe.models.policy.dtype).removeprefix("torch.")
    placement = "sharded" if is_sharded else "replicated"
    yield f"Each of {plan.number} x {plan.device}; weights {placement}, in {dtype}"
    optimizer, strategy = optimizer_name(recipe.models.optimizer), recipe.strategy
    yield f"Optimizer {optimizer}; strategy {strategy.rpartition('.')[2]}; 1 GB = 10^9 bytes"
    yield ""
    yield from markdown_table(
        ("memory", "phase", "GB", "how counted"),
        [(item.name, item.phase, format_gb(item.size), item.how) for item in items],
    )
    if not plan.has_lengths:
        yield "Rows are the longest that the recipe allows; --read_data true takes the data's"
    yield ""
    yield verdict(plan)
    if plan.uneven:
        yield f"BUT {plan.uneven} cannot be split evenly over {plan.number} chips"
    if recipe.reward_models:
        yield f"Not counted: reward models ({', '.join(recipe.reward_models)})"
    if plan.peak() > plan.device.usable:
        yield ""
        yield from advice_lines(plan)
    if devices_of(plan.device.kind):
        yield ""
        yield from device_lines(plan)


def verdict(plan: Plan) -> str:
    """Return one line: whether the plan fits."""
    word = "FITS" if plan.fits else "DOES NOT FIT"
    if plan.uneven and plan.peak() <= plan.device.usable:
        word = "WOULD FIT"
    peak, usable = format_gb(plan.peak()), plan.device.usable / GB
    return f"{word}: {peak} GB (always + the larger phase) of {usable:.1f} GB usable"


def optimizer_name(optimizer: partial[Optimizer]) -> str:
    """Return the class and the learning rate."""
    kind = optimizer.func
    lr = optimizer.keywords.get("lr")
    name = AdamW.__name__ if kind is DefaultAdamW else kind.__name__
    return name if lr is None else f"{name}, lr {lr:.3g}"


def device_lines(plan: Plan) -> Iterator[str]:
    """Yield a table: memory of each of several devices, and which devices have it."""
    counts = DEVICE_COUNTS if plan.recipe.distributed else (1,)
    rows = []
    for number in counts:
        if plan.recipe.uneven_split(number):
            continue
        peak = plan.peak(number=number)
        names = [d.name for d in devices_of(plan.device.kind) if peak <= d.usable]
        rows.append((number, format_gb(peak), ", ".join(names) or "none of the known"))
    yield from markdown_table(("chips", "GB of each", "fits on"), rows)


def advice_lines(plan: Plan) -> Iterator[str]:
    """Yield changes that need less memory, until it fits."""
    yield "Changes to try, each in addition to those before:"
    peak = plan.peak()
    for words, recipe in suggest_changes(plan.recipe, plan.number):
        changed = plan.peak(recipe)
        if changed >= peak:  # the other phase needs more
            continue
        peak = changed
        fits = peak <= plan.device.usable
        yield f"  {words:<52}{format_gb(peak):>8} GB{', fits' if fits else ''}"
        # More chips are the alternative to LoRA, which changes what is trained.
        if fits and recipe.lora == plan.recipe.lora:
            return
    if plan.recipe.distributed:
        yield "  or more chips, or larger ones (see below)"
    else:
        config = SHARDING_CONFIGS.get(plan.device.kind, SHARDING_CONFIGS["cuda"])
        yield f"  or use several chips: -c {config}"


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Return the numbers of a plan, in bytes."""
    return {
        "chip": plan.device.name,
        "chips": plan.number,
        "chip_bytes": int(plan.device.memory),
        "peak_bytes": plan.peak(),
        "fits": plan.fits,
        "items": [
            {"name": item.name, "phase": item.phase, "bytes": item.size, "how": item.how}
            for item in plan.items()
        ],
    }


def format_gb(size: int) -> str:
    """Format bytes in GB."""
    return f"{size / GB:.2f}" if size > 1e8 else f"{size / GB:.4f}"  # noqa: PLR2004 (0.1 GB)


# --- what was measured ---


def measured_lines(times: MeasuredTimes, length: RunLength) -> Iterator[str]:
    """Yield the measured times and the extrapolated time of the whole run."""
    yield f"Measured here: {ITERATIONS} iterations; the first warms up, the last ends the run"
    yield ""
    rows = [
        ("iteration", length.iterations, f"{times.iteration:.3g}"),
        ("evaluation", length.evaluations, f"{times.evaluation:.3g}"),
        ("checkpoint", length.saves, f"{times.save:.3g}"),
    ]
    yield from markdown_table(("part", "times", "seconds"), rows)
    yield ""
    run = f"The whole run of {plural(length.iterations, 'iteration')}: "
    run += format_duration(times.run(length))
    if times.update_frac:
        run += f"; {format_duration(times.run(length, trains=False))} if no row has a gradient"
    yield run
    yield f"Peak memory of the program: {format_gb(times.peak_bytes)} GB"
    if times.update_frac:
        yield "A run with more zero-variance groups, which are not trained on, is faster."


def measured_dict(times: MeasuredTimes, length: RunLength) -> dict[str, Any]:
    """Return the measured numbers, in seconds and bytes."""
    return asdict(times) | asdict(length) | {"run": times.run(length)}
