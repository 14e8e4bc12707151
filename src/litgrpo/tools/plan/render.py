"""Render a plan as text and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.optim import AdamW, Optimizer

from litgrpo.tools.plan.devices import Bounds, CloudSession
from litgrpo.tools.plan.fitting import (
    DEVICE_COUNTS,
    HARDWARE_CONFIGS,
    MemoryBudget,
    suggest_changes,
)
from litgrpo.tools.plan.measuring import ITERATIONS, MeasuredTimes
from litgrpo.tools.plan.memory import peak_bytes
from litgrpo.tools.plan.plan import Plan, make_layout
from litgrpo.tools.plan.schedule import Schedule
from litgrpo.tools.plan.time_model import RunPhase, total_seconds
from litgrpo.training.optim import DefaultAdamW

HOUR_S = 3600.0
MINUTE_S = 60.0


def render_text(plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan."""
    recipe, device, number = plan.recipe, plan.device, plan.number
    placement = "sharded" if number > 1 and recipe.shards_model else "replicated"
    yield (
        f"Each of {number} x {device.name} ({device.gigabytes:.0f} GB); weights {placement}, in "
        f"{recipe.dtype}"
    )
    optimizer = optimizer_name(recipe.optimizer)
    yield f"Optimizer {optimizer}, strategy {recipe.strategy}; 1 GB = 10^9 bytes"
    yield ""
    yield from table(
        ("memory", "phase", "GB", "how counted"),
        [(item.name, item.phase, format_gb(item.size), item.how) for item in plan.items],
    )
    yield ""
    yield render_verdict(plan)
    if recipe.uneven_split(number):
        yield f"BUT {recipe.uneven_split(number)} cannot be split evenly over {number} chips"
    if recipe.reward_models:
        yield f"Not counted: reward models ({', '.join(recipe.reward_models)})"
    yield ""
    yield from render_devices(plan)
    if not plan.budget.fits(plan.items):
        yield ""
        yield from render_advice(plan)
    if plan.number + plan.samplers > 1 and recipe.work.rollouts:
        yield ""
        yield from render_layout(plan)
    yield ""
    yield from render_time(plan)


def render_verdict(plan: Plan) -> str:
    """Return one line: whether the plan fits."""
    budget = plan.budget
    limit = f"{budget.usable / 1e9:.1f} of {plan.device.gigabytes:.0f} GB"
    word = "FITS"
    if not plan.fits:
        # The memory may suffice while the rows cannot be split evenly.
        word = "WOULD FIT" if budget.fits(plan.items) else "DOES NOT FIT"
    worst = "always + the larger of rollout and learning"
    return f"{word}: {format_gb(peak_bytes(plan.items))} GB ({worst}); usable: {limit}"


def optimizer_name(optimizer: partial[Optimizer]) -> str:
    """Return the class and the learning rate."""
    kind = optimizer.func
    lr = optimizer.keywords.get("lr")
    name = AdamW.__name__ if kind is DefaultAdamW else kind.__name__
    return name if lr is None else f"{name}, lr {lr:.3g}"


def render_devices(plan: Plan) -> Iterator[str]:
    """Yield a table: memory per device for each kind and number of devices."""
    recipe = plan.recipe
    counts = [n for n in DEVICE_COUNTS if recipe.distributed or n == 1]
    counts = [n for n in counts if not recipe.uneven_split(n)]
    needed = {n: plan.budget.items(recipe, n) for n in counts}
    kinds = [each for each in plan.table.devices.values() if each.kind == plan.device.kind]
    rows = []
    for each in kinds:
        budget = MemoryBudget(each, plan.budget.program)
        cells = (render_fit(budget.fits(items), peak_bytes(items)) for items in needed.values())
        rows.append((f"{each.name}, {each.gigabytes:.0f} GB", *cells))
    heads = (f"{n} chips" if n > 1 else "1 chip" for n in counts)
    yield from table(("chip", *heads), rows)
    if recipe.single_process and recipe.uneven_split(DEVICE_COUNTS[-1]):
        yield "The rows of a rollout cannot be split evenly over more chips."


