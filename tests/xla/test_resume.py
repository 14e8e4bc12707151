"""Processes that train through XLA and are ended: the same bits when the command is given again."""

import signal
from pathlib import Path

import pytest
import yaml

from tests.faults.cases import stop_and_resume
from tests.faults.running import EVERY, RECIPE, Run, merge_runs
from tests.xla.own_process import ROOT, own_process

OVERLAY = yaml.safe_load((ROOT / "configs/hardware/xla_cpu.yaml").read_text())
TRAIN = "python:litgrpo.data.examples.problems.train?size=14"
FEWER = {
    "model": {"init_args": {"group_size": 2, "max_iterations": 4, "max_completion_length": 24}},
    "data": {
        "init_args": {
            "batch_size": 4,
            "train": "python:litgrpo.data.examples.problems.train?size=14",
        }
    },
    "trainer": {"val_check_interval": 2},
    "watchdog": {"timeout_s": 400},  # a hang shows its stacks; compiling on a busy machine is none
}
POINTS = {
    "backward": {"at": "backward", "count": 2},
    "step": {"at": "step", "count": EVERY + 1},
    "generate": {"at": "generate", "count": 4, "delay_s": 0.05, "signum": int(signal.SIGTERM)},
    "end": {"at": "end", "count": 3},
    "checkpoint": {"at": "checkpoint", "count": 1, "size": 1000},
}


@pytest.mark.timeout(2400)  # processes that compile one after another, on a busy machine
@own_process()
def test_a_run_killed_at_five_points_resumes_to_bitwise_equal_weights(tmp_path: str):
    import torch_xla  # noqa: F401 (once for all forks; each opens the device itself)

    recipe = merge_runs(RECIPE, OVERLAY, FEWER)
    whole = Run(Path(tmp_path) / "whole", recipe)
    assert whole.go() == 0, whole.said
    wrong = {
        name: stop_and_resume(Run(Path(tmp_path) / name, recipe), whole, **point)
        for name, point in POINTS.items()
    }
    assert not any(wrong.values()), wrong
