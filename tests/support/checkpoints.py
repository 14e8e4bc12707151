"""A small checkpoint."""

import torch


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
