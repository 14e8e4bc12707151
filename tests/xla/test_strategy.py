"""Tests without torch_xla: the file imports, and mistakes raise."""

import importlib.util

import pytest
import torch

from litgrpo.xla.strategy import XLACPUAccelerator, XLASPMDStrategy
from tests.support.raises import raises_for

without = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed here"
)


@without
def test_without_torch_xla_the_error_names_the_extra_to_install():
    with raises_for("pip install torch==2.9.0", error=ModuleNotFoundError):
        XLASPMDStrategy()


def test_another_pjrt_device_in_the_environment_raises(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with raises_for("PJRT_DEVICE", "TPU"):
        XLACPUAccelerator()


def test_lightning_sees_one_device_for_any_number_of_chips(monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    assert XLACPUAccelerator.parse_devices("auto") == 1
    assert XLACPUAccelerator.get_parallel_devices(1) == [torch.device("xla", 0)]
    with raises_for("trainer.devices", "CPU_NUM_DEVICES"):
        XLACPUAccelerator.parse_devices(4)
