"""What process 0 does for all."""

import pytest
import torch
from torch import distributed

from litgrpo.parallel.together import from_first, several


def test_one_process_has_its_own_value():
    assert not several()
    assert from_first({"a": 1}) == {"a": 1}


def work(rank, file, folder):
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.save((several(), from_first(f"of {rank}")), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.timeout(120)
def test_all_processes_have_the_value_of_the_first(tmp_path):
    torch.multiprocessing.spawn(work, (str(tmp_path / "meet"), str(tmp_path)), nprocs=2)
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)] == [(True, "of 0")] * 2
