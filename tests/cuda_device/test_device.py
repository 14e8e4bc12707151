"""The simulated device raises and counts where CUDA does; a lenient one would hide defects."""

import importlib.util

import pytest
import torch
from torch.nn import functional

from tests.cuda_device.run import on_cuda

MIB = 2**20


@on_cuda(CUDA_DEVICE_COUNT=2)
def test_tensors_of_several_devices_do_not_mix():
    x = torch.randn(3, 4).to("cuda")
    for mix in (
        lambda: x + torch.randn(3, 4),
        lambda: torch.cat([x, torch.randn(1, 4)]),
        lambda: x.index_select(0, torch.tensor([1])),
        lambda: torch.randn(3)[torch.tensor([1], device="cuda")],
        lambda: functional.embedding(torch.tensor([1]), x),
        lambda: x.to("cuda:1") + x,
    ):
        with pytest.raises(RuntimeError):
            mix()
    # CUDA takes numbers from the CPU, and index tensors.
    assert (x + torch.tensor(1.0)).is_cuda
    assert x[torch.tensor([1])].is_cuda
    # Fresh memory is not zero.
    assert not torch.empty(3, device="cuda").eq(0).any()


@on_cuda(CUDA_DEVICE_LIMIT_MB=8)
def test_memory_is_counted_and_limited():
    x = torch.empty(MIB, device="cuda")
    assert torch.cuda.memory_allocated() == 4 * MIB
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        x + x + x
    del x
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.max_memory_allocated() == torch.cuda.mem_get_info()[1] == 8 * MIB


@on_cuda()
def test_launches_waits_and_graphs_are_counted():
    from tests.cuda_device.device import count_work

    x = torch.randn(64, 32, device="cuda")
    with count_work() as work:
        x[x > 0]
        x[x < 0] = 0.0
        (x @ x.t()).sum().item()
    assert work.launches["aten::mm"] == 1
    by_mask = "aten::_index_put_impl_ (bool index)"
    assert work.waits == {"aten::nonzero": 1, by_mask: 1, "_local_scalar_dense": 1}

    graph, counter = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda")
    with torch.cuda.graph(graph):
        result = counter * 2 + 1
        counter.add_(1)
    assert counter.tolist() == [0.0] * 3  # a capture runs nothing
    assert result.tolist() != [1.0] * 3
    with count_work() as work:
        graph.replay()
        graph.replay()
    assert (counter.tolist(), result.tolist()) == ([2.0] * 3, [3.0] * 3)
    assert work.launches == {"graph replay": 2}
    for wait in (lambda: counter.sum().item(), counter.cpu, torch.cuda.synchronize):
        with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(graph):
            wait()


@on_cuda()
def test_copies_that_do_not_block_are_late():
    x, pinned = torch.arange(4.0, device="cuda"), torch.zeros(4).pin_memory()
    pinned.copy_(x, non_blocking=True)
    assert pinned.tolist() != [0, 1, 2, 3]
    torch.cuda.synchronize()
    assert pinned.tolist() == [0, 1, 2, 3]
    pinned.to("cuda", non_blocking=True)
    pinned.zero_()  # a device may read pinned memory later
    with pytest.raises(RuntimeError, match="Pinned memory was changed"):
        torch.cuda.synchronize()


@on_cuda(CUDA_DEVICE_FLOAT64=0, HIDDEN_PACKAGES="accelerate,peft")
def test_float64_and_packages_can_be_taken_away():
    for double in (torch.ones(2, device="cuda").double, lambda: torch.ones(2).double().to("cuda")):
        with pytest.raises(TypeError, match="float64"):
            double()
    assert importlib.util.find_spec("peft") is None
    assert importlib.util.find_spec("transformers") is not None
