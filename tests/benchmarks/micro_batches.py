"""Time and memory of a step by what bounds the activations, on the same work, alternating.

    python -m tests.benchmarks.micro_batches --size 30m --hazard 0.02 --tokens 1024 2048 4096
    python -m tests.benchmarks.micro_batches --size 30m --tokens auto --recompute on off

`update.micro_batch_tokens`, and `precision.selective_recompute`. Each pair has processes of its
own, in turns. Printed: medians over the turns of each turn's median step and learning in seconds,
and of the most memory that the process ever held.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from typing import Any

from tests.benchmarks.step import ROOT, last_line, steps_of_ours
from tests.benchmarks.workload import SIZES, Work


def turn(args: argparse.Namespace) -> dict[str, Any]:
    """A turn of one pair, in this process."""
    from litgrpo.learner.config import UpdateConfig

    size = SIZES[args.size]
    tokens, recompute = args.turn
    work = Work(
        size,
        hazard=args.hazard,
        bf16=args.bf16,
        threads=args.threads,
        recompute=recompute == "on",
    )
    update = UpdateConfig(micro_batch_tokens="auto" if tokens == "auto" else int(tokens))
    return steps_of_ours(work, args.steps, args.warmup, update=update)


def main() -> None:
    """Compare, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--hazard", type=float, default=0.02)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--tokens", nargs="+", default=["1024", "2048", "4096"])
    parser.add_argument("--recompute", choices=["on", "off"], nargs="+", default=["on"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--turn", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        print(json.dumps(turn(args)))
        return
    again = [sys.executable, "-m", "tests.benchmarks.micro_batches", *sys.argv[1:], "--turn"]
    pairs = itertools.product(args.tokens, args.recompute)
    found: dict[tuple[str, str], list[dict[str, Any]]] = {pair: [] for pair in pairs}
    for _ in range(args.turns):
        for pair, turns in found.items():
            turns.append(last_line([*again, *pair], ROOT))
    for (tokens, recompute), turns in found.items():
        step, learn, memory = (
            statistics.median(each[name] for each in turns)
            for name in ("step_s", "learn_s", "peak_rss_mib")
        )
        took = f"step {step:.3f} s, learning {learn:.3f} s, {memory:,.0f} MiB"
        print(f"{tokens:>6} tokens, recompute {recompute}: {took}")


if __name__ == "__main__":
    main()
