"""Run a recipe with several seeds; print a table of its evaluations before and after.

    python -m tests.benchmarks.seeds -c configs/quickstart.yaml --seeds 0 1 2 3 4

Further options go to `litgrpo fit`. A run whose summary is in `--folder` is not run again.
"""

from __future__ import annotations

import argparse
import json
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
        command += ["--seed_everything", str(seed), "--run_dir", str(folder), "--overwrite", "true"]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return json.loads(summary.read_text())


def table(summaries: list[dict[str, Any]]) -> str:
    """A Markdown row per seed, and the mean over seeds."""

    def accuracy(evaluation: dict[str, Any]) -> str:
        return f"{evaluation['avg_at_k']:.3f} [{evaluation['low']:.3f}, {evaluation['high']:.3f}]"

    def change(summary: dict[str, Any], name: str) -> str:
        pairs = summary["change"][""]
        pair = next(value for key, value in pairs.items() if key.startswith(name))
        return f"{pair['mean']:+.3f} [{pair['low']:+.3f}, {pair['high']:+.3f}]"

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


def main() -> None:
    """Parse the command line, run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-c", dest="recipe", default="configs/quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("runs/seeds"))
    options, further = parser.parse_known_args()
    summaries = []
    for seed in options.seeds:
        folder = options.folder.absolute() / f"seed {seed}"
        summaries.append(run(options.recipe, seed, folder, further))
        print(table(summaries), flush=True)


if __name__ == "__main__":
    main()
