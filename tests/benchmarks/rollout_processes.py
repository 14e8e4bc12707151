"""Rollouts by processes of their own against the local engine, on the same work, alternating.

    python -m tests.benchmarks.rollout_processes --size tiny --hazard 0.02 --turns 5

Each side runs in a process of its own, in turns. Printed: medians over the turns of each turn's
median step, rollout and learning in seconds, and the range of its steps. Two cores: the sides with
two threads or processes use both, those with one use one, and `ahead` one for each phase.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from tests.benchmarks.step import ROOT, steps_of_ours
from tests.benchmarks.workload import SIZES, Size, Work

# {side: (threads of the training, rollout processes or 0 for the local engine, staleness)}
SIDES = {
    "local, 2 threads": (2, 0, 0),
    "2 processes": (2, 2, 0),
    "local, 1 thread": (1, 0, 0),
    "1 process": (1, 1, 0),
    "1 process, ahead": (1, 1, 1),
    "2 processes, ahead": (2, 2, 1),
}
SHOWN = ("step_s", "rollout_s", "learn_s")


def turn(args: argparse.Namespace) -> dict[str, Any]:
    """A turn of one side, in this process."""
    from litgrpo.learner.config import UpdateConfig
    from litgrpo.rollout.engines.local import LocalEngine
    from litgrpo.rollout.engines.processes import ProcessEngine

    threads, processes, staleness = SIDES[args.side]
    size = Size(**asdict(SIZES[args.size]))
    work = Work(size, args.group, args.max_new, args.hazard, threads=threads)
    engine = ProcessEngine(processes) if processes else LocalEngine()
    update = UpdateConfig(staleness=staleness)
    return steps_of_ours(work, args.steps, args.warmup, engine=engine, update=update)


def main() -> None:
    """Compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--hazard", type=float, default=0.02)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-new", type=int, default=128)
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(turn(args)))
        return
    found: dict[str, list[dict[str, float]]] = {side: [] for side in args.sides}
    for _ in range(args.turns):
        for side, turns in found.items():
            turns.append(asked(side))
    print(f"{args.size}, hazard {args.hazard}, {args.turns} turns of {args.steps} steps; seconds")
    for side, turns in found.items():
        numbers = [statistics.median(each[name] for each in turns) for name in SHOWN]
        steps = [each["step_s"] for each in turns]
        said = ", ".join(f"{n[:-2]} {x:.3f}" for n, x in zip(SHOWN, numbers, strict=True))
        print(f"{side:>20}: {said}; steps of the turns {min(steps):.3f} to {max(steps):.3f}")


def asked(side: str) -> dict[str, float]:
    """A turn of a side in a new process."""
    words = [sys.executable, "-m", "tests.benchmarks.rollout_processes", "--side", side]
    here = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [*words, *sys.argv[1:]], cwd=ROOT, env=here, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    measured: dict[str, float] = json.loads(lines[-1])
    return measured


if __name__ == "__main__":
    main()
