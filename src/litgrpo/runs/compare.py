"""Compare algorithms on one recipe over seeds, at equal generated tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

from litgrpo.algorithms.published import PUBLISHED
from litgrpo.arguments import at_least, require
from litgrpo.cli.recipes import built_in_recipes, recipe_file
from litgrpo.evaluation.intervals import PairedDifference, compute_paired_difference, mean_interval
from litgrpo.runs.run import Run
from litgrpo.runs.training import train
from litgrpo.text.tables import align_columns, markdown_table

REWARD = "reward"  # the mean total reward of the sampled completions


@dataclass(frozen=True)
class SeedResult:
    """Results of one algorithm with one seed.

    Args:
        before: {metric: value} before training; only the first algorithm is evaluated then, since
            all share the initial policy.
        after: {metric: value} after training.
        tokens: number of tokens generated in training.
        iterations: number of training iterations.
    """

    before: dict[str, float]
    after: dict[str, float]
    tokens: int
    iterations: int


@dataclass(frozen=True)
class AlgorithmResult:
    """Results of one algorithm over all seeds.

    Args:
        name: name of the algorithm.
        runs: one run per seed.
        gains: {metric: difference from the first algorithm, paired by seed}; {} for the first.
        p_values: {metric: p-value of this difference, corrected for the number of algorithms}.
    """

    name: str
    runs: list[SeedResult]
    gains: dict[str, PairedDifference]
    p_values: dict[str, float]

    def values(self, metric: str) -> list[float]:
        """Return the metric after training, for each seed."""
        return [run.after[metric] for run in self.runs]

    def verdict(self, metric: str) -> str:
        """Return the significance of the difference from the first algorithm, in words."""
        if metric not in self.gains:
            return "baseline"
        gain, p_value = self.gains[metric], self.p_values[metric]
        if p_value >= 0.05:  # noqa: PLR2004 (the customary level)
            return f"no (p {p_value:.2f})"
        return f"yes, {'better' if gain.mean > 0 else 'worse'} (p {p_value:.3f})"


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
    """Train with several algorithms and seeds at equal generated tokens; write a table and a plot.

    Finished runs in `run_dir` are kept, so an interrupted comparison resumes.

    Args:
        recipe: the recipe to train; it must have validation prompts.
        algorithms: names of published ones, such as `dapo`; or config overrides, by path or by
            name, such as `distillation/gkd`; `plain` is the recipe as it is. The first algorithm is
            the baseline.
        tokens: tokens that each run generates in training; the last iteration is completed.
        seeds: at least 2; use 5 or more for useful intervals.
        samples: completions per validation prompt (k), for pass@1, pass@k and the mean reward.
        run_dir: folder for runs, table.md, table.json and plot.png.
        jobs: number of concurrent runs; with more than one, each uses one thread.
        fit_options: more options of `fit`, e.g. --fit_options='["--data.batch_size", "8"]'.
    """
    check_different(f"seeds is {seeds}; give at least 2 different seeds.", seeds)
    check_different(
        f"algorithms is {algorithms}; give at least 2 different algorithms.", algorithms
    )
    at_least("jobs", jobs, 1)
    recipe_file(recipe)
    has_matplotlib = find_spec("matplotlib") is not None
    require(has_matplotlib, "the plot needs matplotlib: pip install matplotlib")
    algorithm_words = {name: find_words(name) for name in algorithms}
    metrics = ("pass@1", f"pass@{samples}")
    evaluation = ["--model.evaluation.num_samples", str(samples)]
    evaluation += ["--model.evaluation.pass_at_k", f"[1, {samples}]"]
    limits = ["--model.max_generated_tokens", str(tokens), "--model.max_iterations", "null"]
    limits += ["--trainer.val_check_interval", "1000000000"]

    def train_seed(name: str, seed: int) -> SeedResult:
        seed_dir = Path(run_dir) / Path(name).stem / f"seed={seed}"
        run_options = ["--seed_everything", str(seed), "--overwrite", "true"]
        # All share the initial policy: only the first algorithm is evaluated before training.
        skipped = [] if name == algorithms[0] else ["--trainer.num_sanity_val_steps", "0"]
        words = ["-c", recipe, *algorithm_words[name], *evaluation, *limits]
        if not (seed_dir / "summary.json").exists():  # the last file of a finished run
            variables = {"OMP_NUM_THREADS": "1"} if jobs > 1 else {}
            train(seed_dir, [*words, *fit_options, *run_options, *skipped], **variables)
            print(f"finished {seed_dir}", flush=True)
        return read_result(Run(seed_dir), (*metrics, REWARD))

    with ThreadPoolExecutor(jobs) as pool:
        # Seed by seed, so that an interrupted comparison has equally many runs of each algorithm.
        started = {
            (n, seed): pool.submit(train_seed, n, seed) for seed in seeds for n in algorithms
        }
        results = {key: future.result() for key, future in started.items()}
    runs = {n: [results[n, seed] for seed in seeds] for n in algorithms}
    rows = compare_runs(runs, (*metrics, REWARD))
    first = Run(Path(run_dir, Path(algorithms[0]).stem, f"seed={seeds[0]}"))
    head, *lines = cells = tabulate(rows, metrics)
    note = describe_table(seeds, first.config.success_rule)
    table = "\n".join(markdown_table(head, lines))
    Path(run_dir, "table.md").write_text(f"{table}\n\n{note}\n")
    Path(run_dir, "table.json").write_text(json.dumps(as_json(rows, seeds), indent=2))
    plot(rows, metrics, Path(run_dir, "plot.png"))
    print("\n".join(align_columns(without_intervals(cells))))
    print(f"\n{note}\n\nwritten to {run_dir}: table.md, table.json, plot.png and every run")


def check_different(message: str, values: Sequence[object]) -> None:
    """Raise if there are fewer than two values, or equal ones."""
    require(len(set(values)) == len(values) > 1, message)


def find_words(name: str) -> list[str]:
    """Return the options of `fit` that choose an algorithm; [] for `plain`.

    Raises:
        ValueError: there is no such algorithm.
    """
    if name == "plain":
        return []
    if name in PUBLISHED:
        return ["--model.objective", name]
    if name in built_in_recipes():
        return ["-c", str(recipe_file(name))]
    require(
        Path(name).is_file(),
        f"unknown algorithm {name!r}: {name} does not exist. Give the path of a config override, "
        f"or one of: {', '.join(['plain', *PUBLISHED])}.",
    )
    return ["-c", name]


def read_result(run: Run, metrics: Sequence[str]) -> SeedResult:
    """Read the results of a run from its metrics.

    Raises:
        ValueError: a metric was not logged.
    """
    names = {f"val/{name}": name for name in metrics}
    for logged_name in names:  # a mean of nothing is not logged
        require(
            logged_name in run,
            f"{run.folder} has no {logged_name}: no held-out completion was scored. Give a recipe "
            "with validation prompts that its rewards score.",
        )
    evaluated = run.metrics[list(names)].rename(columns=names).dropna()
    require(
        not evaluated.empty,
        f"{run.folder} has no evaluation with {', '.join(metrics)} at the same time.",
    )
    before, after = (evaluated.iloc[position].to_dict() for position in (0, -1))
    tokens = run["perf/generated_tokens"]
    return SeedResult(before, after, int(tokens.iloc[-1]), len(tokens))


def compare_runs(
    runs: dict[str, list[SeedResult]], metrics: Sequence[str]
) -> list[AlgorithmResult]:
    """Compare each algorithm with the first one, paired by seed."""
    first, *other_names = runs
    gains = {
        (name, metric): compute_paired_difference(
            [run.after[metric] for run in runs[first]], [run.after[metric] for run in runs[name]]
        )
        for name in other_names
        for metric in metrics
    }
    corrected = {
        metric: holm({name: gains[name, metric].p_value for name in other_names})
        for metric in metrics
    }
    rows = [AlgorithmResult(first, runs[first], {}, {})]
    for name in other_names:
        differences = {metric: gains[name, metric] for metric in metrics}
        p_values = {metric: corrected[metric][name] for metric in metrics}
        rows.append(AlgorithmResult(name, runs[name], differences, p_values))
    return rows


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Return p-values with Holm's correction: family-wise error rate 5 % at the level 0.05.

    Source: Holm 1979, Scand. J. Statist. 6:65.
    """
    # adjusted p_(k) = max over j <= k of min(1, (m - j + 1) p_(j)), for m sorted p-values.
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        corrected[name] = largest
    return {name: corrected[name] for name in p_values}


