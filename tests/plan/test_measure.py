"""A few iterations are run, and their times extrapolated to a whole run."""

import json
import re
from pathlib import Path

import pytest

from litgrpo.cli.console import keep_quiet
from litgrpo.cli.parser import RecipeCLI
from litgrpo.plan.command import plan
from litgrpo.plan.measure import (
    ITERATIONS,
    NO_VALIDATION,
    MeasuredTimes,
    RunLength,
    part_times,
    read_length,
    read_update_frac,
    shorten_recipe,
)

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


def test_the_whole_run_is_extrapolated_by_hand():
    found = MeasuredTimes(
        whole=30.0, iteration=2.0, evaluation=4.0, save=0.5, update_frac=0.25, peak_bytes=1
    )
    length = RunLength(iterations=105, evaluations=4, saves=3)
    # 100 more iterations, evaluations before and after and two more (at 50, 100), two more saves
    assert found.run(length) == 30 + 100 * 2.0 + 2 * 4.0 + 2 * 0.5
    assert found.run(length, trains=False) == 30 + 100 * 1.5 + 2 * 4.0 + 2 * 0.5


def test_the_first_iteration_and_the_first_evaluation_warm_up():
    found = part_times(
        {
            "run_training_batch": [9.0, 1.0, 2.0, 3.0, 7.0],
            "[Strategy]SingleDeviceStrategy.validation_step": [5.0, 5.0, 1.0, 2.0],
            "save_checkpoint": [0.5],
        }
    )
    assert found == {"iteration": 2.0, "evaluation": 3.0, "save": 0.5}
    # Two batches for each optimizer step; no validation.
    found = part_times({"run_training_batch": [9.0, 9.0, *[1.0] * 6, 4.0, 4.0]})
    assert found == {"iteration": 2.0, "evaluation": 0.0, "save": 0.0}


def test_the_share_of_the_update_is_that_of_the_logged_times(tmp_path):
    file = tmp_path / "metrics.csv"
    rows = ["step,val/greedy,time/learn_s,time/step_s", "0,0.5,,"]
    rows += [
        f"{n},,{learn},{step}" for n, (learn, step) in enumerate([(9, 9), *[(1, 4)] * 3, (8, 8)])
    ]
    file.write_text("\n".join(rows) + "\n")
    assert read_update_frac(tmp_path) == 0.25
    file.write_text("step,sft/loss\n1,2.0\n")
    assert read_update_frac(tmp_path) == 0.0


@pytest.mark.parametrize(
    ("words", "length"),
    [
        ([], RunLength(250, evaluations=3, saves=5)),
        (["--model.max_iterations", "10"], RunLength(10, evaluations=2, saves=1)),
        (["--trainer.limit_val_batches", "0"], RunLength(250, evaluations=0, saves=5)),
        (["--checkpoint.every_n_iterations", "0"], RunLength(250, evaluations=3, saves=1)),
        # three passes over 4,000 prompts, 16 at a time
        (["--model.max_iterations", "null"], RunLength(750, evaluations=7, saves=15)),
        (
            ["--model.max_iterations", "null", "--trainer.max_epochs", "2"],
            RunLength(500, evaluations=5, saves=10),
        ),
        (  # full batches: 166 in each pass
            ["--model.max_iterations", "null", "--data.batch_size", "24"],
            RunLength(498, evaluations=5, saves=10),
        ),
    ],
)
def test_the_length_of_a_run_is_that_of_the_recipe_or_of_its_data(words, length):
    keep_quiet()  # as the program does
    assert read_length(RecipeCLI(["-c", QUICKSTART, *words], "plan", plan).config) == length


def test_the_measured_recipe_differs_in_length_and_folder_only(tmp_path):
    config = {
        "model": {"class_path": "GRPO", "init_args": {"max_iterations": 900, "group_size": 3}},
        "trainer": {"callbacks": [{"class_path": "mine"}], "val_check_interval": 5, "devices": 2},
        "checkpoint": {"every_n_iterations": 2, "keep_best": 1},
        "seed_everything": 4,
    }
    found = shorten_recipe(config, tmp_path)
    assert found["model"]["init_args"] == {"max_iterations": ITERATIONS, "group_size": 3}
    assert found["trainer"]["callbacks"] == [{"class_path": "mine"}]
    assert found["trainer"]["val_check_interval"] == NO_VALIDATION
    assert found["trainer"]["devices"] == 2
    assert found["trainer"]["profiler"]["init_args"]["dirpath"] == str(tmp_path)
    assert found["checkpoint"] == {"every_n_iterations": 0, "keep_best": 1}
    assert found["seed_everything"] == 4
    assert config["checkpoint"]["every_n_iterations"] == 2


SMALL = ["--data.batch_size", "2", "--model.group_size", "2", "--data.val.limit", "4"]


def test_the_length_of_a_run_follows_from_its_data(tmp_path):
    rows, override = tmp_path / "rows.jsonl", tmp_path / "override.yaml"
    rows.write_text("".join(f'{{"prompt": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(50)))
    override.write_text(json.dumps({"data": {"init_args": {"train": str(rows)}}}))
    words = ["-c", QUICKSTART, "-c", str(override), "--model.max_iterations", "null"]
    keep_quiet()
    # three passes over three full batches of 16
    assert read_length(RecipeCLI(words, "plan", plan).config).iterations == 9


@pytest.mark.parametrize(
    ("recipe", "updates"), [(["recipe.yaml"], False), ([QUICKSTART, *SMALL], True)]
)
def test_a_recipe_is_run_and_extrapolated(cli, monkeypatch, recipe, updates):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ("--measure", "--report", "out.json", "--model.max_iterations", "1000")
    code, out, err = cli("plan", "-c", *recipe, *words)
    assert (code, err) == (0, "")
    assert "Measured here: 5 iterations" in out
    assert re.search(r"The whole run of 1,000 iterations: \d", out)
    assert max(map(len, out.splitlines())) <= 80
    found = json.loads(Path("out.json").read_text())
    assert found["whole"] > 0.5
    more = 995 * found["iteration"]
    more += (found["evaluations"] - 2) * found["evaluation"] + (found["saves"] - 1) * found["save"]
    assert found["run"] == pytest.approx(found["whole"] + more)
    assert found["iteration"] > 0
    assert found["evaluation"] > 0
    assert found["save"] > 0
    assert (found["update_frac"] > 0) == updates
    assert found["peak_bytes"] > 1e8
    assert not Path("runs").exists()