def render_advice(plan: Plan) -> Iterator[str]:
    """Yield changes that may make the plan fit."""
    recipe, number, budget = plan.recipe, plan.number, plan.budget
    yield "Changes to try, each in addition to those before:"
    for words, with_settings in suggest_changes(recipe, number):
        found = budget.items(with_settings, number)
        yield f"  {words:<48} {render_fit(budget.fits(found), peak_bytes(found))}"
        if budget.fits(found):
            return
    if not recipe.distributed:
        config = HARDWARE_CONFIGS.get(plan.device.kind, HARDWARE_CONFIGS["cuda"])
        yield f"  or use several chips: -c {config}"
        return
    more = (n for n in DEVICE_COUNTS if n > number)
    found_size = next(
        (f"--chips {size}, nothing else changed" for size in more if budget.can_hold(recipe, size)),
        None,
    )
    yield f"  or {found_size or 'another kind of chip'}"


def render_layout(plan: Plan) -> Iterator[str]:
    """Yield the requirements for rows, network, hosts and disk."""
    found = make_layout(plan)
    generating = {
        "trainer": "and generate",
        "servers": f"{plan.samplers} generate",
        "colocated": "and generate with colocated vLLM",
    }[plan.recipe.work.sampling]
    yield f"Layout: {plan.number} train, {generating}"
    rows = [
        ("update, each device", f"{format_gb(found.learning)} GB"),
        ("rollout, each device that trains", f"{format_gb(found.rollout)} GB"),
        ("generation, each device that generates, without rows", f"{format_gb(found.sampler)} GB"),
        ("tokens that fit into its KV cache", f"{found.tokens:,}"),
        ("rows of full length decoded at once", f"{found.rows:,} of {found.rows_per_rollout:,}"),
        ("host memory while the model is loaded", f"{format_gb(found.host_load)} GB"),
        ("host memory while a checkpoint is written", f"{format_gb(found.host_save)} GB"),
        ("disk for a checkpoint", f"{format_gb(found.disk)} GB"),
    ]
    if found.published:
        how = f"{format_gb(found.published)} GB in {format_duration(found.publishing)}"
        rows.append((f"weight sync with {plan.recipe.publisher}, per iteration", how))
    yield from table(("what", "how much"), rows)
    if found.rows == 0:
        yield "DOES NOT FIT: no row fits into the KV cache"


# --- time and cost ---


def render_time(plan: Plan) -> Iterator[str]:
    """Yield the time of each phase, time and cost of the run, and the cloud sessions it fits."""
    schedule, phases = plan.recipe.schedule, plan.estimate.phases()
    assumed = " (assumed; max_iterations is not set, and the data was not read: --read_data true)"
    end = assumed if schedule.open_ended else ""
    yield f"Time of {schedule.iterations:,} iterations{end}, low - high"
    yield ""
    yield from table(
        ("phase", "once", "times", "total", "largest term"),
        [render_phase(phase) for phase in phases],
    )
    seconds = total_seconds(phases)
    yield ""
    yield "Settings that reduce the largest term:"
    yield from (f"  {phase.name}: {phase.setting}" for phase in phases if phase.setting)
    yield ""
    yield f"Total {format_duration(seconds)}; {render_cost(plan, seconds)}"
    yield (
        "Computed from data sheets, for completions of half to all of the maximum length, without "
        "rewards; `plan --measure` runs a few iterations here."
    )
    for session in plan.table.sessions:
        yield render_session(plan, session)


def render_phase(phase: RunPhase) -> tuple[str, ...]:
    """Return the table cells of a phase."""
    return (
        phase.name,
        format_duration(phase.once),
        f"{phase.times:,}",
        format_duration(phase.whole),
        phase.largest_term,
    )


def render_cost(plan: Plan, seconds: Bounds) -> str:
    """Return the cost of a run."""
    price, number = plan.device.price, plan.number + plan.samplers
    if price is None:
        return f"the price of {plan.device.name} is unknown (--devices)"
    low, high = (
        number * each * rate / HOUR_S
        for each, rate in zip((seconds.low, seconds.high), (price.low, price.high), strict=True)
    )
    rates = f"{price.low:g}" if price.low == price.high else f"{price.low:g} - {price.high:g}"
    return (
        f"{low:,.2f} - {high:,.2f} dollars at {rates} per hour x {number} "
        f"(prices of {plan.table.date})"
    )


