"""Measure the peak rates of this machine and the minimum time of a step's arithmetic.

python -m tests.benchmarks.roofline --threads 2
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch.nn import functional

from litgrpo.models.kernels.linear import PackedLinear, can_pack_dtype, onednn_works
from tests.benchmarks.workload import Work


@dataclass(frozen=True)
class Machine:
    """Peaks of the processor with the available threads.

    Args:
        float32_gflops: of the fastest float32 matrix product here.
        bfloat16_gflops: the same in bfloat16.
        read_gb_s: memory read in one pass.
        copy_gb_s: memory read and written.
        threads: that did it.
    """

    float32_gflops: float
    bfloat16_gflops: float
    read_gb_s: float
    copy_gb_s: float
    threads: int


def best(run: Callable[[], object], seconds: float = 1.0) -> float:
    """Shortest time of a run, over about a second of them."""
    run()
    shortest, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        run()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def measure_machine(seconds: float = 1.0) -> Machine:
    """Matrix products of 1024 x 768 x 768 by every available kernel, and 256 MiB of memory."""
    rows, side = 1024, 768
    gflop = 2 * rows * side * side / 1e9
    peaks = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.randn(rows, side, dtype=dtype), torch.randn(side, side, dtype=dtype)
        kernels = [partial(functional.linear, x, weight)]
        if can_pack_dtype(dtype):
            kernels.append(partial(PackedLinear(weight), x))
        peaks[dtype] = max(gflop / best(kernel, seconds) for kernel in kernels)
    memory, other = torch.ones(2**26), torch.ones(2**26)
    gb = memory.numel() * 4 / 1e9
    return Machine(
        float32_gflops=peaks[torch.float32],
        bfloat16_gflops=peaks[torch.bfloat16],
        read_gb_s=gb / best(memory.sum, seconds),
        copy_gb_s=2 * gb / best(partial(other.copy_, memory), seconds),
        threads=torch.get_num_threads(),
    )


def kernels() -> dict[str, list[float]]:
    """GFLOP/s of some products: float32 plain, by oneDNN, packed; bfloat16 plain, and packed.

    The last is left out where the processor cannot.
    """
    if not onednn_works():
        return {}
    found = {}
    for rows, into, out in [(2048, 512, 1536), (32, 512, 1536), (8, 512, 1536), (32, 512, 8192)]:
        x, weight = torch.randn(rows, into), torch.randn(out, into)
        narrow, narrow_weight = x.bfloat16(), weight.bfloat16()
        ways = [
            partial(functional.linear, x, weight),
            partial(torch.ops.mkldnn._linear_pointwise, x, weight, None, "none", [], ""),
            partial(PackedLinear(weight), x),
            partial(functional.linear, narrow, narrow_weight),
        ]
        if can_pack_dtype(torch.bfloat16):
            ways.append(partial(PackedLinear(narrow_weight), narrow))
        gflop = 2 * rows * into * out / 1e9
        found[f"{rows} x {into} x {out}"] = [gflop / best(way, 0.5) for way in ways]
    return found


def floor(work: Work, lengths: list[float], machine: Machine) -> dict[str, float]:
    """Least seconds of the two phases of one step: shared prompts, no padding, nothing twice.

    The rollout reads each prompt once and each token once; the learning step costs three times a
    forward pass over the same tokens, and the optimizer moves its state through memory once.

    Args:
        work: the step.
        lengths: mean number of tokens of a completion, and mean of its square.
        machine: what it runs on.
    """
    size, rows = work.size, work.size.prompts * work.group
    mean, square = lengths
    peak = (machine.bfloat16_gflops if work.bf16 else machine.float32_gflops) * 1e9
    prompt, said = size.prompts * size.prompt_len, rows * mean
    fed = said - rows  # the last token of a completion is not fed
    head = 2 * said * size.hidden * size.vocab
    body = 2 * size.linear_weights
    # Scores and weighted values: 4 operations for each pair of tokens and each hidden unit.
    pairs_of_prompts = size.prompts * size.prompt_len**2 / 2
    pairs = pairs_of_prompts + fed * size.prompt_len + rows * square / 2
    attention = 4 * size.layers * size.hidden * pairs
    forward = body * (prompt + fed) + attention + head
    weights = size.linear_weights + size.hidden * size.vocab
    moved = (
        4 * weights * (4 + 3)
    )  # reads weight, gradient, two state tensors; writes all but the gradient
    steps = work.max_new if work.stop_prob is None else min(work.max_new, 4 / work.stop_prob)
    read = steps * weights * (2 if work.bf16 else 4) / (machine.read_gb_s * 1e9)
    return {
        "rollout_s": max(forward / peak, read),
        "learn_s": 3 * forward / peak + moved / (machine.copy_gb_s * 1e9),
    }


def main() -> None:
    """Print the machine's peaks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kernels", action="store_true", help="compare kernels by shape instead")
    parser.add_argument("--json", action="store_true", help="as it is anyway")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.kernels:
        print(json.dumps(kernels()))
        return
    print(json.dumps({name: round(value, 1) for name, value in asdict(measure_machine()).items()}))


if __name__ == "__main__":
    main()
