import pytest
import torch

from litgrpo.distributed.comm import Comm, SingleProcess


@pytest.mark.parametrize("value", [torch.tensor(2.5), torch.tensor([[1, -3], [0, 7]])])
def test_a_single_process_knows_every_sum_and_maximum(value):
    comm: Comm = SingleProcess()
    assert comm.world_size == 1
    for found in (comm.sum(value), comm.max(value)):
        assert torch.equal(found, value)
        assert found.dtype == value.dtype


def test_a_single_process_gathers_what_it_has_without_padding():
    values = torch.tensor([0.5, -1.0, 3.0])
    assert torch.equal(SingleProcess().gather(values), values)
