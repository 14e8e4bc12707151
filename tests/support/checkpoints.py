"""A small checkpoint, and equality of what checkpoints hold."""

import hashlib

import torch
from torch import Tensor


def state(**more):
    """The parts of a checkpoint."""
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    optimizer = [
        {"state": {0: {"exp_avg": torch.full((2, 3), 0.5)}}, "param_groups": [{"lr": 0.1}]}
    ]
    loader = {"epoch": 1, "batches": 2, "prompts": "abc", "seed": 0}
    loops = {"fit_loop": {"state_dict": {"combined_loader": [loader]}}}
    rest = {"lr_schedulers": [{"last_epoch": 3}], "callbacks": {"RunFolder": {"config": "a: 1"}}}
    return {"state_dict": weights, "optimizer_states": optimizer, "loops": loops, **rest, **more}


def digest(value):
    """SHA-256 of nested plain values and tensors; equal for equal content, however it is stored."""
    content = hashlib.sha256()

    def feed(value):
        if isinstance(value, Tensor):
            content.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
            flat = value.detach().cpu().contiguous().reshape(-1)
            content.update(flat.view(torch.uint8).numpy())
        elif isinstance(value, dict):
            content.update(f"dict {len(value)} ".encode())
            for pair in value.items():
                feed(list(pair))
        elif isinstance(value, list | tuple):
            content.update(f"list {len(value)} ".encode())
            for item in value:
                feed(item)
        else:
            content.update(f"{type(value).__name__} {value!r} ".encode())

    feed(value)
    return content.hexdigest()


def digest_parts(path):
    """{part: digest} of a checkpoint file."""
    checkpoint = torch.load(path, weights_only=True)
    return {name: digest(part) for name, part in checkpoint.items()}
