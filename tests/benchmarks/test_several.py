"""The benchmark of CPU seconds runs, and leaves one number for each iteration."""

import torch

from tests.benchmarks.several import learn


def test_one_process_leaves_the_seconds_of_each_iteration(tmp_path):
    file = tmp_path / "seconds.pt"
    learn(1, "1 process", 2, str(file))
    seconds = torch.load(file)
    assert len(seconds) == 2
    assert min(seconds) > 0
