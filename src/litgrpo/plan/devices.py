"""Memory of the usual devices, and of this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from litgrpo.arguments import above, did_you_mean, require

GB = 1e9
# {kind: {name: GB of memory}}, of the makers' data sheets.
DEVICES: dict[str, dict[str, float]] = {
    "cuda": {
        **{"t4": 16, "p100": 16, "l4": 24, "rtx4090": 24, "l40s": 48},
        **{"a100-80": 80, "h100": 80, "h20": 96, "h200": 141},
    },
    "tpu": {"v5e": 16, "v4": 32, "v6e": 32, "v5p": 95},
}
# Fraction of the memory left for the runtime, compiler buffers and fragmentation.
SPARE_FRAC = 0.1


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Args:
        name: its name.
        kind: cuda, tpu or cpu.
        memory: bytes.
    """

    name: str
    kind: str
    memory: float

    @property
    def usable(self) -> float:
        """Bytes that a recipe may take."""
        return (1 - SPARE_FRAC) * self.memory

    def __str__(self) -> str:
        return f"{self.name} ({self.memory / GB:.3g} GB)"


def find_device(chip: str, kind: str = "cuda") -> Device:
    """Look up a device by its name in upper or lower case, or take a number as its GB.

    Args:
        chip: a name, or a number of GB.
        kind: kind of a device that is given by a number.

    Raises:
        ValueError: the name is unknown, or the number is not above 0.

    Example:
        >>> str(find_device("H100")), str(find_device("40"))
        ('h100 (80 GB)', 'cuda device (40 GB)')
    """
    try:
        size = float(chip)
    except ValueError:
        return _named_device(chip)
    above("chip", size, 0)
    return Device(f"{kind} device", kind, size * GB)


def _named_device(name: str) -> Device:
    devices = {device.name: device for kind in DEVICES for device in devices_of(kind)}
    devices["cpu"] = Device("cpu", "cpu", memory_of_this_machine())
    near, names = did_you_mean(name.lower(), devices), ", ".join(devices)
    require(
        name.lower() in devices,
        f"chip is {name!r}{near}; it can be {names}, or a number of GB",
    )
    return devices[name.lower()]


def devices_of(kind: str) -> list[Device]:
    """Return the named devices of a kind, the smallest first; [] for cpu."""
    return [Device(name, kind, size * GB) for name, size in DEVICES.get(kind, {}).items()]


def memory_of_this_machine() -> float:
    """Return the bytes of this machine's memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
