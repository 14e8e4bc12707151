"""Several algorithms and seeds on one recipe, at equal generated tokens: which gains are real?"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

import litgrpo
from litgrpo.arguments import require
from litgrpo.cli.recipes import built_in_recipes, recipe_file
from litgrpo.evaluation.intervals import PairedDifference, compute_paired_difference, mean_interval

OVERLAYS = "algorithms/"
REWARD = "reward"  # the mean total reward of the sampled completions


@dataclass(frozen=True)
class Run:
    """What one algorithm reached with one seed.

    Args:
        before: {metric: value} before training; of the first algorithm only, as all start alike.
        after: {metric: value} after training.
        tokens: tokens sampled in training.
        iterations: iterations of training.
        curve: tokens sampled so far and mean reward, for each iteration.
    """

    before: dict[str, float]
    after: dict[str, float]
    tokens: int
    iterations: int
    curve: list[tuple[float, float]]


@dataclass(frozen=True)
class Row:
    """What one algorithm reached over all seeds.

    Args:
        name: of the algorithm.
        runs: one for each seed.
        gains: {metric: what it is better than the first row by, seed by seed}; none for the first.
        p_values: {metric: chance of such a difference by luck, corrected for the number of rows}.
    """

    name: str
    runs: list[Run]
    gains: dict[str, PairedDifference]
    p_values: dict[str, float]

    def values(self, metric: str) -> list[float]:
        """[seeds] the metric after training."""
        return [run.after[metric] for run in self.runs]

    def verdict(self, metric: str) -> str:
        """Whether the gain over the first row is real, in words."""
        if metric not in self.gains:
            return "the row to beat"
        gain, p_value = self.gains[metric], self.p_values[metric]
        if p_value >= 0.05:  # noqa: PLR2004 (the customary level)
            return f"not shown (p {p_value:.2f})"
        return f"{'yes, better' if gain.mean > 0 else 'no, worse'} (p {p_value:.3f})"


def compare(
    recipe: str,
    algorithms: list[str] = ["grpo", "dr_grpo", "dapo", "rloo"],  # noqa: B006 (read only)
    tokens: int = 300_000,
    seeds: list[int] = [0, 1, 2, 3, 4],  # noqa: B006 (read only)
    samples: int = 8,
    run_dir: str = "runs/compare",
    jobs: int = 1,
    fit_options: list[str] = [],  # noqa: B006 (read only)
) -> None:
    """Train by several algorithms and seeds at equal generated tokens; write a table and a plot.

    Runs that are there already are not repeated, so a comparison goes on where it stopped.

    Args:
        recipe: what to train; it must have validation prompts.
        algorithms: overlays, by path or by name, those of configs/algorithms; `plain` is the recipe
            itself. The others are compared with the first.
        tokens: tokens that each run samples in training; the last iteration is finished.
        seeds: at least 2; 5 or more tell something.
        samples: k completions of each validation prompt, for pass@1, pass@k and the mean reward.
        run_dir: where runs, table.md, table.json and plot.png go.
        jobs: runs at a time; more than one makes each use one thread.
        fit_options: more options of `fit`, e.g. --fit_options='["--data.batch_size", "8"]'.
    """
    check_different(f"seeds is {seeds}; an interval needs at least 2 different ones.", seeds)
    check_different(f"algorithms is {algorithms}; give two or more different ones.", algorithms)
    plotting = find_spec("matplotlib") is not None
    require(plotting, "the plot needs matplotlib: pip install 'litgrpo[compare]'")
    overlays = {name: overlay(name) for name in algorithms}
    metrics = ("pass@1", f"pass@{samples}")
    evaluation = ["--model.evaluation.num_samples", str(samples)]
    evaluation += ["--model.evaluation.pass_at_k", f"[1, {samples}]"]
    limits = ["--model.max_generated_tokens", str(tokens), "--model.max_iterations", "null"]
    limits += ["--trainer.val_check_interval", "1000000000"]

    def train(name: str, seed: int) -> Run:
        own_dir = Path(run_dir) / Path(name).stem / f"seed={seed}"
        recipes = [word for path in (recipe, *overlays[name]) for word in ("-c", str(path))]
        own = ["--seed_everything", str(seed), "--run_dir", str(own_dir), "--overwrite", "true"]
        # All start alike: only the first algorithm is evaluated before training.
        skipped = [] if name == algorithms[0] else ["--trainer.num_sanity_val_steps", "0"]
        words = [*recipes, *evaluation, *limits, *fit_options, *own, *skipped]
        fit(own_dir, words, {"OMP_NUM_THREADS": "1"} if jobs > 1 else {})
        return read(own_dir, (*metrics, REWARD))

    with ThreadPoolExecutor(jobs) as pool:
        # Seed by seed, so that a comparison that is stopped early has rows of equal length.
        started = {(n, seed): pool.submit(train, n, seed) for seed in seeds for n in algorithms}
        results = {key: future.result() for key, future in started.items()}
    runs = {n: [results[n, seed] for seed in seeds] for n in algorithms}
    rows = rows_of(runs, (*metrics, REWARD))
    text = table(rows, metrics, seeds)
    Path(run_dir, "table.md").write_text(text + "\n")
    Path(run_dir, "table.json").write_text(json.dumps(as_json(rows, seeds), indent=2))
    plot(rows, metrics, Path(run_dir, "plot.png"))
    print(f"{text}\n\nwritten to {run_dir}: table.md, table.json, plot.png and every run")


def check_different(message: str, given: Sequence[object]) -> None:
    """Refuse less than two, and one that is given twice."""
    require(len(set(given)) == len(given) > 1, message)


def overlay(name: str) -> list[Path]:
    """The recipe that turns another one into this algorithm; none for `plain`."""
    if name == "plain":
        return []
    algorithms = [Path(word).name for word in built_in_recipes() if word.startswith(OVERLAYS)]
    if name in algorithms:
        return [recipe_file(OVERLAYS + name)]
    path = Path(name)
    require(
        path.is_file(),
        f"there is no algorithm {name!r}: {path} does not exist. Give the path of an overlay "
        f"or one of: {', '.join(['plain', *algorithms])}.",
    )
    return [path]


def fit(run_dir: Path, words: list[str], limits: dict[str, str]) -> None:
    """Train in a process of its own, unless its summary is there already.

    Args:
        run_dir: the folder of the run.
        words: the command line of `fit`.
        limits: {name: value} to put into the environment.
    """
    if (run_dir / "summary.json").exists():
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir.with_suffix(".log")
    with log.open("w") as output:
        command = [sys.executable, "-m", "litgrpo", "fit", *words]
        there = str(Path(litgrpo.__file__).parents[1])  # also where it is not installed
        paths = os.pathsep.join(filter(None, [there, os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": paths} | limits
        done = subprocess.run(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        last = "\n".join(log.read_text().splitlines()[-5:])
        raise ValueError(f"the run in {run_dir} ended with exit code {done.returncode}:\n{last}")
    print(f"{run_dir} is done", flush=True)


def read(run_dir: Path, metrics: Sequence[str]) -> Run:
    """What a run reached, from its metrics.csv."""
    with (run_dir / "metrics.csv").open() as file:
        logged = list(csv.DictReader(file))
    validated = [row for row in logged if row[f"val/{metrics[0]}"]]
    trained = [row for row in logged if row["perf/generated_tokens"]]
    curve = [(float(row["perf/generated_tokens"]), float(row["reward/mean"])) for row in trained]
    before, after = (
        {name: float(row[f"val/{name}"]) for name in metrics}
        for row in (validated[0], validated[-1])
    )
    return Run(before, after, int(curve[-1][0]), len(curve), curve)


def rows_of(runs: dict[str, list[Run]], metrics: Sequence[str]) -> list[Row]:
    """Each algorithm compared with the first one, seed by seed."""
    first, *others = runs
    gains = {
        (name, metric): compute_paired_difference(
            [run.after[metric] for run in runs[first]], [run.after[metric] for run in runs[name]]
        )
        for name in others
        for metric in metrics
    }
    corrected = {
        metric: holm({name: gains[name, metric].p_value for name in others}) for metric in metrics
    }
    rows = [Row(first, runs[first], {}, {})]
    for name in others:
        own = {metric: gains[name, metric] for metric in metrics}
        p_values = {metric: corrected[metric][name] for metric in metrics}
        rows.append(Row(name, runs[name], own, p_values))
    return rows


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """p-values corrected for being several, so that one of them is wrong in 5 % of comparisons.

    Example:
        >>> holm({"a": 0.01, "b": 0.04, "c": 0.5})
        {'a': 0.03, 'b': 0.08, 'c': 0.5}

    Source: Holm 1979, Scandinavian Journal of Statistics 6:65.
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        corrected[name] = largest
    return {name: corrected[name] for name in p_values}


