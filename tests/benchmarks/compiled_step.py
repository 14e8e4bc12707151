"""Measure the gain of compiling a decoding step: a model's layers without their attention.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.compiled_step --size tiny

Norms, products, turned positions and the MLP of one token of each row, as `FusedDecoder` computes
them, called by Python, compiled by `torch.compile` (dynamic shapes), and recorded once and replayed
(`torch.jit.trace`). Printed: processor microseconds of a step, the median of turns that alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.benchmarks.workload import SIZES, Size

ROWS, TURNS, STEPS, WARMUP = (64, 16, 4), 40, 20, 30
Step = Callable[[Tensor], Tensor]


def layers_of(size: Size) -> Step:
    """[n, E] -> [n, E] through all layers."""
    inside, head = size.hidden, size.hidden // size.heads
    wide = (size.heads + 2 * size.kv_heads) * head
    shapes = ((inside, wide), (inside, inside), (inside, 2 * size.inner), (size.inner, inside))
    weights = [[torch.randn(shape) / shape[0] for shape in shapes] for _ in range(size.layers)]
    turn, epsilon = torch.polar(torch.ones(head // 2), torch.ones(head // 2)), torch.tensor(1e-6)

    def normalize(x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt()

    def step(x: Tensor) -> Tensor:
        for qkv, out, gate_up, down in weights:
            pairs = torch.view_as_complex((normalize(x) @ qkv).view(-1, wide // head, head // 2, 2))
            turned = torch.view_as_real(pairs * turn).flatten(1)
            x = torch.addmm(x, turned[:, :inside], out)
            gate, up = (normalize(x) @ gate_up).chunk(2, 1)
            x = torch.addmm(x, silu(gate) * up, down)
        return x

    return step


def microseconds(steps: list[Step], x: Tensor) -> list[float]:
    """Return the CPU seconds of one call of each; calls alternate."""
    turns: list[list[float]] = [[] for _ in steps]
    for step in steps * WARMUP:
        step(x)
    for _ in range(TURNS):
        for step, found in zip(steps, turns, strict=True):
            began = time.process_time()
            for _ in range(STEPS):
                step(x)
            found.append((time.process_time() - began) / STEPS * 1e6)
    return [statistics.median(found) for found in turns]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    args = parser.parse_args()
    torch.manual_seed(0)
    width = SIZES[args.size].hidden
    step = layers_of(SIZES[args.size])
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ways = {
            "called": step,
            "compiled": torch.compile(step, dynamic=True),
            "replayed": torch.jit.trace(step, torch.randn(ROWS[0], width)),
        }
        print("| rows | " + " | ".join(f"{way}, us" for way in ways) + " |")
        print("|---" * (len(ways) + 1) + "|")
        for rows in ROWS:
            x = torch.randn(rows, width)
            cells = [f"{found:,.0f}" for found in microseconds([*ways.values()], x)]
            print(f"| {rows} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
