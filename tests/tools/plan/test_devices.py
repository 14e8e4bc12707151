"""The table of devices, and what a user's file does to it."""

import pytest
import yaml

from litgrpo.tools.plan.devices import GIVEN, Span, devices, memory_of_this_machine


def test_every_device_and_session_says_where_its_numbers_are_from():
    content = yaml.safe_load(GIVEN.read_text())
    for kind in ("devices", "sessions"):
        assert all(len(each["source"]) > 10 for each in content[kind].values())
    priced = [each for each in content["devices"].values() if each["usd_per_hour"]]
    assert all(each["price_source"] for each in priced)
    assert content["date"].year >= 2026


def test_numbers_have_units_and_a_cpu_is_this_machine():
    found = devices()
    h100 = found.device("h100")
    assert (h100.memory, h100.bandwidth, h100.flops["bfloat16"]) == (80e9, 3350e9, 989e12)
    assert h100.price == Span(1.99, 5.0)
    assert found.device("cpu").memory == memory_of_this_machine()
    shares = [found.assumed.share_of_peak("cuda", weights).high for weights in (1e9, 7e9)]
    assert shares[0] < shares[1]


def test_a_file_adds_replaces_and_keeps(tmp_path):
    mine = tmp_path / "mine.yaml"
    cheap = yaml.safe_load(GIVEN.read_text())["devices"]["t4"] | {"usd_per_hour": 0.01}
    mine.write_text(yaml.safe_dump({"date": "2027-01-01", "devices": {"t4": cheap, "my": cheap}}))
    found = devices(str(mine))
    assert found.date == "2027-01-01"
    assert found.device("my").price == Span(0.01, 0.01)
    assert found.device("h100") == devices().device("h100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prices: {}", "'prices' is no part of a table of devices"),
        ("[1]", "is empty or no mapping"),
        ("a: [", "is no YAML"),
        ("devices: {mine: {kind: cuda}}", "is not a table of devices"),
        ("devices: {t4: {speed: 3}}", "is not a table of devices"),
        ("sessions: 3", "is not a table of devices"),
    ],
)
def test_what_is_no_table_is_refused_in_a_line(text, message, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as refused:
        devices(str(path))
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="there is no such file"):
        devices("nowhere.yaml")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("memory_gb", float("nan"), "memory_gb of mine is nan; it must be above 0"),
        ("bandwidth_gb_s", 0, "bandwidth_gb_s of mine is 0.0; it must be above 0"),
        ("usd_per_hour", -3, "usd_per_hour of mine is -3.0; it must be at least 0"),
    ],
)
def test_numbers_that_no_device_has_are_refused(tmp_path, key, value, message):
    row = yaml.safe_load(GIVEN.read_text())["devices"]["t4"] | {key: value}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"devices": {"mine": row}}))
    with pytest.raises(ValueError, match=message):
        devices(str(file))
    del row[key]
    file.write_text(yaml.safe_dump({"devices": {"mine": row}}))
    with pytest.raises(ValueError, match=f"in a row: missing 1 required .*{key}"):
        devices(str(file))
