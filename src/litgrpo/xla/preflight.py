"""Check the requirements of a trainer for XLA devices before it is built.

The checks do not import torch_xla, start a runtime or use the network.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from litgrpo.arguments import require

PCI = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
# PCI device ids of TPU v2 and v3, v4, v5e, v5p, v6e and 7x, from torch-xla 2.9.
TPUS = {"0x0027", "0x005e", "0x0063", "0x0062", "0x006f", "0x0056", "0x0076"}
INSTALL = "in a separate environment: pip install -r requirements-xla.txt"
# Without these variables torch-xla queries the cloud's metadata server for a TPU, without timeout.
NO_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1"}


def check(trainer: Any, rows: int | None, pci: Path = PCI) -> None:
    """Check that this machine has what a trainer needs.

    Args:
        trainer: arguments of the Trainer, including `accelerator` and `strategy`.
        rows: N = B * G rows of a rollout, or None.
        pci: folder in which Linux lists PCI devices.

    Raises:
        ValueError: names what is missing and the remedy.
    """
    accelerator, strategy = _name(trainer.accelerator), _name(trainer.strategy)
    on_cpu = accelerator == "XLACPUAccelerator"
    if not (on_cpu or accelerator in ("tpu", "xla") or "xla" in strategy.lower()):
        # Lightning's `auto` looks for a TPU through torch-xla.
        if accelerator == "auto" and find_spec("torch_xla") is not None and not count_chips(pci):
            os.environ.update(NO_TPU | dict(os.environ))
        return
    wanted = f"trainer.accelerator is {accelerator} and trainer.strategy {strategy}"
    _check_packages(wanted)
    device = os.environ.get("PJRT_DEVICE", "CPU" if on_cpu else "").upper()
    require(
        device != "",
        f"{wanted}, but PJRT_DEVICE is not set: export PJRT_DEVICE=TPU on a TPU machine; to "
        "try it without one, give -c configs/hardware/xla_cpu.yaml and PJRT_DEVICE=CPU.",
    )
    require(
        device != "CPU" or on_cpu,
        f"{wanted}, but PJRT_DEVICE is CPU: export PJRT_DEVICE=TPU on a TPU machine, or give "
        "-c configs/hardware/xla_cpu.yaml.",
    )
    number = int(os.environ.get("CPU_NUM_DEVICES", "1")) if device == "CPU" else count_chips(pci)
    if device == "TPU":
        _check_chips(wanted, number)
    shares = max(1, number) if strategy == "XLASPMDStrategy" else 1
    require(
        (rows or 0) % shares == 0,
        f"data.batch_size x model.group_size is {rows}; it must be a multiple of {shares}, the "
        "number of chips.",
    )


def count_chips(pci: Path = PCI) -> int:
    """Count the TPU chips of this machine.

    Args:
        pci: folder in which Linux lists PCI devices.
    """
    found = [vendor.parent for vendor in pci.glob("*/vendor") if _read_word(vendor) == GOOGLE]
    return sum(_read_word(folder / "device") in TPUS for folder in found)


def _check_packages(wanted: str) -> None:
    require(
        find_spec("torch_xla") is not None,
        f"{wanted}, but torch_xla is not installed. Install it {INSTALL}",
    )
    try:
        theirs = version("torch_xla")
    except PackageNotFoundError as error:
        raise ValueError(
            f"{wanted}, but the installed torch_xla has no version, so its torch version is "
            f"unknown. Install it {INSTALL}"
        ) from error
    torch_version = torch.__version__
    require(
        torch_version.split(".")[:2] == theirs.split(".")[:2],
        f"torch {torch_version} and torch_xla {theirs} do not fit together: major and minor "
        f"version must be equal. Install both {INSTALL}",
    )


def _check_chips(wanted: str, number: int) -> None:
    require(
        number > 0,
        f"{wanted}, but this machine has no TPU chip (none is listed under {PCI}). Start it on "
        "a TPU machine, or give -c configs/hardware/xla_cpu.yaml and PJRT_DEVICE=CPU.",
    )
    require(
        find_spec("libtpu") is not None,
        f"{wanted}, but libtpu is not installed: pip install 'torch-xla[tpu]==2.9.0'",
    )


def _name(choice: Any) -> str:
    """Return the name, or the class name without its module, of a config value."""
    path = choice if isinstance(choice, str) else choice.class_path
    return str(path).rpartition(".")[2]


def _read_word(file: Path) -> str:
    return file.read_text().strip()
