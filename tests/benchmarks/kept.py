"""Measure the activations saved per token, with and without `precision.selective_recompute`.

    python -m tests.benchmarks.kept --sizes tiny 30m 135m

Counted, not measured: every storage that is kept in one forward pass of packed rows, weights not,
so that a machine's speed and allocator do not matter. Printed: bytes for each output of the linear
layers, and MiB of a micro-batch of 2,048 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from litgrpo.models.causal import CausalPolicy
from litgrpo.models.kernels.linear import count_linear_outputs
from litgrpo.models.kernels.selective_recompute import _KeptTensor, _SavedTensors
from litgrpo.types import TokenRows
from tests.benchmarks.workload import SIZES, Work

# 640 tokens: whole tiles, and no width of a model, so weights can be identified by shape.
PROMPTS, PROMPT_LEN, GROUP, COMPLETION_LEN = 2, 64, 4, 64
TOKENS = PROMPTS * (PROMPT_LEN + GROUP * COMPLETION_LEN)


def kept_of(run: Callable[[], object]) -> list[Tensor]:
    """Return tensors that autograd saves in a forward pass, one per storage, with weights."""
    # Held, or a storage's address would be given to another.
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def pack_and_keep(self: _SavedTensors, tensor: Tensor) -> Any:
        packed = pack(self, tensor)
        if isinstance(packed, _KeptTensor):
            keep(tensor)
        return packed

    pack = _SavedTensors.pack  # of the hooks within, which torch asks in place of these
    with (
        patch.object(_SavedTensors, "pack", pack_and_keep),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        run()
    return [*kept.values()]


def kept_bytes(run: Callable[[], object], model: nn.Module) -> int:
    """Count their bytes, without weights and copies in lower precision, which the shape shows."""
    shapes = {shape for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
    kept = (each for each in kept_of(run) if each.shape not in shapes)
    return sum(each.untyped_storage().nbytes() for each in kept)


def rows_of_groups() -> TokenRows:
    """Random rows of 640 tokens."""
    rows = PROMPTS * GROUP
    return TokenRows(
        torch.randint(5, 250, (PROMPTS, PROMPT_LEN)),
        torch.ones(PROMPTS, PROMPT_LEN, dtype=torch.bool),
        torch.arange(PROMPTS).repeat_interleave(GROUP),
        torch.randint(5, 250, (rows, COMPLETION_LEN)),
        torch.ones(rows, COMPLETION_LEN, dtype=torch.bool),
    )


def by_recompute(policy: CausalPolicy, *, bf16: bool) -> list[float]:
    """Bytes kept of a token: all, and what is left where it is computed again."""
    found, rows = [], rows_of_groups()
    for policy.selective_recompute in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            found.append(kept_bytes(lambda: policy.hidden(rows), policy) / TOKENS)
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=["tiny", "30m"])
    args = parser.parse_args()
    torch.manual_seed(0)
    print(
        "| size | precision | bytes of an output, kept all and recomputed | MiB of 2,048 tokens |"
    )
    print("|---|---|---|---|")
    for size in args.sizes:
        policy = Work(SIZES[size]).policy()
        for bf16 in (False, True):
            found = by_recompute(policy, bf16=bf16)
            bytes_, mib = (
                ", ".join(f"{each * factor:,.{digits}f}" for each in found)
                for factor, digits in (
                    (1 / count_linear_outputs(policy.model), 1),
                    (2048 / 2**20, 0),
                )
            )
            print(f"| {size} | {'bf16' if bf16 else 'float32'} | {bytes_} | {mib} |")


if __name__ == "__main__":
    main()
