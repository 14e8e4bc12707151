"""A few iterations are run, and their times extrapolated to a whole run."""

import json
import re
from pathlib import Path

import pytest

from litgrpo.tools.plan.measuring import (
    ITERATIONS,
    NO_VALIDATION,
    MeasuredTimes,
    shorten_recipe,
    times_from_events,
)
from litgrpo.tools.plan.schedule import Schedule

ROOT = Path(__file__).parents[3]


def test_the_whole_run_is_extrapolated_by_hand():
    found = MeasuredTimes(
        whole=30.0, iteration=2.0, evaluation=4.0, save=0.5, learning_frac=0.25, peak_bytes=1
    )
    plan = Schedule(iterations=105, validate_every=50, save_every=35)
    # 100 more iterations, evaluations before and after and two more (at 50, 100), two more saves
    assert found.run(plan) == 30 + 100 * 2.0 + 2 * 4.0 + 2 * 0.5
    assert found.run(plan, trained_frac=0.0) == 30 + 100 * 1.5 + 2 * 4.0 + 2 * 0.5


def test_events_give_the_seconds_of_each_part():
    lines = [("validation", 1), ("end of validation", 9)]
    for start, end in ((10, 19), (20, 21), (22, 23), (24, 25), (26, 27)):
        lines += [("iteration", start), ("end of iteration", end)]
    lines += [("validation", 30), ("end of validation", 35), ("end of recipe", 36)]
    events = [{"event": event, "cpu": 10.0 * at, "wall": 0.0} for event, at in lines]
    found = times_from_events(events, "cpu", 500.0, 0.5, 7)
    assert found.iteration == 20.0  # the first, of 100, warms up
    assert found.evaluation == 50.0  # the last: warm
    assert found.save == 30.0
    assert (found.whole, found.learning_frac, found.peak_bytes) == (500.0, 0.5, 7)


def test_the_measured_recipe_differs_in_length_and_folder_only(tmp_path):
    config = {
        "model": {"class_path": "GRPO", "init_args": {"max_iterations": 900, "group_size": 3}},
        "trainer": {"callbacks": [{"class_path": "mine"}], "val_check_interval": 5, "devices": 2},
        "checkpoint": {"every_n_iterations": 2, "keep_best": 1},
        "run_dir": "runs/precious",
        "seed_everything": 4,
    }
    found = shorten_recipe(config, tmp_path)
    assert found["model"]["init_args"] == {"max_iterations": ITERATIONS, "group_size": 3}
    assert found["trainer"]["callbacks"][0] == {"class_path": "mine"}
    assert found["trainer"]["val_check_interval"] == NO_VALIDATION
    assert found["trainer"]["devices"] == 2
    assert found["checkpoint"] == {"every_n_iterations": 0, "keep_best": 1}
    assert found["run_dir"].startswith(str(tmp_path))
    assert found["seed_everything"] == 4
    assert config["run_dir"] == "runs/precious"


def test_a_recipe_is_run_and_extrapolated(cli, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ("--measure", "--report", "out.json", "--iterations", "1000")
    code, out, err = cli("plan", "-c", "recipe.yaml", *words)
    assert (code, err) == (0, "")
    assert "Measured here: 5 iterations" in out
    assert re.search(r"The whole run of 1,000 iterations:\n  wall: .*\n  cpu: ", out)
    found = json.loads(Path("out.json").read_text())["cpu"]
    assert found["whole"] > 0.5
    more = 995 * found["iteration"] + 19 * found["evaluation"] + 499 * found["save"]
    assert found["run"] == pytest.approx(found["whole"] + more)
    assert found["peak_bytes"] > 1e8
    assert not Path("runs").exists()
