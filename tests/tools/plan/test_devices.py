"""The table of devices, and additions of a user's file."""

import pytest
import yaml

from litgrpo.tools.plan.devices import DEVICE_FILE, Bounds, load_devices, memory_of_this_machine


def test_every_device_and_session_has_a_source():
    content = yaml.safe_load(DEVICE_FILE.read_text())
    for kind in ("devices", "sessions"):
        assert all(len(each["source"]) > 10 for each in content[kind].values())
    priced = [each for each in content["devices"].values() if each["usd_per_hour"]]
    assert all(each["price_source"] for each in priced)
    assert content["date"].year >= 2026


def test_values_are_in_bytes_and_a_cpu_is_this_machine():
    found = load_devices()
    h100 = found.device("h100")
    assert (h100.memory, h100.bandwidth, h100.flops["bfloat16"]) == (80e9, 3350e9, 989e12)
    assert h100.price == Bounds(1.99, 5.0)
    assert found.device("cpu").memory == memory_of_this_machine()
    shares = [found.assumptions.flops_frac("cuda", weights).high for weights in (1e9, 7e9)]
    assert shares[0] < shares[1]


def test_a_device_is_found_in_upper_and_lower_case_and_the_nearest_is_named():
    table = load_devices()
    assert table.device("H100") is table.device("h100")
    assert table.device("A100-80") is table.device("a100-80")
    for name, near in (("h10", "h100"), ("RTX490", "rtx4090"), ("L40", "l40s")):
        with pytest.raises(ValueError, match=f"{name}.*did you mean '{near}'.*v5e"):
            table.device(name)


def test_a_file_adds_and_replaces_devices(tmp_path):
    mine = tmp_path / "mine.yaml"
    cheap = yaml.safe_load(DEVICE_FILE.read_text())["devices"]["t4"] | {"usd_per_hour": 0.01}
    mine.write_text(yaml.safe_dump({"date": "2027-01-01", "devices": {"t4": cheap, "my": cheap}}))
    found = load_devices(str(mine))
    assert found.date == "2027-01-01"
    assert found.device("my").price == Bounds(0.01, 0.01)
    assert found.device("h100") == load_devices().device("h100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prices: {}", "prices"),
        ("[1]", "bad.yaml"),
        ("a: [", "bad.yaml"),
        ("devices: {mine: {kind: cuda}}", "bad.yaml"),
        ("devices: {t4: {speed: 3}}", "bad.yaml"),
        ("sessions: 3", "bad.yaml"),
    ],
)
def test_a_file_that_is_not_a_device_table_is_an_error_in_one_line(text, message, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_devices(str(path))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="devices"):
        load_devices("nowhere.yaml")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("memory_gb", float("nan"), "memory_gb of mine"),
        ("bandwidth_gb_s", 0, "bandwidth_gb_s of mine"),
        ("usd_per_hour", -3, "usd_per_hour of mine"),
    ],
)
def test_impossible_values_are_errors_that_name_the_key(tmp_path, key, value, message):
    row = yaml.safe_load(DEVICE_FILE.read_text())["devices"]["t4"] | {key: value}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"devices": {"mine": row}}))
    with pytest.raises(ValueError, match=message):
        load_devices(str(file))
    del row[key]
    file.write_text(yaml.safe_dump({"devices": {"mine": row}}))
    with pytest.raises(ValueError, match=key):
        load_devices(str(file))
