"""Run a recipe with several seeds; print a table and draw the reward.

    python -m tests.benchmarks.seeds -c configs/quickstart.yaml --seeds 0 1 2 3 4 \
        --plot docs/evidence/quickstart.png
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WHEN = ("before", "after")


def run(recipe: str, seed: int, folder: Path, further: list[str]) -> dict[str, Any]:
    """Train with one seed in a separate process, unless its summary is there already."""
    summary = folder / "summary.json"
    if not summary.exists():
        command = [sys.executable, str(ROOT / "cli.py"), "fit", "-c", recipe, *further]
        own = ["--seed_everything", str(seed), "--run_dir", str(folder), "--overwrite", "true"]
        subprocess.run([*command, *own], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return json.loads(summary.read_text())


def table(summaries: list[dict[str, Any]]) -> str:
    """A Markdown row per seed, and the mean over seeds."""

    def accuracy(when: dict[str, Any]) -> str:
        return f"{when['avg_at_k']:.3f} [{when['low']:.3f}, {when['high']:.3f}]"

    def change(summary: dict[str, Any], name: str) -> str:
        pairs = summary["change"][""]
        found = next(value for key, value in pairs.items() if key.startswith(name))
        return f"{found['mean']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"

    lines = [
        "| seed | sampled before | after | change | greedy before | after | change | training, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for summary in summaries:
        before, after = summary["before"], summary["after"]
        sampled = f"{accuracy(before)} | {accuracy(after)} | {change(summary, 'avg@')}"
        greedy = f"{before['greedy']:.3f} | {after['greedy']:.3f} | {change(summary, 'greedy')}"
        lines.append(f"| {summary['seed']} | {sampled} | {greedy} | {summary['seconds']:.0f} |")
    means = [
        [statistics.mean(summary[when][name] for summary in summaries) for when in WHEN]
        for name in ("avg_at_k", "greedy")
    ]
    shown = " | ".join(f"{one:.3f} | {two:.3f} | {two - one:+.3f}" for one, two in means)
    seconds = statistics.median(summary["seconds"] for summary in summaries)
    lines.append(f"| mean | {shown} | median {seconds:.0f} |")
    return "\n".join(lines)


def curve(folder: Path, name: str) -> tuple[list[int], list[float]]:
    """Iterations and values of one logged number."""
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get(name)]
    return [int(float(row["step"])) for row in rows], [float(row[name]) for row in rows]


def read_samples(folder: Path) -> str:
    """The column of the mean accuracy of sampled completions."""
    with (folder / "metrics.csv").open() as file:
        return next(name for name in next(csv.reader(file)) if re.fullmatch(r"val/avg@\d+", name))


def band(axes: Any, curves: list[tuple[list[int], list[float]]], label: str, **style: Any) -> None:
    """Draw the mean of curves over seeds, and the range from the lowest to the highest seed."""
    shortest = min(len(values) for _, values in curves)
    iterations = curves[0][0][:shortest]
    values = [[each[number] for _, each in curves] for number in range(shortest)]
    (line,) = axes.plot(iterations, list(map(statistics.fmean, values)), label=label, **style)
    color = line.get_color()
    axes.fill_between(
        iterations, list(map(min, values)), list(map(max, values)), alpha=0.25, color=color
    )


def plot(folders: list[Path], path: Path, rewards: list[str]) -> None:
    """Draw rewards and held-out accuracy against iterations: mean and range of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    for name in rewards:
        band(axes[0], [curve(each, f"reward/{name}") for each in folders], name, linewidth=0.8)
    accuracies = [curve(each, read_samples(each)) for each in folders]
    band(axes[1], accuracies, "held-out accuracy", marker="o")
    seeds = f"mean and range of {len(folders)} seeds"
    axes[0].set(xlabel=f"iteration ({seeds})", ylabel="mean reward of a batch")
    if len(rewards) > 1:
        axes[0].legend(fontsize="small")
    axes[1].set(xlabel="iteration", ylabel="held-out accuracy, sampled (avg@4)")
    axes[1].set_ylim(0, 1)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Parse the command line, run, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-c", dest="recipe", default="configs/quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--rewards", nargs="+", default=["mean"], help="what to draw")
    options, further = parser.parse_known_args()
    folders = [options.folder.absolute() / f"seed {seed}" for seed in options.seeds]
    summaries = []
    for seed, folder in zip(options.seeds, folders, strict=True):
        summaries.append(run(options.recipe, seed, folder, further))
        print(table(summaries), flush=True)
    if options.plot:
        plot(folders, options.plot, options.rewards)


if __name__ == "__main__":
    main()