def tabulate(rows: list[AlgorithmResult], metrics: Sequence[str]) -> list[list[str]]:
    """Return the cells of the comparison, the head first.

    Differences are of the first metric, or of the mean reward if no completion succeeded, as with
    a reward that never reaches the success threshold.
    """

    def interval(values: Sequence[float], within: Callable[..., tuple[float, float]]) -> str:
        low, high = within(values)
        return f"{fmean(values):.3f} [{low:.3f}, {high:.3f}]"

    limits: dict[str, Callable[..., tuple[float, float]]] = dict.fromkeys(metrics, bounds)
    limits[REWARD] = mean_interval
    succeeded = any(any(row.values(metrics[0])) for row in rows)
    decides = metrics[0] if succeeded else REWARD
    head = ["algorithm", *metrics, "reward", f"{decides} minus baseline"]
    head += ["significant?", "iterations", "tokens"]
    before = [interval([r.before[n] for r in rows[0].runs], limits[n]) for n in limits]
    cells = [head, ["before training", *before, "", "", "0", "0"]]
    for row in rows:
        gain = row.gains.get(decides)
        difference = "" if gain is None else f"{gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
        cells.append(
            [
                row.name,
                *(interval(row.values(name), limits[name]) for name in limits),
                difference,
                row.verdict(decides),
                f"{fmean(run.iterations for run in row.runs):.0f}",
                f"{fmean(run.tokens for run in row.runs):,.0f}",
            ]
        )
    return cells


