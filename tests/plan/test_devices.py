"""Memory of devices: by name, or as a number of GB."""

import pytest

from litgrpo.plan.devices import DEVICES, devices_of, find_device, memory_of_this_machine


def test_memory_is_in_bytes_and_a_cpu_is_this_machine():
    assert (find_device("h100").memory, find_device("h100").usable) == (80e9, 72e9)
    assert find_device("cpu").memory == memory_of_this_machine()
    for kind in DEVICES:
        sizes = [device.memory for device in devices_of(kind)]
        assert sizes == sorted(sizes)  # "fits on" lists the smallest first


def test_a_device_is_found_in_upper_and_lower_case_and_the_nearest_is_named():
    assert find_device("A100-80") == find_device("a100-80")
    for name, near in (("h10", "h100"), ("RTX490", "rtx4090"), ("L40", "l40s")):
        with pytest.raises(ValueError, match=f"{name}.*did you mean '{near}'.*v5e.*number of GB"):
            find_device(name)


def test_a_number_is_the_memory_in_gb_of_the_trainers_kind_of_device():
    device = find_device("46.5", "tpu")
    assert (device.kind, device.memory) == ("tpu", 46.5e9)
    for text in ("0", "-3", "nan"):
        with pytest.raises(ValueError, match="chip is"):
            find_device(text)
