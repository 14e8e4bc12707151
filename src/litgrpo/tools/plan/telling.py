"""A plan as text and as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.optim import AdamW, Optimizer

from litgrpo.tools.plan.devices import Session, Span
from litgrpo.tools.plan.fitting import OVERLAYS, SIZES, Room, remedies
from litgrpo.tools.plan.layouts import layout_of
from litgrpo.tools.plan.measuring import ITERATIONS, Measured
from litgrpo.tools.plan.memory import peak
from litgrpo.tools.plan.on_devices import Plan
from litgrpo.tools.plan.schedule import Schedule
from litgrpo.tools.plan.seconds import Phase, total
from litgrpo.training.optim import DefaultAdamW

HOUR_S = 3600.0
MINUTE_S = 60.0


def as_text(plan: Plan) -> Iterator[str]:
    """The plan in lines."""
    training, device, number = plan.training, plan.device, plan.number
    shared = "divided over them" if number > 1 and training.divides else "whole on it"
    yield (
        f"Each of {number} x {device.name} ({device.gigabytes:.0f} GB); weights {shared}, in "
        f"{training.dtype}"
    )
    optimizer = optimizer_name(training.optimizer)
    yield f"Optimizer {optimizer}, strategy {training.strategy}; GB are 10^9 bytes"
    yield ""
    yield from table(
        ("what", "when", "GB", "how counted"),
        [(item.name, item.phase, gigabytes(item.size), item.how) for item in plan.items],
    )
    yield ""
    yield verdict(plan)
    if training.undivided(number):
        yield f"BUT {training.undivided(number)} cannot be divided evenly over {number} chips"
    if training.judges:
        yield f"Not counted: reward models ({', '.join(training.judges)})"
    yield ""
    yield from chip_table(plan)
    if not plan.room.fits(plan.items):
        yield ""
        yield from advice(plan)
    if plan.number + plan.samplers > 1 and training.work.rollouts:
        yield ""
        yield from layout_text(plan)
    yield ""
    yield from time_and_money(plan)


def verdict(plan: Plan) -> str:
    """Whether it fits, in a line."""
    room = plan.room
    limit = f"{room.usable / 1e9:.1f} of {plan.device.gigabytes:.0f} GB"
    words = {True: "WOULD FIT", False: "DOES NOT FIT"}
    word = "FITS" if plan.fits else words[room.fits(plan.items)]
    worst = "always, and the larger of rollout and learning"
    return f"{word}: {gigabytes(peak(plan.items))} GB ({worst}); usable are {limit}"


def optimizer_name(optimizer: partial[Optimizer]) -> str:
    """Class and learning rate."""
    kind = optimizer.func
    lr = optimizer.keywords.get("lr")
    name = AdamW.__name__ if kind is DefaultAdamW else kind.__name__
    return name if lr is None else f"{name}, lr {lr:.3g}"


def chip_table(plan: Plan) -> Iterator[str]:
    """What is needed on each device of this kind, by their number, and whether it is there."""
    training = plan.training
    sizes = [size for size in SIZES if training.sharded or size == 1]
    sizes = [size for size in sizes if not training.undivided(size)]
    needed = {size: plan.room.items(training, size) for size in sizes}
    kinds = [each for each in plan.table.devices.values() if each.kind == plan.device.kind]
    rows = []
    for each in kinds:
        room = Room(each, plan.room.program)
        cells = (mark(room.fits(items), peak(items)) for items in needed.values())
        rows.append((f"{each.name}, {each.gigabytes:.0f} GB", *cells))
    heads = (f"{size} chip{'s' * (size > 1)}" for size in sizes)
    yield from table(("chip", *heads), rows)
    if training.by_one_process and training.undivided(SIZES[-1]):
        yield "More chips than these cannot divide the rows of a rollout evenly."


def advice(plan: Plan) -> Iterator[str]:
    """What would make it fit, in lines."""
    training, number, room = plan.training, plan.number, plan.room
    yield "What to change, each on top of those before:"
    for words, changed in remedies(training, number):
        found = room.items(changed, number)
        yield f"  {words:<48} {mark(room.fits(found), peak(found))}"
        if room.fits(found):
            return
    if not training.sharded:
        overlay = OVERLAYS.get(plan.device.kind, OVERLAYS["cuda"])
        yield f"  or divide it over several chips: -c {overlay}"
        return
    more = (size for size in SIZES if size > number)
    found_size = next(
        (f"--chips {size}, nothing else changed" for size in more if room.takes(training, size)),
        None,
    )
    yield f"  or {found_size or 'another kind of chip'}"


def layout_text(plan: Plan) -> Iterator[str]:
    """Learners and samplers: rows at once, publishing, hosts and disk."""
    found = layout_of(plan, plan.training.publisher)
    where = {"elsewhere": f"{plan.samplers} sample", "colocated": "vLLM beside them samples"}
    sampling = where.get(plan.training.work.sampled, "sample themselves")
    yield f"Layout: {plan.number} learn, {sampling}"
    rows = [
        ("learning, each device", f"{gigabytes(found.learning)} GB"),
        ("rollout, each device that learns", f"{gigabytes(found.rollout)} GB"),
        ("sampling, each device that samples, without rows", f"{gigabytes(found.sampler)} GB"),
        ("tokens whose keys and values have room there", f"{found.tokens:,}"),
        ("rows of full length at once there", f"{found.rows:,} of {found.wanted:,}"),
        ("a host's memory while the model is read", f"{gigabytes(found.host_load)} GB"),
        ("a host's memory while a checkpoint is written", f"{gigabytes(found.host_save)} GB"),
        ("disk for a checkpoint", f"{gigabytes(found.disk)} GB"),
    ]
    if found.published:
        how = f"{gigabytes(found.published)} GB in {duration(found.publishing)}"
        rows.append((f"publishing by {plan.training.publisher}, each iteration", how))
    yield from table(("what", "how much"), rows)
    if not found.samples:
        yield "DOES NOT FIT: no row has room where it is sampled"


# --- time and money ---


def time_and_money(plan: Plan) -> Iterator[str]:
    """Seconds of each phase, hours and dollars of the run, and the sessions that it would fit."""
    schedule, phases = plan.training.schedule, plan.estimate.phases()
    end = " (the recipe sets no end: planned for these)" * schedule.open_end
    yield f"Time of {schedule.iterations:,} iterations{end}, low - high"
    yield ""
    yield from table(
        ("phase", "each", "times", "in all", "mostly", "what changes that"),
        [phase_row(phase) for phase in phases],
    )
    seconds = total(phases)
    yield ""
    yield f"In all {duration(seconds)}; {money(plan, seconds)}"
    yield (
        "From data sheets, not measured: completions from half of their limit to all of it; "
        "rewards are not counted; `plan --measure` runs a few iterations here."
    )
    for session in plan.table.sessions:
        yield session_line(plan, session)


def phase_row(phase: Phase) -> tuple[str, ...]:
    """A line of the table."""
    return (
        phase.name,
        duration(phase.once),
        f"{phase.times:,}",
        duration(phase.whole),
        phase.mostly,
        phase.key,
    )


def money(plan: Plan, seconds: Span) -> str:
    """Dollars of so many seconds."""
    price, number = plan.device.price, plan.number + plan.samplers
    if price is None:
        return f"no price of {plan.device.name} is known (--devices)"
    low, high = (
        number * each * rate / HOUR_S
        for each, rate in zip((seconds.low, seconds.high), (price.low, price.high), strict=True)
    )
    rates = f"{price.low:g}" if price.low == price.high else f"{price.low:g} - {price.high:g}"
    return (
        f"{low:,.2f} - {high:,.2f} dollars at {rates} an hour x {number} "
        f"(prices of {plan.table.date})"
    )


def session_line(plan: Plan, session: Session) -> str:
    """Whether the run would end within a session."""
    device = plan.table.device(session.device)
    number = session.number if plan.training.sharded else 1
    name = f"{session.name} ({number} x {device.name}, {session.hours:g} h)"
    other = replace(plan, device=device, number=number, samplers=0)
    if not other.fits:
        return f"{name}: does not fit into its memory"
    hours = total(other.estimate.phases()) * (1 / HOUR_S)
    spare = Span(session.hours - hours.high, session.hours - hours.low)
    if spare.low >= 0:
        return f"{name}: fits with {spare.low:.1f} h to spare, or more"
    if spare.high < 0:
        over = f"does not fit by {-spare.high:.1f} h, or more"
        return f"{name}: {over}; --auto_resume true goes on in the next"
    return f"{name}: between {spare.high:.1f} h to spare and {-spare.low:.1f} h too long"


def measured_text(found: dict[str, Measured], schedule: Schedule) -> Iterator[str]:
    """What a few iterations took, and what the whole run takes after them."""
    end = " (the recipe sets no end: --iterations says how many)" * schedule.open_end
    yield f"Measured here: {ITERATIONS} iterations; the first warms up, the last ends the run"
    yield ""
    names = ("iteration", "evaluation", "save", "whole")
    counts = (schedule.iterations, schedule.evaluations, schedule.saves, "")
    yield from table(
        ("what", "times", *(f"{kind} s" for kind in found)),
        [
            (name, str(count), *(digits(vars(each)[name]) for each in found.values()))
            for name, count in zip(names, counts, strict=True)
        ],
    )
    yield ""
    yield f"The whole run of {schedule.iterations:,} iterations{end}:"
    for kind, each in found.items():
        most, least = each.run(schedule), each.run(schedule, learning=0.0)
        likely = duration(Span(most, most)).partition(" - ")[2]
        fewer = duration(Span(least, least)).partition(" - ")[2]
        text = f"  {kind}: {likely}"
        yield text + f"; {fewer} if nothing is learned from any row" * (not schedule.supervised)
    yield f"Memory of the program at most: {gigabytes(max(m.peak for m in found.values()))} GB"
    yield "Rows of groups whose rewards are all equal are not learned from: such a run gets faster."


def duration(seconds: Span) -> str:
    """Two bounds in the unit that suits the upper one.

    Example:
        >>> duration(Span(0.5, 1.25)), duration(Span(1800, 7200)), duration(Span(0.001, 0.01))
        ('0.50 - 1.2 s', '0.50 - 2.0 h', '0.0010 - 0.010 s')
    """
    unit, name = next(
        (each for each in ((HOUR_S, "h"), (MINUTE_S, "min")) if seconds.high >= 2 * each[0]),
        (1.0, "s"),
    )
    return f"{digits(seconds.low / unit)} - {digits(seconds.high / unit)} {name}"


def digits(number: float) -> str:
    """Two digits, or all before the point.

    Example:
        >>> digits(0.0512), digits(1.26), digits(1234.5)
        ('0.051', '1.3', '1,234')
    """
    return f"{number:,.0f}" if number >= 10 else f"{number:#.2g}"  # noqa: PLR2004 (two digits)


def mark(fits: bool, size: int) -> str:
    """What is needed, and whether it is there."""
    return f"{gigabytes(size)} {('no', 'fits')[fits]}"


def gigabytes(size: int) -> str:
    """Bytes in GB."""
    return f"{size / 1e9:.2f}" if size > 1e8 else f"{size / 1e9:.4f}"  # noqa: PLR2004 (0.1 GB)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for line in (head, ["-" * width for width in widths], *rows):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield f"| {' | '.join(cells)} |"


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan's numbers: bytes, seconds, dollars."""
    phases = plan.estimate.phases()
    seconds = total(phases)
    return {
        "chip": plan.device.name,
        "chips": plan.number,
        "samplers": plan.samplers,
        "chip_bytes": int(plan.device.memory),
        "peak_bytes": peak(plan.items),
        "fits": plan.fits,
        "items": [
            {"name": item.name, "phase": item.phase, "bytes": item.size, "how": item.how}
            for item in plan.items
        ],
        "iterations": plan.training.schedule.iterations,
        "seconds": [seconds.low, seconds.high],
        "phases": [
            {
                "name": phase.name,
                "times": phase.times,
                "seconds": [phase.once.low, phase.once.high],
                "mostly": phase.mostly,
                "key": phase.key,
            }
            for phase in phases
        ],
    }