def without_intervals(cells: list[list[str]]) -> list[list[str]]:
    """Return the table for a terminal: means, and the interval of the difference alone."""
    *means, difference, verdict = range(len(cells[0]) - 2)
    return [
        [*(row[n].partition(" [")[0] for n in means), row[difference], row[verdict]]
        for row in cells
    ]


def describe_table(seeds: Sequence[int], success_rule: str = "") -> str:
    """Return what the numbers of the table are."""
    note = (
        f"Means over {len(seeds)} seeds with 95 % intervals (Student's t over seeds); differences "
        "are paired by seed, with p-values corrected for the number of algorithms (Holm)."
    )
    if success_rule:
        note += f" A completion is correct if {success_rule} (model.evaluation.success_reward)."
    return note


def as_json(rows: list[AlgorithmResult], seeds: Sequence[int]) -> dict[str, object]:
    """Return every number of the table, for each seed."""
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


def plot(rows: list[AlgorithmResult], metrics: Sequence[str], path: Path) -> None:
    """Plot the metrics with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (7, 1.2 + 0.35 * len(rows))
    figure, axes = pyplot.subplots(figsize=size, constrained_layout=True)
    for y, row in enumerate(rows):
        for metric, marker, color in zip(metrics, "os", ("C0", "C1"), strict=True):
            low, high = bounds(row.values(metric))
            mean = fmean(row.values(metric))
            reach = [[mean - low], [high - mean]]
            axes.errorbar(mean, y, xerr=reach, fmt=marker, color=color, capsize=3)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel=f"{metrics[0]} (dots), {metrics[1]} (squares), 95 % intervals over seeds")
    figure.savefig(path, dpi=110)


def bounds(shares: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of shares, cut to [0, 1]."""
    low, high = mean_interval(shares)
    return max(0.0, low), min(1.0, high)
