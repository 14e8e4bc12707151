"""Each lack of a machine is one sentence, told before a trainer is built; no network is asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jsonargparse import Namespace

from litgrpo.xla import preflight

ROOT = Path(__file__).parents[2]
RECIPE = ["-c", "configs/quickstart.yaml", "-c", "configs/hardware/tpu.yaml"]
BELONGING = f"{torch.__version__.rpartition('.')[0]}.9"
INSTALLED = preflight.find_spec("torch_xla") is not None


def fake_torch_xla(folder: Path, version: str | None, *, libtpu: bool = False) -> Path:
    """A package that cannot be imported, as that of a wrong pair."""
    for name in ("torch_xla", *(["libtpu"] if libtpu else [])):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('undefined symbol')\n")
    if version is not None:
        info = folder / f"torch_xla-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: torch_xla\nVersion: {version}\n")
    return folder


def started(folder: Path):
    """`cli.py fit` for a TPU in a process with another package folder in front."""
    paths = [str(ROOT / "src"), str(folder)]
    kept = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
    return subprocess.run(
        [sys.executable, "cli.py", "fit", *RECIPE],
        env=kept | {"PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_wrong_pair_is_told_by_the_program_in_one_line(tmp_path):
    done = started(fake_torch_xla(tmp_path, "2.6.0"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: torch {torch.__version__} and torch_xla 2.6.0 do not")
    assert done.stderr.count("\n") == 1


def tpu(strategy="auto", accelerator="tpu") -> Namespace:
    return Namespace(accelerator=accelerator, strategy=strategy)


def spmd() -> Namespace:
    return tpu(Namespace(class_path="litgrpo.xla.strategy.XLASPMDStrategy"))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Gives a machine a torch_xla, a library and chips."""

    def make(version: str | None, *, chips: int = 0, libtpu: bool = True, **environment: str):
        packages, pci = tmp_path / "packages", tmp_path / "pci"
        packages.mkdir()
        monkeypatch.syspath_prepend(str(fake_torch_xla(packages, version, libtpu=libtpu)))
        for number in range(chips + 1):  # the first one is something else
            (pci / str(number)).mkdir(parents=True)
            (pci / str(number) / "vendor").write_text("0x1ae0\n" if number else "0x8086\n")
            (pci / str(number) / "device").write_text("0x0063\n")
        for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES", *preflight.NO_TPU):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return pci

    return make


@pytest.mark.skipif(INSTALLED, reason="torch_xla is installed")
def test_a_tpu_without_torch_xla_is_refused():
    with pytest.raises(ValueError, match=r"torch_xla is not installed\. Install it in an env"):
        preflight.check(tpu(), None)


def test_a_torch_xla_without_version_is_refused(machine, monkeypatch):
    def unknown(name):
        raise preflight.PackageNotFoundError(name)

    monkeypatch.setattr(preflight, "version", unknown)
    with pytest.raises(ValueError, match="has no version"):
        preflight.check(tpu(), None, machine(None))


def test_an_unset_pjrt_device_is_refused(machine):
    with pytest.raises(ValueError, match="PJRT_DEVICE is not set: export PJRT_DEVICE=TPU"):
        preflight.check(tpu(), None, machine(BELONGING))


def test_the_cpu_is_no_tpu(machine):
    pci = machine(BELONGING, PJRT_DEVICE="CPU")
    with pytest.raises(ValueError, match="but PJRT_DEVICE is CPU"):
        preflight.check(tpu(), None, pci)


def test_a_machine_without_chip_is_refused(machine):
    pci = machine(BELONGING, PJRT_DEVICE="TPU")
    with pytest.raises(ValueError, match="this machine has no TPU chip"):
        preflight.check(tpu(), None, pci)


def test_a_missing_library_is_named(machine):
    pci = machine(BELONGING, chips=4, libtpu=False, PJRT_DEVICE="TPU")
    with pytest.raises(ValueError, match="the TPU's library is missing"):
        preflight.check(tpu(), None, pci)


def test_rows_that_chips_cannot_share_are_refused(machine):
    pci = machine(BELONGING, chips=8, PJRT_DEVICE="TPU")
    with pytest.raises(ValueError, match=r"12 rows of a rollout .* evenly among 8 chips"):
        preflight.check(spmd(), 12, pci)


def test_a_machine_that_has_everything_passes(machine):
    pci = machine(BELONGING, chips=8, PJRT_DEVICE="TPU")
    preflight.check(spmd(), 32, pci)
    preflight.check(tpu(), 12, pci)  # one chip needs no share
    assert preflight.chips(pci) == 8


def test_the_cpu_as_xla_device_needs_no_chip_and_shares_among_virtual_ones(machine):
    pci = machine(BELONGING, CPU_NUM_DEVICES="4")
    accelerator = Namespace(class_path="litgrpo.xla.strategy.XLACPUAccelerator")
    trainer = Namespace(accelerator=accelerator, strategy=spmd().strategy)
    preflight.check(trainer, 8, pci)
    with pytest.raises(ValueError, match=r"6 rows of a rollout .* among 4 chips"):
        preflight.check(trainer, 6, pci)


def test_elsewhere_nothing_is_asked_and_torch_xla_asks_no_network(machine, monkeypatch):
    pci = machine(BELONGING)
    preflight.check(tpu(accelerator="cpu"), 7, pci)
    assert "TPU_SKIP_MDS_QUERY" not in os.environ
    for name in preflight.NO_TPU:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    preflight.check(tpu(accelerator="auto"), 7, pci)
    assert {name: os.environ[name] for name in preflight.NO_TPU} == preflight.NO_TPU
