"""Ways to sample the same completions against the local engine, alternating.

    python -m tests.benchmarks.rollout_processes --size tiny --hazard 0.02 --turns 5

Each side runs in a process of its own, in turns. Printed: medians over the turns of each turn's
median step, rollout and learning in seconds, and the range of its steps. Two cores: the sides with
two threads or processes use both, those with one use one, and `ahead` one for each phase.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from litgrpo.models.kernels.linear import KernelChoice
from litgrpo.rollout.engines import rollout_worker
from litgrpo.rollout.engines.base import Requests
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.processes import ProcessEngine, together
from litgrpo.training.update_config import UpdateConfig
from litgrpo.types import Rollout
from tests.benchmarks.step import ROOT, steps_of_ours
from tests.benchmarks.workload import SIZES, Size, Work


@dataclass(frozen=True)
class HalvesEngine(LocalEngine):
    """Two threads of Python, each with every other prompt and one thread of the processor."""

    def generate(self, requests: Requests) -> Rollout:
        """As the local engine."""
        prompts = torch.arange(len(requests.prompts))
        shares = [share for share in (prompts[::2], prompts[1::2]) if len(share)]

        def sampled(share: torch.Tensor) -> rollout_worker.Arrays:
            torch.set_num_threads(1)
            policy = copy.copy(requests.policy)  # a decoder of its own, the same weights
            half = ProcessEngine().share(requests, share, len(shares))
            rollout = LocalEngine.generate(self, rollout_worker.requests(policy, half))
            return rollout_worker.arrays_of(rollout)

        with ThreadPoolExecutor(len(shares)) as pool:
            return together(requests, shares, list(pool.map(sampled, shares)))


class Side(NamedTuple):
    """How a side samples.

    Args:
        threads: of the training.
        engine: samples.
        staleness: iterations that it samples ahead.
        kernels: of the matrix products.
        collects: whether Python looks for garbage by itself.
    """

    threads: int
    engine: LocalEngine | ProcessEngine = LocalEngine()
    staleness: int = 0
    kernels: KernelChoice = "auto"
    collects: bool = True


SIDES = {
    "local, 2 threads": Side(2),
    "2 processes": Side(2, ProcessEngine(2)),
    "2 threads of Python": Side(2, HalvesEngine()),
    "oneDNN, packed": Side(2, kernels="onednn"),
    "no garbage collection": Side(2, collects=False),
    "local, 1 thread": Side(1),
    "1 process": Side(1, ProcessEngine(1)),
    "1 process, ahead": Side(1, ProcessEngine(1), staleness=1),
    "2 processes, ahead": Side(2, ProcessEngine(2), staleness=1),
}
SHOWN = ("step_s", "rollout_s", "learn_s")


def turn(args: argparse.Namespace) -> dict[str, Any]:
    """A turn of one side, in this process."""
    side = SIDES[args.side]
    if not side.collects:
        gc.disable()
    size = Size(**asdict(SIZES[args.size]))
    of_ends = (args.max_new, args.hazard)
    work = Work(size, args.group, *of_ends, threads=side.threads, kernels=side.kernels)
    update = UpdateConfig(staleness=side.staleness)
    return steps_of_ours(work, args.steps, args.warmup, engine=side.engine, update=update)


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
