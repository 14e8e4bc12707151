"""Time and memory of a step by what bounds the activations, on the same work, alternating.

    python -m tests.benchmarks.micro_batches --size 30m --stop-prob 0.02 --tokens 1024 2048 4096
    python -m tests.benchmarks.micro_batches --size 30m --tokens auto --recompute on off
    python -m tests.benchmarks.micro_batches --size 30m --tokens auto --kernels auto onednn

`update.micro_batch_tokens`, `precision.selective_recompute` and `precision.linear_kernels`. Each
choice runs in separate processes, alternating. Printed: medians over the turns of each turn's
median step and learning in seconds, and of the most memory that the process ever held.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from typing import Any, get_args

from litgrpo.models.kernels.linear import KernelChoice
from tests.benchmarks.step import ROOT, last_line, steps_of_litgrpo
from tests.benchmarks.workload import SIZES, Work


def turn(args: argparse.Namespace) -> dict[str, Any]:
    """A turn of one choice, in this process."""
    from litgrpo.training.update_config import UpdateConfig

    size = SIZES[args.size]
    tokens, recompute, kernels = args.turn
    work = Work(
        size,
        stop_prob=args.stop_prob,
        bf16=args.bf16,
        threads=args.threads,
        recompute=recompute == "on",
        kernels=kernels,
    )
    update = UpdateConfig(micro_batch_tokens="auto" if tokens == "auto" else int(tokens))
    return steps_of_litgrpo(work, args.steps, args.warmup, update=update)


def main() -> None:
    """Compare, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--stop-prob", type=float, default=0.02)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--tokens", nargs="+", default=["1024", "2048", "4096"])
    parser.add_argument("--recompute", choices=["on", "off"], nargs="+", default=["on"])
    parser.add_argument("--kernels", choices=get_args(KernelChoice), nargs="+", default=["auto"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--turn", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        print(json.dumps(turn(args)))
        return
    again = [sys.executable, "-m", "tests.benchmarks.micro_batches", *sys.argv[1:], "--turn"]
    choices = itertools.product(args.tokens, args.recompute, args.kernels)
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {choice: [] for choice in choices}
    for _ in range(args.turns):
        for choice, turns in found.items():
            turns.append(last_line([*again, *choice], ROOT))
    for (tokens, recompute, kernels), turns in found.items():
        step, learn, memory = (
            statistics.median(each[name] for each in turns)
            for name in ("step_s", "learn_s", "peak_rss_mib")
        )
        took = f"step {step:.3f} s, learning {learn:.3f} s, {memory:,.0f} MiB"
        print(f"{tokens:>6} tokens, recompute {recompute}, kernels {kernels}: {took}")


if __name__ == "__main__":
    main()
