"""Time and memory of a step by `update.micro_batch_tokens`, on the same work, alternating.

    python -m tests.benchmarks.micro_batches --size 30m --hazard 0.02 --tokens 1024 2048 4096

Each number has processes of its own, in turns. Printed: medians over the turns of each turn's
median step and learning in seconds, and of the most memory that the process ever held.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from typing import Any

from tests.benchmarks.step import ROOT, last_line, steps_of_ours
from tests.benchmarks.workload import SIZES, Work


def turn(args: argparse.Namespace) -> dict[str, Any]:
    """A turn of one number, in this process."""
    from litgrpo.learner.config import UpdateConfig

    size = SIZES[args.size]
    work = Work(size, hazard=args.hazard, bf16=args.bf16, threads=args.threads)
    update = UpdateConfig(micro_batch_tokens=args.turn)
    return steps_of_ours(work, args.steps, args.warmup, update=update)


def main() -> None:
    """Compare, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--hazard", type=float, default=0.02)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--turn", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        print(json.dumps(turn(args)))
        return
    again = [sys.executable, "-m", "tests.benchmarks.micro_batches", *sys.argv[1:], "--turn"]
    found: dict[int, list[dict[str, Any]]] = {tokens: [] for tokens in args.tokens}
    for _ in range(args.turns):
        for tokens, turns in found.items():
            turns.append(last_line([*again, str(tokens)], ROOT))
    for tokens, turns in found.items():
        step, learn, memory = (
            statistics.median(each[name] for each in turns)
            for name in ("step_s", "learn_s", "peak_rss_mib")
        )
        print(f"{tokens:>6} tokens: step {step:.3f} s, learning {learn:.3f} s, {memory:,.0f} MiB")


if __name__ == "__main__":
    main()