def table(rows: list[Row], metrics: Sequence[str], seeds: Sequence[int]) -> str:
    """The comparison as a Markdown table.

    What decides is the first metric; where no completion of any row succeeded, as with a graded
    reward below its threshold, it is the mean reward.
    """

    def interval(values: Sequence[float], within: Callable[..., tuple[float, float]]) -> str:
        low, high = within(values)
        return f"{fmean(values):.3f} [{low:.3f}, {high:.3f}]"

    limits: dict[str, Callable[..., tuple[float, float]]] = dict.fromkeys(metrics, bounds)
    limits[REWARD] = mean_interval
    succeeded = any(any(row.values(metrics[0])) for row in rows)
    decides = metrics[0] if succeeded else REWARD
    titles = ["algorithm", *metrics, "mean reward", f"{decides} over the first row"]
    titles += ["is this gain real?", "iterations", "tokens"]
    lines = [titles, ["---"] * len(titles)]
    before = [interval([r.before[n] for r in rows[0].runs], limits[n]) for n in limits]
    lines.append(["before training", *before, "", "", "0", "0"])
    for row in rows:
        gain = row.gains.get(decides)
        difference = "" if gain is None else f"{gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
        lines.append(
            [
                row.name,
                *(interval(row.values(name), limits[name]) for name in limits),
                difference,
                row.verdict(decides),
                f"{fmean(run.iterations for run in row.runs):.0f}",
                f"{fmean(run.tokens for run in row.runs):,.0f}",
            ]
        )
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    note = (
        f"Means over {len(seeds)} seeds with 95 % intervals (Student's t over seeds); differences "
        "are taken seed by seed, their p-values corrected for the number of rows (Holm)."
    )
    return f"{text}\n\n{note}"


