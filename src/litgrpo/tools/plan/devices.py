"""Devices, prices and cloud sessions: a dated table of public numbers; users may extend it."""

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

DEVICE_FILE = ASSETS / "devices.yaml"
PYTHON_SIGNATURE = re.compile(r"^_\w+\(\)")  # beginning of Python's message about wrong keys
SECTIONS = ("date", "devices", "assumptions", "sessions")


@dataclass(frozen=True)
class Bounds:
    """A number known to lie between two bounds.

    Example:
        >>> Bounds(1, 2) + Bounds(3, 3), Bounds(1, 2) * 2
        (Bounds(low=4, high=5), Bounds(low=2, high=4))
    """

    low: float
    high: float

    def __add__(self, other: Bounds) -> Bounds:
        """Add both bounds."""
        return Bounds(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> Bounds:
        """Multiply both bounds with a number."""
        return Bounds(self.low * factor, self.high * factor)

    def per(self, rate: Bounds) -> Bounds:
        """Divide by a rate; the lower bound is reached at the highest rate."""
        return Bounds(self.low / rate.high, self.high / rate.low)

    def larger(self, other: Bounds) -> Bounds:
        """Return the larger of both lower and of both upper bounds."""
        return Bounds(max(self.low, other.low), max(self.high, other.high))

    def times(self, other: Bounds) -> Bounds:
        """Multiply with another number between bounds."""
        return Bounds(self.low * other.low, self.high * other.high)

    @property
    def middle(self) -> float:
        """Geometric mean of the bounds."""
        return (self.low * self.high) ** 0.5


ZERO = Bounds(0.0, 0.0)


@dataclass(frozen=True)
class Device:
    """A kind of device; rates are peaks of its data sheet.

    Args:
        name: name in the table.
        kind: cuda, tpu or cpu.
        memory: bytes.
        bandwidth: bytes per second of its memory.
        link: bytes per second to other devices, one way.
        flops: {precision: operations per second}.
        price: dollars per hour; None: unknown.

    Example:
        >>> h100 = load_devices().device("h100")
        >>> h100.gigabytes, h100.flops["bfloat16"]
        (80.0, 989000000000000.0)
    """

    name: str
    kind: str
    memory: float
    bandwidth: float
    link: float
    flops: dict[str, float]
    price: Bounds | None

    @property
    def gigabytes(self) -> float:
        """Memory in units of 10^9 bytes."""
        return self.memory / 1e9


class CloudSession(NamedTuple):
    """Limit of a free cloud session.

    Example:
        >>> CloudSession("Kaggle TPU", "v5e", number=8, hours=9.0).hours
        9.0
    """

    name: str
    device: str
    number: int
    hours: float


@dataclass(frozen=True)
class Assumptions:
    """Efficiencies that data sheets do not state; `low` of a fraction is the worse one.

    Args:
        arithmetic: {kind of device: {most weights of a model: fraction of the peak}}.
        bandwidth: fraction of the peak.
        links: fraction of the peak.
        calls_us: {kind of device: {eager or recorded: microseconds per layer}}, the worse first.
        disk_gb_s: write rate of files.
        start_s: seconds before the first iteration, the worse first.
        publish_gb_s: {class: rate from the trainer to samplers}.

    Example:
        >>> load_devices().assumptions.flops_frac("cuda", weights=7e9).high <= 1
        True
    """

    arithmetic: dict[str, dict[float, Bounds]]
    bandwidth: Bounds
    links: Bounds
    calls_us: dict[str, dict[str, Bounds]]
    disk_gb_s: Bounds
    start_s: Bounds
    publish_gb_s: dict[str, Bounds]

    def flops_frac(self, kind: str, weights: float) -> Bounds:
        """Return the fraction of a device's peak that a model of this size reaches."""
        fractions = sorted(self.arithmetic[kind].items())
        return next(frac for most, frac in fractions if weights <= most)


@dataclass(frozen=True)
class DeviceTable:
    """All known devices.

    Args:
        date: date of prices and limits.
        devices: {name: device}.
        assumptions: efficiencies that data sheets do not state.
        sessions: limits of free cloud sessions.

    Example:
        >>> "h100" in load_devices().devices
        True
    """

    date: str
    devices: dict[str, Device]
    assumptions: Assumptions
    sessions: list[CloudSession] = field(default_factory=list)

    def device(self, name: str) -> Device:
        """Look up a device, in upper or lower case.

        Raises:
            ValueError: the name is unknown.
        """
        names = {each.lower(): each for each in self.devices}
        near, known = did_you_mean(name.lower(), names), ", ".join(self.devices)
        require(name.lower() in names, f"chip is {name!r}{near}; it can be {known}")
        return self.devices[names[name.lower()]]


def load_devices(path: str | None = None) -> DeviceTable:
    """Load the table, with additions and replacements of a user's file.

    Args:
        path: of that file.

    Raises:
        ValueError: the file does not exist or has another format.
    """
    content = yaml.safe_load(DEVICE_FILE.read_text(encoding="utf-8"))
    for name, part in _read_file(path).items():
        require(
            name in SECTIONS,
            f"{path}: {name!r} is not a section of a device table{did_you_mean(name, SECTIONS)}; "
            f"they are {', '.join(SECTIONS)}",
        )
        content[name] = {**content[name], **part} if isinstance(part, dict) else part
    try:
        return DeviceTable(
            date=str(content["date"]),
            devices={name: _make_device(name, **each) for name, each in content["devices"].items()},
            assumptions=_make_assumptions(content["assumptions"]),
            sessions=[_make_session(name, **each) for name, each in content["sessions"].items()],
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        reason = PYTHON_SIGNATURE.sub("in a row:", str(error))
        raise ValueError(
            f"{path or DEVICE_FILE} is not a device table ({reason}); "
            f"see {DEVICE_FILE} for the format"
        ) from error


def _read_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    require(Path(path).is_file(), f"devices is {path!r}, but there is no such file")
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    require(
        isinstance(found, dict),
        f"{path} is empty or not a mapping; see {DEVICE_FILE} for the format",
    )
    return dict(found)


def _make_device(
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
    """Build a device from a row of the table; every row must have a source."""
    require(bool(source), f"{name} has no source")
    threads = torch.get_num_threads() if kind == "cpu" else 1
    memory = memory_of_this_machine() if memory_gb is None else float(memory_gb) * 1e9
    flops = {precision: threads * float(rate) * 1e12 for precision, rate in tflops.items()}
    price = None if usd_per_hour is None else _make_bounds(usd_per_hour)
    for key, value in {"memory_gb": memory, "bandwidth_gb_s": float(bandwidth_gb_s)}.items():
        above(f"{key} of {name}", value, 0)
    at_least(f"usd_per_hour of {name}", None if price is None else price.low, 0)
    return Device(
        name, kind, memory, float(bandwidth_gb_s) * 1e9, float(link_gb_s) * 1e9, flops, price
    )


def _make_session(
    name: str, *, device: str, number: int, hours: float, source: str
) -> CloudSession:
    require(bool(source), f"{name} has no source")
    return CloudSession(name, device, int(number), float(hours))


def _make_assumptions(given: dict[str, Any]) -> Assumptions:
    return Assumptions(
        arithmetic={
            kind: {float(most): _make_bounds(share) for most, share in shares.items()}
            for kind, shares in given["arithmetic"].items()
        },
        bandwidth=_make_bounds(given["bandwidth"]),
        links=_make_bounds(given["links"]),
        calls_us={
            kind: {way: _make_bounds(each) for way, each in ways.items()}
            for kind, ways in given["calls_us"].items()
        },
        disk_gb_s=_make_bounds(given["disk_gb_s"]),
        start_s=_make_bounds(given["start_s"]),
        publish_gb_s={name: _make_bounds(each) for name, each in given["publish_gb_s"].items()},
    )


def _make_bounds(given: Any) -> Bounds:
    low, high = given if isinstance(given, list) else (given, given)
    return Bounds(*sorted((float(low), float(high))))


def memory_of_this_machine() -> float:
    """Return the bytes of this machine's memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
