"""Every missing requirement raises before a trainer is built, without network access."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jsonargparse import Namespace

from litgrpo.xla import preflight
from tests.support.command_line import without_leaks
from tests.support.raises import raises_for

ROOT = Path(__file__).parents[2]
RECIPE = ["-c", "configs/quickstart.yaml", "-c", "configs/hardware/tpu.yaml"]
BELONGING = f"{torch.__version__.rpartition('.')[0]}.9"
INSTALLED = preflight.find_spec("torch_xla") is not None


def fake_torch_xla(folder: Path, version: str | None, *, libtpu: bool = False) -> Path:
    """Write a torch_xla that cannot be imported, like one of another torch version."""
    for name in ("torch_xla", *(["libtpu"] if libtpu else [])):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('undefined symbol')\n")
    if version is not None:
        info = folder / f"torch_xla-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: torch_xla\nVersion: {version}\n")
    return folder


def run_fit(folder: Path):
    """Run `cli.py fit` for a TPU in a process that finds this package folder first."""
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


def test_incompatible_versions_exit_with_a_one_line_error(tmp_path):
    done = run_fit(fake_torch_xla(tmp_path, "2.6.0"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: torch {torch.__version__} and torch_xla 2.6.0 do not")
    assert without_leaks(done.stderr).count("\n") == 1


def tpu(strategy="auto", accelerator="tpu") -> Namespace:
    return Namespace(accelerator=accelerator, strategy=strategy)


def spmd() -> Namespace:
    return tpu(Namespace(class_path="litgrpo.xla.strategy.XLASPMDStrategy"))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Simulate a machine with torch_xla, libtpu and chips."""

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
def test_a_tpu_without_torch_xla_raises():
    with raises_for("torch_xla", "requirements-xla.txt"):
        preflight.check(tpu(), None)


def test_a_torch_xla_without_version_raises(machine, monkeypatch):
    def unknown(name):
        raise preflight.PackageNotFoundError(name)

    monkeypatch.setattr(preflight, "version", unknown)
    with raises_for("torch_xla", "version"):
        preflight.check(tpu(), None, machine(None))


def test_an_unset_pjrt_device_raises(machine):
    with raises_for("PJRT_DEVICE is not set"):
        preflight.check(tpu(), None, machine(BELONGING))


def test_the_cpu_client_raises_for_a_tpu(machine):
    pci = machine(BELONGING, PJRT_DEVICE="CPU")
    with raises_for("PJRT_DEVICE is CPU"):
        preflight.check(tpu(), None, pci)


def test_a_machine_without_chip_raises(machine):
    pci = machine(BELONGING, PJRT_DEVICE="TPU")
    with raises_for("trainer.accelerator", "TPU chip"):
        preflight.check(tpu(), None, pci)


def test_a_missing_libtpu_raises(machine):
    pci = machine(BELONGING, chips=4, libtpu=False, PJRT_DEVICE="TPU")
    with raises_for("libtpu"):
        preflight.check(tpu(), None, pci)


def test_a_number_of_rows_that_chips_cannot_share_raises(machine):
    pci = machine(BELONGING, chips=8, PJRT_DEVICE="TPU")
    with raises_for("data.batch_size x model.group_size", "12", "8"):
        preflight.check(spmd(), 12, pci)


def test_a_complete_machine_passes(machine):
    pci = machine(BELONGING, chips=8, PJRT_DEVICE="TPU")
    preflight.check(spmd(), 32, pci)
    preflight.check(tpu(), 12, pci)  # one chip needs no share
    assert preflight.count_chips(pci) == 8


def test_the_cpu_as_xla_device_needs_no_chip_and_shards_over_virtual_devices(machine):
    pci = machine(BELONGING, CPU_NUM_DEVICES="4")
    accelerator = Namespace(class_path="litgrpo.xla.strategy.XLACPUAccelerator")
    trainer = Namespace(accelerator=accelerator, strategy=spmd().strategy)
    preflight.check(trainer, 8, pci)
    with raises_for("data.batch_size x model.group_size", "6", "4"):
        preflight.check(trainer, 6, pci)


def test_other_accelerators_pass_and_torch_xla_uses_no_network(machine, monkeypatch):
    pci = machine(BELONGING)
    preflight.check(tpu(accelerator="cpu"), 7, pci)
    assert "TPU_SKIP_MDS_QUERY" not in os.environ
    for name in preflight.NO_TPU:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    preflight.check(tpu(accelerator="auto"), 7, pci)
    assert {name: os.environ[name] for name in preflight.NO_TPU} == preflight.NO_TPU
