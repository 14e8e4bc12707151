import pytest

from litgrpo.tools.report.curves import MOST_POINTS, Line, bounds, draw, thinned, ticks


def test_a_spike_survives_ten_thousand_iterations():
    points = [(n, 1000.0 if n == 6789 else 0.0) for n in range(10_000)]
    thin = thinned(points)
    assert len(thin) <= MOST_POINTS
    assert (6789, 1000.0) in thin
    assert thin == sorted(thin)


@pytest.mark.parametrize(
    "values", [[0.0], [5.0], [-2.0], [1e-12, 2e-12], [1e300, -1e300], [0.3, 0.3 + 1e-15]]
)
def test_an_axis_has_two_ends_and_holds_its_values(values):
    low, high = bounds(values)
    assert low < high
    assert low <= min(values)
    assert max(values) <= high
    assert 2 <= len(ticks(low, high)) <= 7


def test_places_are_inside_the_drawing():
    drawn = draw([Line("a", [(0, -1.0), (10, 3.0)], [(0, -2.0)] * 2, [(0, 4.0)] * 2)], 10)
    (line,) = drawn.lines
    assert line["path"] == "M46.0 123.7L330.0 34.3"
    assert line["band"].endswith("Z")
    assert drawn.table == [["0", "-1"], ["10", "3"]]


def test_a_finding_is_marked_at_its_iteration():
    assert draw([Line("a", [(0, 1.0), (100, 2.0)])], 100, [(50.0, "1")]).marks == [(188.0, "1")]
