"""Compare the memory of a backward pass reported by XLA's compiler with that of `plan`.

python -m tests.xla.memory, where torch_xla is installed: prints the table of docs/howto/tpu.md.
"""

import os
import re
import subprocess
import sys

import torch
from transformers import Gemma2Config

from litgrpo.distributed.sharding import shard_dim
from litgrpo.tools.plan.memory import IterationSizes, MetaModel, count_memory
from litgrpo.tools.plan.sharding import XLASharding
from tests.xla.own_process import ENVIRONMENT, ROOT

ROWS, LENGTH, GIB = 8, 256, 2**30
CASES = [(32_000, 128, 1), (32_000, 128, 8), (128_000, 8, 1), (128_000, 8, 8)]
REPORTED = re.compile(r"Intermediate tensor size: ([\d.]+) GB")  # of 2^30 bytes


def config(vocabulary: int) -> Gemma2Config:
    return Gemma2Config(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
    )


def estimate(vocabulary: int, completion: int, chips: int) -> float:
    """GiB of activations, head and gathered weights."""
    meta_model = MetaModel(config(vocabulary))
    work = IterationSizes((), LENGTH - completion, completion, ROWS, LENGTH)
    items = count_memory(
        meta_model, work, XLASharding(chips), states=[], reference=None, checkpointing=False
    )
    held = ("activations", "head", "gathered")
    return sum(item.size for item in items if item.name in held) / GIB


def backward(vocabulary: int, completion: int, chips: int) -> None:
    """Run one backward pass as one program, with gradients sharded like weights."""
    import numpy as np
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from transformers import AutoModelForCausalLM

    if chips > 1:
        xr.use_spmd()
    mesh = xs.Mesh(np.arange(chips), (chips,), ("fsdp",)) if chips > 1 else None

    def divide(tensor: torch.Tensor, cut: int | None) -> torch.Tensor:
        if mesh is not None:
            spec = tuple("fsdp" if dim == cut else None for dim in range(tensor.ndim))
            xs.mark_sharding(tensor, mesh, spec)
        return tensor

    device = torch.device("xla", 0)
    model = AutoModelForCausalLM.from_config(config(vocabulary), attn_implementation="eager")
    model = model.to(device).train()
    model.tie_weights()
    for weight in model.parameters():
        divide(weight, shard_dim(weight.shape, chips))
    ids = divide(torch.ones(ROWS, LENGTH, dtype=torch.long).to(device), 0)
    mask = divide(torch.zeros(ROWS, 1, LENGTH, LENGTH).to(device), 0)
    masks = {"full_attention": mask, "sliding_attention": mask}
    torch_xla.sync()
    hidden = model.base_model(
        input_ids=ids, attention_mask=masks, position_ids=ids, use_cache=False
    ).last_hidden_state
    logits = model.lm_head(hidden[:, -completion:])
    logits.log_softmax(-1).gather(-1, ids[:, -completion:, None]).mean().backward()
    del hidden, logits
    for weight in model.parameters():
        assert weight.grad is not None
        divide(weight.grad, shard_dim(weight.shape, chips))
    torch_xla.sync(wait=True)


def measure(*case: int) -> float:
    """GiB of the largest program of a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.xla.memory", *map(str, case)],
        env=os.environ | ENVIRONMENT | {"PT_XLA_DEBUG_LEVEL": "2", "CPU_NUM_DEVICES": str(case[2])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return max(float(size) for size in REPORTED.findall(done.stdout + done.stderr))


def main() -> None:
    print("| vocabulary | completion | devices | compiler | counted |")
    print("|---|---|---|---|---|")
    for case in CASES:
        numbers = f"{measure(*case):.3f} | {estimate(*case):.3f}"
        print(f"| {' | '.join(map(str, case))} | {numbers} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        backward(*map(int, sys.argv[1:]))
    else:
        main()
