"""The plan's constants for processors, against steps that were measured."""

import json
import math

import pytest

from tests.benchmarks import page, plan_sweeps


@pytest.fixture
def two_steps(tmp_path, monkeypatch):
    """A small and a larger step of one thread, and one of two threads, which does not count."""
    litgrpo = {"mean_completion_len": 32.0, "rollout_s": 1.0, "learn_s": 2.0}
    found = {"threads": 1, "litgrpo": litgrpo}
    results = {
        "step --size tiny --stop-prob 0.02": found,
        "step --size 30m --stop-prob 0.02": found,
        "step --size 100m": found | {"threads": 2},
        "roofline --kernels": {},
    }
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(results))
    monkeypatch.setattr(plan_sweeps, "MEASURED", {"here": path, "nowhere": tmp_path / "none"})
    return list(plan_sweeps.points(tmp_path))


def test_the_plan_is_told_model_rows_and_mean_length(two_steps):
    assert [point.arguments.size for point in two_steps] == ["tiny", "30m"]
    tiny = two_steps[0]
    assert tiny.seconds == {"rollout": 1.0, "learning": 2.0}
    assert tiny.estimate.lengths.low == tiny.estimate.lengths.high == 32 / 128
    work = tiny.estimate.recipe.work
    assert (work.rollouts[0], work.prompt_len, work.completion_len) == ((8, 8), 64, 128)
    assert tiny.estimate.linear == 4 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 512)


def test_the_fit_finds_the_constants_that_made_the_numbers(two_steps):
    true = {"share": (0.4, 0.4), "calls": (90.0, 90.0)}
    made = [
        point._replace(seconds={name: span.low for name, span in point.plan_seconds(true).items()})
        for point in two_steps
    ]
    found = plan_sweeps.fit_constants(made)
    assert plan_sweeps.score(made, found) <= plan_sweeps.score(made, true) + 0.3
    for point in made:
        for phase, span in point.plan_seconds(found).items():
            assert math.isclose(span.middle, point.seconds[phase], rel_tol=0.25)


def test_the_table_counts_what_is_inside(two_steps):
    row = plan_sweeps.rows(two_steps)[2]
    span = two_steps[0].plan_seconds()["rollout"], two_steps[1].plan_seconds()["rollout"]
    inside = sum(each.low <= 1.0 <= each.high for each in span)
    assert row.startswith(f"| here | rollout | 2 | {inside} |")


def test_both_processors_were_measured():
    assert {path.exists() for path in plan_sweeps.MEASURED.values()} == {True}
    assert plan_sweeps.MEASURED["Zen 5"] == page.results_of("zen5")
