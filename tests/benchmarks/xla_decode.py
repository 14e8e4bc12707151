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
from typing import Any

import torch
import torch_xla

from litgrpo.device import mark_step
from litgrpo.policies.policy import Policy
from litgrpo.rollout import static_engine
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from litgrpo.rollout.static_engine import StaticEngine
from litgrpo.types import PromptBatch
from tests.conftest import tiny_policy

SIZES = dict(hidden_size=128, num_hidden_layers=4, intermediate_size=256, head_dim=32)
PROMPT_LEN = 16


def lazily(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function as it is, what it asks for begun at its end."""

    def run(*args: Any) -> Any:
        result = function(*args)
        mark_step(device)
        return result

    return run


def decode_s(policy: Policy, rows: int, length: int, repeats: int) -> list[float]:
    """Seconds of each rollout after the first, which compiles."""
    ids = torch.randint(3, 259, (rows, PROMPT_LEN), generator=torch.Generator().manual_seed(0))
    index = torch.arange(rows)
    prompts = PromptBatch(ids, torch.ones_like(ids).bool(), [""] * rows, {}, index)
    engine = StaticEngine(prompt_buckets=PROMPT_LEN, look_every=length)
    seconds = []
    for iteration in range(repeats + 1):
        uniforms = draw_uniforms(0, "train", iteration, index, 1, length)
        start = time.perf_counter()
        engine.generate(policy, prompts, 1, uniforms, Sampling())
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def main() -> None:
    """Print one JSON line per number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    policy = tiny_policy("gemma2", **SIZES)
    policy.eos_ids = ()  # every row says all of its tokens
    policy.model.to(torch_xla.device())
    compiled = static_engine.compile_step
    for rows in args.rows:
        medians = {}
        for mode, compile_step in (("graphs", compiled), ("lazy", lazily)):
            static_engine.compile_step = compile_step
            medians[mode] = statistics.median(decode_s(policy, rows, args.length, args.repeats))
        speeds = {mode: round(rows * args.length / s) for mode, s in medians.items()}
        ratio = round(medians["lazy"] / medians["graphs"], 2)
        print(json.dumps({"rows": rows, "tokens_per_s": speeds, "ratio": ratio}), flush=True)


if __name__ == "__main__":
    main()
