import math

import numpy as np

from litgrpo.tools.doctor.metrics import Metrics, of_rows


def test_rows_become_series_without_what_is_empty():
    rows = [{"step": "0", "a": "", "val/b": "1"}, {"step": "1", "a": "2"}, {"step": "2", "a": "x"}]
    metrics = of_rows(rows)
    assert metrics["a"].steps.tolist() == [1, 2]
    assert metrics["a"].values[0] == 2
    assert math.isnan(metrics["a"].values[1])
    assert metrics["a"].known.values.tolist() == [2]
    assert metrics.iterations == 2
    assert "b" not in metrics
    assert len(metrics["b"]) == 0


def test_a_later_row_of_an_iteration_replaces_the_earlier_one():
    metrics = of_rows([{"step": 3, "a": 1}, {"step": 3, "a": 2}])
    assert metrics["a"].values.tolist() == [2]


def test_parts_are_names_with_a_spread_of_their_own():
    names = ["reward/mean", "reward/std", "reward/group_std", "reward/right", "reward/right_std"]
    assert of_rows([dict.fromkeys(names, 1) | {"step": 1}]).parts() == ["right"]


def test_the_held_out_accuracy_is_found_and_not_its_bounds():
    names = ["val/avg@4_low", "val/avg@4", "val/avg@4_high", "val/pass@4"]
    assert of_rows([dict.fromkeys(names, 1) | {"step": 1}]).success() == "val/avg@4"
    assert Metrics().success() == ""


def test_since_is_where_the_last_unbroken_stretch_began():
    series = of_rows([{"step": n, "a": 0} for n in range(1, 9)])["a"]
    held = np.array([True, False, False, False, True, True, False, True])
    assert series.since(held) == 5