def render_session(plan: Plan, session: CloudSession) -> str:
    """Return one line: whether the run ends within a cloud session."""
    device = plan.table.device(session.device)
    number = session.number if plan.recipe.distributed else 1
    name = f"{session.name} ({number} x {device.name}, {session.hours:g} h)"
    other = replace(plan, device=device, number=number, samplers=0)
    if not other.fits:
        return f"{name}: out of memory"
    hours = total_seconds(other.estimate.phases()) * (1 / HOUR_S)
    spare = Bounds(session.hours - hours.high, session.hours - hours.low)
    if spare.low >= 0:
        return f"{name}: fits with at least {spare.low:.1f} h to spare"
    if spare.high < 0:
        over = f"too long by at least {-spare.high:.1f} h"
        return f"{name}: {over}; --auto_resume true resumes in the next session"
    return f"{name}: between {spare.high:.1f} h to spare and {-spare.low:.1f} h too long"


def render_measured(found: dict[str, MeasuredTimes], schedule: Schedule) -> Iterator[str]:
    """Yield the measured times and the extrapolated time of the whole run."""
    end = " (assumed; set --iterations)" if schedule.open_ended else ""
    yield f"Measured here: {ITERATIONS} iterations; the first warms up, the last ends the run"
    yield ""
    names = ("iteration", "evaluation", "save", "whole")
    counts = (schedule.iterations, schedule.evaluations, schedule.saves, "")
    yield from table(
        ("part", "times", *(f"{kind} s" for kind in found)),
        [
            (name, str(count), *(format_digits(getattr(each, name)) for each in found.values()))
            for name, count in zip(names, counts, strict=True)
        ],
    )
    yield ""
    yield f"The whole run of {schedule.iterations:,} iterations{end}:"
    for kind, each in found.items():
        most, least = each.run(schedule), each.run(schedule, trained_frac=0.0)
        likely = format_duration(Bounds(most, most)).partition(" - ")[2]
        fewer = format_duration(Bounds(least, least)).partition(" - ")[2]
        text = f"  {kind}: {likely}"
        if not schedule.is_sft:
            text += f"; {fewer} if no row has a gradient"
        yield text
    peak = max(each.peak_bytes for each in found.values())
    yield f"Peak memory of the program: {format_gb(peak)} GB"
    yield "Zero-variance groups are not trained on, so a run with more of them is faster."


def format_duration(seconds: Bounds) -> str:
    """Format two bounds in the unit that suits the upper one.

    Example:
        >>> format_duration(Bounds(0.5, 1.25)), format_duration(Bounds(1800, 7200))
        ('0.50 - 1.2 s', '0.50 - 2.0 h')
    """
    unit, name = next(
        (each for each in ((HOUR_S, "h"), (MINUTE_S, "min")) if seconds.high >= 2 * each[0]),
        (1.0, "s"),
    )
    return f"{format_digits(seconds.low / unit)} - {format_digits(seconds.high / unit)} {name}"


def format_digits(number: float) -> str:
    """Format with two digits, or all before the point.

    Example:
        >>> format_digits(0.0512), format_digits(1.26), format_digits(1234.5)
        ('0.051', '1.3', '1,234')
    """
    return f"{number:,.0f}" if number >= 10 else f"{number:#.2g}"  # noqa: PLR2004 (two digits)


def render_fit(fits: bool, size: int) -> str:
    """Format a size, and whether it fits."""
    return f"{format_gb(size)} {'fits' if fits else 'no'}"


def format_gb(size: int) -> str:
    """Format bytes in GB."""
    return f"{size / 1e9:.2f}" if size > 1e8 else f"{size / 1e9:.4f}"  # noqa: PLR2004 (0.1 GB)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for line in (head, ["-" * width for width in widths], *rows):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield f"| {' | '.join(cells)} |"


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return the numbers of a plan, in bytes and seconds."""
    phases = plan.estimate.phases()
    seconds = total_seconds(phases)
    return {
        "chip": plan.device.name,
        "chips": plan.number,
        "samplers": plan.samplers,
        "chip_bytes": int(plan.device.memory),
        "peak_bytes": peak_bytes(plan.items),
        "fits": plan.fits,
        "items": [
            {"name": item.name, "phase": item.phase, "bytes": item.size, "how": item.how}
            for item in plan.items
        ],
        "iterations": plan.recipe.schedule.iterations,
        "seconds": [seconds.low, seconds.high],
        "phases": [
            {
                "name": phase.name,
                "times": phase.times,
                "seconds": [phase.once.low, phase.once.high],
                "largest_term": phase.largest_term,
                "setting": phase.setting,
            }
            for phase in phases
        ],
    }
