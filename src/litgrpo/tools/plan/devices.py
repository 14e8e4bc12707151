"""Devices, prices and sessions: a dated table of public numbers, which a user's file may change."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from litgrpo.arguments import above, at_least, did_you_mean, require
from litgrpo.models.loading import ASSETS

GIVEN = ASSETS / "devices.yaml"
OURS = re.compile(r"^_\w+\(\)")  # how Python begins its complaint of a row's keys
PARTS = ("date", "devices", "assumed", "sessions")


@dataclass(frozen=True)
class Span:
    """A number between two bounds.

    Example:
        >>> Span(1, 2) + Span(3, 3), Span(1, 2) * 2
        (Span(low=4, high=5), Span(low=2, high=4))
    """

    low: float
    high: float

    def __add__(self, other: Span) -> Span:
        """Sum of bounds."""
        return Span(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> Span:
        """Each bound times a number."""
        return Span(self.low * factor, self.high * factor)

    def per(self, rate: Span) -> Span:
        """Seconds of an amount at a rate: the most at the lowest rate, the least at the highest."""
        return Span(self.low / rate.high, self.high / rate.low)

    def larger(self, other: Span) -> Span:
        """The larger of each bound."""
        return Span(max(self.low, other.low), max(self.high, other.high))

    @property
    def middle(self) -> float:
        """The geometric mean: a factor from both bounds."""
        return (self.low * self.high) ** 0.5


NOTHING = Span(0.0, 0.0)


@dataclass(frozen=True)
class Device:
    """One device; rates are peaks of its data sheet.

    Args:
        name: in the table.
        kind: cuda, tpu or cpu.
        memory: bytes.
        bandwidth: bytes per second of its memory.
        link: bytes per second to other devices, one way.
        flops: {precision: operations per second}.
        price: dollars per hour; None: unknown.
    """

    name: str
    kind: str
    memory: float
    bandwidth: float
    link: float
    flops: dict[str, float]
    price: Span | None

    @property
    def gigabytes(self) -> float:
        """Memory in 10^9 bytes."""
        return self.memory / 1e9


class Session(NamedTuple):
    """Hours that a device is lent for at a time."""

    name: str
    device: str
    number: int
    hours: float


@dataclass(frozen=True)
class Assumed:
    """What no data sheet says. Shares and rates; `low` of a share is the worse.

    Args:
        arithmetic: {kind of device: {models up to so many weights: share of the peak}}.
        bandwidth, links: shares of the peak.
        calls_us: {kind of device: {way of decoding: microseconds per layer}}, the worse first.
        disk_gb_s: rate at which files are written.
        start_s: seconds before the first iteration, the worse first.
        publish_gb_s: {class: rate from the trainer to samplers}.
    """

    arithmetic: dict[str, dict[float, Span]]
    bandwidth: Span
    links: Span
    calls_us: dict[str, dict[str, Span]]
    disk_gb_s: Span
    start_s: Span
    publish_gb_s: dict[str, Span]

    def share_of_peak(self, kind: str, weights: float) -> Span:
        """Share of a device's operations that a model of so many weights reaches."""
        shares = sorted(self.arithmetic[kind].items())
        return next(share for most, share in shares if weights <= most)


@dataclass(frozen=True)
class Table:
    """Everything that is known of devices.

    Args:
        date: of prices and limits.
        devices: by name.
        assumed: what no data sheet says.
        sessions: in which a run must end.
    """

    date: str
    devices: dict[str, Device]
    assumed: Assumed
    sessions: list[Session] = field(default_factory=list)

    def device(self, name: str) -> Device:
        """The device of a name.

        Raises:
            ValueError: there is none.
        """
        known = ", ".join(self.devices)
        require(name in self.devices, f"chip is {name!r}; it can be {known}")
        return self.devices[name]


def devices(path: str | None = None) -> Table:
    """The table, with what a user's file adds or replaces.

    Args:
        path: of that file.

    Raises:
        ValueError: there is no such file, or it is not of this shape.
    """
    content = yaml.safe_load(GIVEN.read_text(encoding="utf-8"))
    for name, part in _given(path).items():
        require(
            name in PARTS,
            f"{path}: {name!r} is no part of a table of devices{did_you_mean(name, PARTS)}; "
            f"they are {', '.join(PARTS)}",
        )
        content[name] = {**content[name], **part} if isinstance(part, dict) else part
    try:
        return Table(
            date=str(content["date"]),
            devices={name: _device(name, **each) for name, each in content["devices"].items()},
            assumed=_assumed(content["assumed"]),
            sessions=[_session(name, **each) for name, each in content["sessions"].items()],
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path or GIVEN} is not a table of devices ({OURS.sub('in a row:', str(error))}); "
            f"{GIVEN} shows the shape"
        ) from error


def _given(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    require(Path(path).is_file(), f"devices is {path!r}, and there is no such file")
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    require(isinstance(found, dict), f"{path} is empty or no mapping; {GIVEN} shows the shape")
    return dict(found)


def _device(
    name: str,
    *,
    kind: str,
    memory_gb: float | None,
    bandwidth_gb_s: float,
    link_gb_s: float,
    tflops: dict[str, float],
    usd_per_hour: list[float] | float | None,
    source: str,
    price_source: str = "",
) -> Device:
    """A row of the table; every peak must say where it is from."""
    require(bool(source), f"{name} has no source")
    threads = torch.get_num_threads() if kind == "cpu" else 1
    memory = memory_of_this_machine() if memory_gb is None else float(memory_gb) * 1e9
    flops = {precision: threads * float(rate) * 1e12 for precision, rate in tflops.items()}
    price = None if usd_per_hour is None else _span(usd_per_hour)
    for what, value in {"memory_gb": memory, "bandwidth_gb_s": float(bandwidth_gb_s)}.items():
        above(f"{what} of {name}", value, 0)
    at_least(f"usd_per_hour of {name}", None if price is None else price.low, 0)
    return Device(
        name, kind, memory, float(bandwidth_gb_s) * 1e9, float(link_gb_s) * 1e9, flops, price
    )


def _session(name: str, *, device: str, number: int, hours: float, source: str) -> Session:
    require(bool(source), f"{name} has no source")
    return Session(name, device, int(number), float(hours))


def _assumed(given: dict[str, Any]) -> Assumed:
    return Assumed(
        arithmetic={
            kind: {float(most): _span(share) for most, share in shares.items()}
            for kind, shares in given["arithmetic"].items()
        },
        bandwidth=_span(given["bandwidth"]),
        links=_span(given["links"]),
        calls_us={
            kind: {way: _span(each) for way, each in ways.items()}
            for kind, ways in given["calls_us"].items()
        },
        disk_gb_s=_span(given["disk_gb_s"]),
        start_s=_span(given["start_s"]),
        publish_gb_s={name: _span(each) for name, each in given["publish_gb_s"].items()},
    )


def _span(given: Any) -> Span:
    low, high = given if isinstance(given, list) else (given, given)
    return Span(*sorted((float(low), float(high))))


def memory_of_this_machine() -> float:
    """Bytes of the processor's memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
