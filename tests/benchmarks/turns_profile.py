"""Profile a step of episodes: calls, CPU and wall-clock seconds of each part.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.turns_profile --size tiny --tool-s 0.05

Takes the arguments of `tests.benchmarks.turns`, whose work it is. Parts within others are counted
in both. Prints Markdown, per training step, the warm-up included.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

from litgrpo.models.causal import CausalPolicy
from litgrpo.models.shared_prefix import RowOffloader
from litgrpo.rollout.engines.local import Sampler, TurnDecoder, TurnRows
from litgrpo.rollout.episodes import EpisodeListener, Episodes
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.training.learner import Learner
from tests.benchmarks.turns import add_arguments, steps_of_litgrpo

PARTS: dict[str, tuple[Any, str]] = {
    "rollout": (Rollouter, "generate"),
    "- prompts are read": (Sampler, "prefill"),
    "- a token of every row": (CausalPolicy, "decode_step"),
    "- tokens are drawn": (Sampler, "draw"),
    "- rows leave": (RowOffloader, "offload"),
    "- rows come back and read": (RowOffloader, "restore"),
    "- who has ended": (TurnRows, "end_turns"),
    "- -- of these turns handed over": (EpisodeListener, "on_turn_end"),
    "- answers taken": (EpisodeListener, "take_observations"),
    "- episodes played": (Episodes, "play"),
    "- what moves between": (TurnDecoder, "_finish_turns"),
    "learning": (Learner, "update"),
}


@dataclass
class Spent:
    """Time of a part."""

    calls: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0


def watch_method(kind: Any, name: str) -> Spent:
    """Count what a method takes from now on."""
    spent, inner = Spent(), vars(kind)[name]

    def outer(*args: Any, **named: Any) -> Any:
        cpu, wall = time.thread_time(), time.perf_counter()
        try:
            return inner(*args, **named)
        finally:
            spent.calls += 1
            spent.cpu_s += time.thread_time() - cpu
            spent.wall_s += time.perf_counter() - wall

    setattr(kind, name, outer)
    return spent


def table(parts: dict[str, Spent], steps: int) -> str:
    """A Markdown row for each part, per step."""
    lines = ["| part | calls | processor, s | wall, s |", "|---|---|---|---|"]
    for name, each in parts.items():
        spent = f"{each.cpu_s / steps:.3f} | {each.wall_s / steps:.3f}"
        lines.append(f"| {name} | {each.calls / steps:.0f} | {spent} |")
    return "\n".join(lines)


def main() -> None:
    """Train a few steps and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    parts = {name: watch_method(*place) for name, place in PARTS.items()}
    steps_of_litgrpo(args)
    print(table(parts, args.steps + args.warmup))


if __name__ == "__main__":
    main()
