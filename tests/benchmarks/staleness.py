"""Measure what staleness costs in learning, and what it gains in time.

    python -m tests.benchmarks.staleness learning
    python -m tests.benchmarks.staleness overlap

`learning` trains the quickstart with staleness 0, 1, 4 and 8: three seeds, equal generated tokens.

`overlap` measures seconds per iteration while the sampler and the judge of the rewards only sleep:
the server (the stand-in of tests/support) waits for each token, and the reward function waits as
for a request. So both behave as on other machines, and the two cores here are nearly idle. Prints
the medians of the iterations, with the best possible gain of an exact overlap, and the age of the
weights.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
import time
from pathlib import Path

import yaml

from litgrpo.tools.compare import compare, fit
from tests.faults.running import merge_runs
from tests.faults.servers import free_port, recipe, server

STALENESS = (1, 4, 8)
SEEDS = [0, 1, 2]
TOKENS = 150_000
SECONDS_PER_TOKEN, AT_ONCE, JUDGE_S = 0.05, 8, 2.0
ITERATIONS, SKIPPED = 16, 4  # the first fill the queue
SCHEDULES = {
    "on-policy": {},
    "staleness 1": {"staleness": 1},
    "staleness 2": {"staleness": 2},
    "max_staleness 1": {"max_staleness": 1},
    "max_staleness 2": {"max_staleness": 2},
    "max_staleness 4": {"max_staleness": 4},
}


def judge_slowly(prompts: list[str], completions: list[str]) -> list[float]:
    """Return a reward after a wait, as that of a judge."""
    time.sleep(JUDGE_S)
    return [sum(letter.isdigit() for letter in text) / 40 for text in completions]


def compare_learning(folder: Path) -> None:
    """Train with each staleness, and print the table of `compare`."""
    names = ["plain"]
    for steps in STALENESS:
        file = folder / f"staleness_{steps}.yaml"
        settings = {"model": {"init_args": {"update": {"staleness": steps}}}}
        file.write_text(yaml.safe_dump(settings))
        names.append(str(file))
    run_dir = str(folder / "runs")
    compare("configs/quickstart.yaml", names, TOKENS, SEEDS, samples=4, run_dir=run_dir, jobs=2)
    for name in map(Path, names):
        found = []
        for seed in SEEDS:
            logged = read_iterations(Path(run_dir, name.stem, f"seed={seed}"))
            found.append(middle(logged[max(STALENESS) :], "policy/sampler_mismatch"))
        print(f"policy/sampler_mismatch of {name.stem}: {min(found):.3f} to {max(found):.3f}")


def measure_overlap(folder: Path) -> None:
    """Train each schedule against the sleeping server, and print a table."""
    port = free_port()
    words = ["--at_once", str(AT_ONCE), "--seconds_per_token", str(SECONDS_PER_TOKEN)]
    table = [["schedule", "s per iteration", "gain", "mean age", "largest age"], ["---"] * 5]
    seconds: dict[str, float] = {}
    with server(port, *words):
        for name, update in SCHEDULES.items():
            logged = train(folder / name.replace(" ", "-"), port, update)
            seconds[name] = middle(logged, "time/step_s")
            gain = seconds["on-policy"] / seconds[name]
            ages = [numbers(logged, f"async/staleness_{end}") or [0.0] for end in ("mean", "max")]
            mean, largest = statistics.fmean(ages[0]), max(ages[1])
            found = [f"{seconds[name]:.2f}", f"{gain:.2f}", f"{mean:.2f}", f"{largest:.0f}"]
            table.append([name, *found])
            if not update:
                rollout = middle(logged, "time/rollout_s")
                bound = seconds[name] / max(rollout, seconds[name] - rollout)
                print(f"on-policy rollout: {rollout:.2f} s, so the gain is at most {bound:.2f}")
    print("\n".join(f"| {' | '.join(line)} |" for line in table))


def numbers(logged: list[dict[str, str]], name: str) -> list[float]:
    """Return the values of a metric that was logged."""
    return [float(row[name]) for row in logged if row.get(name)]


def middle(logged: list[dict[str, str]], name: str) -> float:
    """Return the median of a metric."""
    return statistics.median(numbers(logged, name))


def train(run: Path, port: int, update: dict[str, int]) -> list[dict[str, str]]:
    """Train one schedule, and return its logged iterations without the first ones."""
    sizes = {"max_iterations": ITERATIONS, "group_size": 4}
    own = {"model": {"init_args": sizes}, "data": {"init_args": {"batch_size": 4}}}
    settings = merge_runs(recipe(port, **update), own)
    judge = {"judged": {"function": "tests.benchmarks.staleness.judge_slowly"}}
    settings["model"]["init_args"]["rewards"] = judge
    run.mkdir(parents=True)
    file = run / "recipe.yaml"
    file.write_text(yaml.safe_dump(settings))
    words = ["-c", "configs/quickstart.yaml", "-c", str(file), "--run_dir", str(run / "run")]
    fit(run / "run", [*words, "--trainer.limit_val_batches", "0"], {"OMP_NUM_THREADS": "1"})
    return read_iterations(run / "run")[SKIPPED:]


def read_iterations(run_dir: Path) -> list[dict[str, str]]:
    """Return the metrics of all iterations of a run."""
    with (run_dir / "metrics.csv").open() as logged:
        return [row for row in csv.DictReader(logged) if row["perf/generated_tokens"]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["learning", "overlap"])
    parser.add_argument("--folder", type=Path, help="for the runs; default: a temporary one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = asked.folder or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        compare_learning(work) if asked.what == "learning" else measure_overlap(work)
