"""What is kept of a token for the backward pass, with `precision.selective_recompute` or not.

    python -m tests.benchmarks.kept --sizes tiny 30m 135m

Counted, not measured: every storage that is kept in one forward pass of packed rows, weights not,
so that a machine's speed and allocator do not matter. Printed: bytes for each output of the linear
layers, and MiB of a micro-batch of 2,048 tokens.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from litgrpo.models.causal import CausalPolicy
from litgrpo.models.kernels.selective_recompute import _Again
from litgrpo.types import TokenRows
from tests.benchmarks.workload import SIZES, Work

# 640 tokens: whole tiles, and no width of a model, by which weights are told from the rest.
PROMPTS, PROMPT_LEN, GROUP, COMPLETION_LEN = 2, 64, 4, 64
TOKENS = PROMPTS * (PROMPT_LEN + GROUP * COMPLETION_LEN)


def kept_bytes(policy: CausalPolicy, rows: TokenRows, *, recompute: bool, bf16: bool) -> int:
    """Bytes of one forward pass, weights and their copies in lower precision not counted."""
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # or a storage's address would be given to another
    shapes = {weight.shape for weight in policy.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if {tensor.shape, tensor.mT.shape if tensor.dim() > 1 else None}.isdisjoint(shapes):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    policy.selective_recompute = recompute
    pack = _Again.pack

    def packed(self: _Again, tensor: Tensor) -> object:
        kept = pack(self, tensor)
        if isinstance(kept[0], Tensor):
            keep(tensor)
        return kept

    precision: AbstractContextManager[object] = nullcontext()
    if bf16:
        precision = torch.autocast("cpu", torch.bfloat16)
    _Again.pack = packed  # type: ignore[method-assign,assignment]
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept), precision:
            policy.hidden(rows)
    finally:
        _Again.pack = pack  # type: ignore[method-assign]
    return sum(sizes.values())


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=["tiny", "30m"])
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = TokenRows(
        torch.randint(5, 400, (PROMPTS, PROMPT_LEN)),
        torch.ones(PROMPTS, PROMPT_LEN, dtype=torch.bool),
        torch.arange(PROMPTS).repeat_interleave(GROUP),
        torch.randint(5, 400, (PROMPTS * GROUP, COMPLETION_LEN)),
        torch.ones(PROMPTS * GROUP, COMPLETION_LEN, dtype=torch.bool),
    )
    print(
        "| size | precision | bytes of an output, kept all and recomputed | MiB of 2,048 tokens |"
    )
    print("|---|---|---|---|")
    for size in args.sizes:
        policy = Work(SIZES[size]).policy()
        for bf16 in (False, True):
            found = [
                kept_bytes(policy, rows, recompute=recompute, bf16=bf16) / TOKENS
                for recompute in (False, True)
            ]
            bytes_, mib = (
                ", ".join(f"{each * factor:,.{digits}f}" for each in found)
                for factor, digits in ((1 / policy.linear_outputs, 1), (2048 / 2**20, 0))
            )
            print(f"| {size} | {'bf16' if bf16 else 'float32'} | {bytes_} | {mib} |")


if __name__ == "__main__":
    main()
