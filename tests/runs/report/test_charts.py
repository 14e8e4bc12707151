import pytest

from litgrpo.callbacks.metrics import definition
from litgrpo.runs.report.charts import (
    MAX_POINTS,
    Curve,
    axis_ticks,
    draw,
    group_curves,
    label_ticks,
    thin_out,
)
from litgrpo.runs.run import Run, table_of


def run_of(metrics):
    return Run(metrics=table_of([{"step": 1} | metrics]))


def test_a_spike_survives_ten_thousand_iterations():
    points = [(n, 1000.0 if n == 6789 else 0.0) for n in range(10_000)]
    thin = thin_out(points)
    assert len(thin) <= MAX_POINTS
    assert (6789, 1000.0) in thin
    assert thin == sorted(thin)


@pytest.mark.parametrize(
    "values", [[0.0], [5.0], [-2.0], [1e-12, 2e-12], [1e300, -1e300], [0.3, 0.3 + 1e-15]]
)
def test_an_axis_has_two_ends_around_its_values(values):
    ticks = axis_ticks(values)
    assert ticks[0] < ticks[-1]
    assert ticks[0] <= min(values)
    assert max(values) <= ticks[-1]
    assert 2 <= len(ticks) <= 7


@pytest.mark.parametrize("values", [[1.057, 1.066], [2.85e-4, 3.05e-4], [2.3e-7, 2.7e-7]])
def test_ticks_have_different_short_labels(values):
    labels = label_ticks(axis_ticks(values))
    assert len(set(labels)) == len(labels)
    assert max(map(len, labels)) <= 7


def test_coordinates_are_inside_the_drawing():
    drawn = draw([Curve("a", [(0, -1.0), (10, 3.0)], [(0, -2.0)] * 2, [(0, 4.0)] * 2)], 10)
    (curve,) = drawn.curves
    assert curve.path == "M46.0 123.7L330.0 34.3"
    assert curve.band.endswith("Z")
    assert drawn.table == [["0", "-1"], ["10", "3"]]


def test_a_finding_is_marked_at_its_iteration():
    assert draw([Curve("a", [(0, 1.0), (100, 2.0)])], 100, [(50.0, "1")]).marks == [(188.0, "1")]


def test_related_metrics_share_a_chart():
    names = ["val/avg@4", "val/pass@4", "val/greedy", "val/avg@4_low", "val/avg@4_high"]
    names += ["reward/mean", "reward/correct", "reward/correct_std", "reward/correct_share"]
    found = {
        title: [curve.name for curve in curves]
        for title, curves, _ in group_curves(run_of(dict.fromkeys(names, 0.5)))
    }
    assert found == {
        "Held-out accuracy": ["val/avg@4", "val/greedy", "val/pass@4"],
        "Training reward": ["reward/mean"],
        "Reward components": ["reward/correct"],
        "Share of the advantage per component": ["reward/correct_share"],
    }


def test_a_curve_has_its_interval_and_a_chart_its_definition():
    run = run_of({"val/avg@4": 0.5, "val/avg@4_low": 0.4, "val/avg@4_high": 0.6})
    ((_, (curve,), explanation),) = group_curves(run)
    assert (curve.low, curve.high) == ([(1, 0.4)], [(1, 0.6)])
    assert explanation == definition("val/avg@4")


def test_groups_without_a_gradient_have_a_chart():
    names = [f"reward/{kind}_frac" for kind in ("zero_variance_groups", "all_incorrect")]
    ((_, curves, _),) = group_curves(run_of(dict.fromkeys(names, 0.5)))
    assert [curve.name for curve in curves] == sorted(names)