def as_json(rows: list[Row], seeds: Sequence[int]) -> dict[str, object]:
    """Every number of the table, seed by seed."""
    return {
        "seeds": list(seeds),
        "algorithms": {
            row.name: {
                "before": [run.before for run in row.runs],
                "after": [run.after for run in row.runs],
                "tokens": [run.tokens for run in row.runs],
                "iterations": [run.iterations for run in row.runs],
            }
            for row in rows
        },
    }


def plot(rows: list[Row], metrics: Sequence[str], path: Path) -> None:
    """Mean reward against sampled tokens, and the metrics with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for place, row in enumerate(rows):
        color = f"C{place % 10}"
        tokens, rewards = mean_curve(row.runs)
        thousands = [count / 1000 for count in tokens]
        axes[0].plot(thousands, smooth(rewards), color=color, linewidth=1, label=row.name)
        for metric, marker, shift in zip(metrics, "os", (-0.1, 0.1), strict=True):
            low, high = bounds(row.values(metric))
            mean = fmean(row.values(metric))
            reach = [[mean - low], [high - mean]]
            axes[1].errorbar(mean, place + shift, xerr=reach, fmt=marker, color=color, capsize=3)
    axes[0].set(xlabel="thousand tokens sampled in training", ylabel="mean reward of 9 iterations")
    axes[0].legend(fontsize="small")
    axes[1].set_yticks(range(len(rows)), [row.name for row in rows])
    axes[1].invert_yaxis()
    axes[1].set(xlabel=f"{metrics[0]} (circles), {metrics[1]} (squares), 95 % intervals over seeds")
    figure.savefig(path, dpi=110)


def bounds(shares: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of shares, which are between 0 and 1."""
    low, high = mean_interval(shares)
    return max(0.0, low), min(1.0, high)


def mean_curve(runs: Sequence[Run]) -> tuple[list[float], list[float]]:
    """Tokens and rewards, averaged over runs, as far as the shortest goes."""
    shortest = min(len(run.curve) for run in runs)
    at = [[run.curve[number] for run in runs] for number in range(shortest)]
    tokens = [fmean(tokens for tokens, _ in points) for points in at]
    return tokens, [fmean(reward for _, reward in points) for points in at]


def smooth(values: Sequence[float], reach: int = 4) -> list[float]:
    """Means over up to `reach` neighbors on either side."""
    return [fmean(values[max(0, n - reach) : n + reach + 1]) for n in range(len(values))]
