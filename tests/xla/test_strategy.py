"""What can be said without torch_xla: the file imports, and mistakes are told."""

import importlib.util

import pytest
import torch

from litgrpo.xla.strategy import XLACPUAccelerator, XLASPMDStrategy

without = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed here"
)


@without
def test_without_torch_xla_the_strategy_says_what_to_install():
    with pytest.raises(ModuleNotFoundError, match=r"litgrpo\[tpu\]"):
        XLASPMDStrategy()


def test_another_backend_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with pytest.raises(ValueError, match="PJRT_DEVICE is 'TPU'"):
        XLACPUAccelerator()


def test_lightning_sees_one_device_whatever_the_number_of_chips(monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    assert XLACPUAccelerator.parse_devices("auto") == 1
    assert XLACPUAccelerator.get_parallel_devices(1) == [torch.device("xla", 0)]
    with pytest.raises(ValueError, match="CPU_NUM_DEVICES"):
        XLACPUAccelerator.parse_devices(4)
