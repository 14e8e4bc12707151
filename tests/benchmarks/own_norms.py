"""What norms and turned positions of our own would save of learning, in the Qwen2 of `step`.

    python -m tests.benchmarks.own_norms --size tiny --threads 1

Forward and backward pass of one rollout by the library's RMS norm and rotary embedding, and by
autograd functions that keep less and pass half as often over memory, in turns. Printed: median
seconds of each, and the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.models.qwen2 import modeling_qwen2 as library

from tests.benchmarks.profile import phases
from tests.benchmarks.workload import SIZES, Work


class Norm(torch.autograd.Function):
    """x over its root mean square, times a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        rows, grads, scales = x.flatten(0, -2), grad.flatten(0, -2), scale.flatten()[:, None]
        along = (grads * rows).mul_(scales)
        inward = torch.mv(along, weight)[:, None].mul_(scales.square()).mul_(-1 / x.shape[-1])
        of_x = (grads * weight).mul_(scales).addcmul_(rows, inward)
        return of_x.view_as(x), along.sum(0), None


class Turned(torch.autograd.Function):
    """Heads turned by their positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turned(grad, cos, -sin), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[..., D] numbers i and i + D/2 turned together."""
    half, out = x.shape[-1] // 2, torch.empty_like(x)
    cos, sin = cos[..., :half], sin[..., :half]
    torch.mul(x[..., :half], cos, out=out[..., :half]).addcmul_(x[..., half:], sin, value=-1)
    torch.mul(x[..., half:], cos, out=out[..., half:]).addcmul_(x[..., :half], sin)
    return out


def own_norm(module: Any, x: Tensor) -> Tensor:
    """In place of `Qwen2RMSNorm.forward`."""
    out: Tensor = Norm.apply(x, module.weight, module.variance_epsilon)
    return out


def own_turns(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """In place of `apply_rotary_pos_emb`."""
    cos, sin = cos[:, None], sin[:, None]
    return Turned.apply(query, cos, sin), Turned.apply(key, cos, sin)


def main() -> None:
    """Print both medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    found = phases(Work(SIZES[args.size], 8, 128, 0.02, threads=args.threads))
    found.sample()
    norm: Any = library.Qwen2RMSNorm
    ways = {
        "library": (norm.forward, library.apply_rotary_pos_emb),
        "own": (own_norm, own_turns),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.turns + 1):  # the first warms up
        for name, (forward, turn) in ways.items():
            norm.forward, library.apply_rotary_pos_emb = forward, turn
            began = time.perf_counter()
            found.learn()
            seconds[name].append(time.perf_counter() - began)
    before, now = (statistics.median(each[1:]) for each in seconds.values())
    print(f"library {before:.3f} s, own {now:.3f} s, ratio {before / now:.2f}")


if __name__ == "__main__":
    main()
