"""What must be there before a trainer for XLA devices is built, each lack in one sentence.

Nothing here imports torch_xla, starts a runtime or asks the network.
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
# Device numbers of TPU v2 and v3, v4, v5e, v5p, v6e and 7x, as torch-xla 2.9 knows them.
TPUS = {"0x0027", "0x005e", "0x0063", "0x0062", "0x006f", "0x0056", "0x0076"}
INSTALL = "in an environment of its own: pip install -r requirements-xla.txt"
# Environment variables without which torch-xla looks for a TPU by asking the cloud's metadata
# server, without a time limit.
NO_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1"}


def check(trainer: Any, rows: int | None, pci: Path = PCI) -> None:
    """Refuse a trainer for which this machine lacks something.

    Args:
        trainer: settings of the Trainer, `accelerator` and `strategy` among them.
        rows: N = B * G rows of a rollout, or None.
        pci: where the system lists its devices.

    Raises:
        ValueError: what is missing and what to do.
    """
    accelerator, strategy = _name(trainer.accelerator), _name(trainer.strategy)
    on_cpu = accelerator == "XLACPUAccelerator"
    if not (on_cpu or accelerator in ("tpu", "xla") or "xla" in strategy.lower()):
        # Lightning looks for a TPU by itself, through torch-xla.
        if accelerator == "auto" and find_spec("torch_xla") is not None and not chips(pci):
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
    number = int(os.environ.get("CPU_NUM_DEVICES", "1")) if device == "CPU" else chips(pci)
    if device == "TPU":
        _check_chips(wanted, number)
    shares = max(1, number) if strategy == "XLASPMDStrategy" else 1
    require(
        (rows or 0) % shares == 0,
        f"{rows} rows of a rollout (data.batch_size x model.group_size) cannot be divided "
        f"evenly among {shares} chips; make it a multiple of {shares}.",
    )


def chips(pci: Path = PCI) -> int:
    """TPU chips of this machine, as the system lists them.

    Args:
        pci: where it does.
    """
    found = [vendor.parent for vendor in pci.glob("*/vendor") if _word(vendor) == GOOGLE]
    return sum(_word(folder / "device") in TPUS for folder in found)


def _check_packages(wanted: str) -> None:
    require(
        find_spec("torch_xla") is not None,
        f"{wanted}, but torch_xla is not installed. Install it {INSTALL}",
    )
    try:
        theirs = version("torch_xla")
    except PackageNotFoundError as error:
        raise ValueError(
            f"{wanted}, but the torch_xla that is found here has no version, so nothing says which "
            f"torch it belongs to. Install it {INSTALL}"
        ) from error
    ours = torch.__version__
    require(
        ours.split(".")[:2] == theirs.split(".")[:2],
        f"torch {ours} and torch_xla {theirs} do not belong together: the first two numbers "
        f"must be the same. Install both {INSTALL}",
    )


def _check_chips(wanted: str, number: int) -> None:
    require(
        number > 0,
        f"{wanted}, but this machine has no TPU chip (none is listed under {PCI}). Start it on "
        "a TPU machine, or give -c configs/hardware/xla_cpu.yaml and PJRT_DEVICE=CPU.",
    )
    require(
        find_spec("libtpu") is not None,
        f"{wanted}, but the TPU's library is missing: pip install 'torch-xla[tpu]==2.9.0'",
    )


def _name(choice: Any) -> str:
    """The word, or the class without its module, that a recipe gives."""
    path = choice if isinstance(choice, str) else choice.class_path
    return str(path).rpartition(".")[2]


def _word(file: Path) -> str:
    return file.read_text().strip()
