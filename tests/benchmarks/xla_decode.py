"""Decoding on a device that compiles: graphs against noting every operator down for each token.

A random Gemma 2 of four layers, windows alternating, on torch_xla (its processor back-end, unless
PJRT_DEVICE says otherwise). Modes: `graphs`, as the static engine runs, and `lazy`, the same
functions traced operator by operator for each token.

    PJRT_DEVICE=CPU python -m tests.benchmarks.xla_decode
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from litgrpo.distributed.device import Backend
from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.static import StaticEngine
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from litgrpo.types import PromptBatch
from tests.support.models import tiny_policy

SIZES = dict(hidden_size=128, num_hidden_layers=4, intermediate_size=256, head_dim=32)
PROMPT_LEN = 16


def lazily(
    self: Backend, function: Callable[..., Any], *, replay: bool = False
) -> Callable[..., Any]:
    """In place of `Backend.compile`: the function as it is, what it asks for begun at its end."""

    def run(*args: Any) -> Any:
        result = function(*args)
        self.flush()
        return result

    return run


def rollout_s(policy: Policy, rows: int, length: int, iteration: int) -> tuple[float, float]:
    """Wall and processor seconds of one rollout of `rows` prompts."""
    ids = torch.randint(3, 259, (rows, PROMPT_LEN), generator=torch.Generator().manual_seed(0))
    index = torch.arange(rows)
    prompts = PromptBatch(ids, torch.ones_like(ids).bool(), [""] * rows, {}, index)
    engine = StaticEngine(prompt_buckets=PROMPT_LEN, sync_every_tokens=length)
    uniforms = draw_uniforms(0, "train", iteration, index, 1, length)
    wall, cpu = time.perf_counter(), time.process_time()
    engine.generate(RolloutRequest(policy, prompts, 1, uniforms, Sampling()))
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Print one JSON line per number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    policy = tiny_policy("gemma2", **SIZES)
    policy.eos_ids = ()  # every row says all of its tokens
    backend = import_module("litgrpo.xla.backend").XlaBackend
    policy.model.to("xla")
    modes = {"graphs": backend.compile, "lazy": lazily}
    for rows in args.rows:
        runs: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
        for repeat in range(args.repeats + 1):  # the first compiles; modes alternate
            for mode, compile_with in modes.items():
                backend.compile = compile_with
                runs[mode].append(rollout_s(policy, rows, args.length, repeat))
        walls, cpus = (
            {mode: statistics.median(run[which] for run in each[1:]) for mode, each in runs.items()}
            for which in (0, 1)
        )
        line = {
            "rows": rows,
            "tokens_per_s": {mode: round(rows * args.length / s) for mode, s in walls.items()},
            "ratio": round(walls["lazy"] / walls["graphs"], 2),
            "cpu_ratio": round(cpus["lazy"] / cpus["graphs"], 2),
            "first_s": {mode: round(each[0][0], 1) for mode, each in runs.items()},
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
