import pytest
import torch

from litgrpo.distributed.collectives import (
    Comm,
    SingleProcess,
    all_gather_object,
    broadcast_object,
    is_distributed,
)


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


def test_without_torch_distributed_objects_are_returned():
    assert not is_distributed()
    assert broadcast_object({"a": 1}) == {"a": 1}
    assert all_gather_object("one") == ["one"]
