"""The simulated device allows what CUDA allows, and raises where CUDA raises."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.cuda_device.run import needs_cuda, on_cuda, run_on_cuda

MIB = 2**20


@on_cuda(CUDA_DEVICE_COUNT=2)
def test_tensors_of_several_devices_do_not_mix():
    x = torch.randn(3, 4).to("cuda")
    assert x.device == torch.device("cuda:0")
    assert torch.equal((x @ x.t() + 1).cpu(), x.cpu() @ x.cpu().t() + 1)
    for mixed in (
        lambda: x + torch.randn(3, 4),
        lambda: torch.cat([x, torch.randn(1, 4)]),
        lambda: torch.stack([x.sum(), torch.tensor(1.0)]),
        lambda: x.index_select(0, torch.tensor([1])),
        lambda: torch.randn(3)[torch.tensor([1], device="cuda")],
        lambda: x.masked_fill_(torch.ones(3, 4, dtype=torch.bool), 0.0),
        lambda: functional.embedding(torch.tensor([1]), x),
        lambda: x.masked_scatter(x > 0, torch.ones(12)),
        lambda: x.to("cuda:1") + x,
        lambda: torch.zeros(1, device="cuda:2"),
    ):
        with pytest.raises(RuntimeError):
            mixed()
    with pytest.raises(TypeError, match="cuda"):
        x.numpy()
    # CUDA takes numbers from the CPU, and index tensors.
    assert (x + torch.tensor(1.0)).is_cuda
    assert torch.where(x > 0, x, torch.tensor(0.0)).is_cuda
    assert x[torch.tensor([1])].is_cuda
    with torch.cuda.device(1):
        assert torch.zeros(1, device="cuda").device.index == 1


@on_cuda()
def test_training_operators_run_on_the_device():
    x, linear = torch.randn(3, 4, device="cuda"), nn.Linear(4, 5).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        y = linear(x)
    assert (y.dtype, y.device.type) == (torch.bfloat16, "cuda")
    y.float().sum().backward()
    assert linear.weight.grad.is_cuda
    for kind in ({"fused": True}, {"foreach": True}, {}):
        optimizer = torch.optim.AdamW(linear.parameters(), **kind)
        optimizer.step()
    checkpoint(lambda t: functional.dropout(linear(t)), x, use_reentrant=False).sum().backward()
    query = torch.randn(2, 4, 5, 8, device="cuda")
    attended = functional.scaled_dot_product_attention(
        query, query[:, :2], query[:, :2], enable_gqa=True
    )
    assert attended.is_cuda
    half = x.half()
    for softmax in (torch.softmax, torch.log_softmax):
        assert torch.equal(softmax(half, -1, dtype=torch.float32), softmax(half.float(), -1))
    values, inverse = torch.unique(torch.tensor([3, 1, 3], device="cuda"), return_inverse=True)
    assert (values.tolist(), inverse.tolist()) == ([1, 3], [1, 0, 1])
    assert torch.view_as_complex(torch.stack([x, x], -1)).is_cuda
    for made in (
        torch.arange(5, device="cuda"),
        torch.randperm(4, device="cuda"),
        torch.linspace(0, 1, 3, device="cuda"),
        copy.deepcopy(linear).weight,
    ):
        assert made.is_cuda
    # Random numbers are the device's, not the CPU's.
    torch.manual_seed(0)
    state = torch.cuda.get_rng_state()
    first, of_cpu = torch.rand(3, device="cuda"), torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), of_cpu)
    assert not torch.empty(3, device="cuda").isclose(torch.tensor(0.0, device="cuda"), atol=0).any()


@on_cuda()
def test_tensors_are_saved_with_their_device():
    file, x = io.BytesIO(), torch.randn(3, device="cuda")
    torch.save({"x": x}, file)
    for place, device in ((None, "cuda"), ("cpu", "cpu")):
        file.seek(0)
        found = torch.load(file, map_location=place)["x"]
        assert found.device.type == device
        assert torch.equal(found.cpu(), x.cpu())


@on_cuda()
def test_launches_waits_and_costs_are_counted():
    from tests.cuda_device.device import add_kernel, count_work, dry_run

    x = torch.randn(64, 32, device="cuda")
    with count_work() as work:
        y = x @ x.t()
        x[x > 0]
        x[x < 0] = 0.0
        y.sum().item()
        add_kernel("own", 8, 16)
    assert work.launches["aten::mm"] == 1
    assert work.waits == {
        "aten::nonzero": 1,
        "aten::_index_put_impl_ (bool index)": 1,
        "_local_scalar_dense": 1,
    }
    product = work.costs["aten::mm"]
    assert product.flops == 2 * 64 * 32 * 64
    assert product.num_bytes == 4 * (2 * 64 * 32 + 64 * 64)
    assert work.costs["own"].flops == 16
    # 4 TB of weights fit into no machine.
    with dry_run(), pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**40, device="cuda")
    with dry_run(), count_work() as work:
        weight = torch.empty(2**17, 2**16, device="cuda", dtype=torch.bfloat16)
        (weight @ weight[:8].t()).sum()
    assert work.num_bytes > 2**34
    assert 5e-3 < work.seconds < 1e-2


@on_cuda()
def test_operators_that_cuda_fuses_count_as_one_kernel():
    from tests.cuda_device.device import count_work

    x, weight = torch.rand(4, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    torch.nn.functional.rms_norm(x, (16,), weight, 1e-6).square().sum().backward()
    own = [each.detach().cuda().requires_grad_() for each in (x, weight)]
    with count_work() as work:
        normed = torch.nn.functional.rms_norm(own[0], (16,), own[1], 1e-6)
    assert work.launches == {"aten::_fused_rms_norm": 1}
    normed.square().sum().backward()
    for each, expected in zip(own, (x, weight), strict=True):
        assert torch.allclose(each.grad.cpu(), expected.grad, atol=1e-5)
    # Writing one column of a cache does not read the others.
    cache, column = torch.zeros(8, 64, 4, device="cuda"), torch.tensor([3], device="cuda")
    with count_work() as work:
        cache.index_copy_(1, column, torch.ones(8, 1, 4, device="cuda"))
    assert work.costs["aten::index_copy"].num_bytes == 2 * 4 * 8 * 4


@on_cuda()
def test_a_graph_is_recorded_without_running_and_replayed_in_one_launch():
    from tests.cuda_device.device import count_work

    graph, counter = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda")
    with count_work() as capture, torch.cuda.graph(graph):
        result = counter * 2 + 1
        counter.add_(1)
    assert not capture.costs
    # Nothing ran: the input is as it was, and the result has no values yet.
    assert counter.tolist() == [0.0] * 3
    assert result.tolist() != [1.0] * 3
    with count_work() as work:
        for number in range(3):
            graph.replay()
            assert result.tolist() == [2.0 * number + 1] * 3
            assert counter.tolist() == [number + 1.0] * 3
    assert work.launches["graph replay"] == 3
    assert "aten::mul" not in work.launches
    # The work inside counts at each replay.
    assert {name: work.costs[name].kernels for name in ("aten::mul", "aten::add")} == {
        "aten::mul": 3,
        "aten::add": 6,
    }
    assert work.costs["aten::mul"].num_bytes == 3 * 4 * 6
    for waiting in (lambda: counter.sum().item(), counter.cpu, torch.cuda.synchronize):
        with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(graph):
            waiting()


@on_cuda(CUDA_DEVICE_LIMIT_MB=8)
def test_memory_is_counted_and_limited():
    free, total = torch.cuda.mem_get_info()
    assert free == total == torch.cuda.get_device_properties(0).total_memory == 8 * MIB
    x = torch.empty(MIB, device="cuda")
    assert torch.cuda.memory_allocated() == 4 * MIB
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        x + x + x
    del x
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.max_memory_allocated() == 8 * MIB


@on_cuda()
def test_copies_that_do_not_block_are_late():
    x = torch.arange(4.0, device="cuda")
    host = x.to("cpu", non_blocking=True)
    assert host.tolist() != [0, 1, 2, 3]
    torch.cuda.synchronize()
    assert host.tolist() == [0, 1, 2, 3]
    event, target = torch.cuda.Event(), torch.zeros(4).pin_memory()
    target.copy_(x, non_blocking=True)
    event.record()
    assert target.tolist() != [0, 1, 2, 3]
    x.zero_()  # later than the copy
    event.synchronize()
    assert target.tolist() == [0, 1, 2, 3]
    # From memory that is not pinned, and without non_blocking, copies wait.
    assert torch.zeros(4).copy_(x, non_blocking=True).tolist() == x.cpu().tolist() == [0] * 4
    # A device may read pinned memory later.
    sent = target.to("cuda", non_blocking=True)
    target.zero_()
    with pytest.raises(RuntimeError, match="Pinned memory was changed"):
        torch.cuda.synchronize()
    assert sent.tolist() == [0, 1, 2, 3]


@on_cuda()
def test_gradients_are_scaled_and_steps_of_infinite_ones_are_skipped():
    weight, scaler = nn.Parameter(torch.ones(2, device="cuda")), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for factor, expected in ((1.0, 0.0), (torch.inf, 0.0), (1.0, -1.0)):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [expected] * 2
    assert scaler.get_scale() == 2.0**15


@on_cuda(CUDA_DEVICE_FLOAT64=0)
def test_a_device_without_float64_raises_as_apples_do():
    x = torch.ones(2, device="cuda")
    for double in (
        x.double,
        lambda: torch.zeros(1, dtype=torch.float64, device="cuda"),
        lambda: torch.ones(2, dtype=torch.float64).to("cuda"),
        lambda: x.sum(dtype=torch.float64),
    ):
        with pytest.raises(TypeError, match="float64"):
            double()
    assert (x * 0.5).dtype == torch.float32


@on_cuda(HIDDEN_PACKAGES="accelerate,peft")
def test_packages_can_be_hidden():
    import importlib.util

    assert importlib.util.find_spec("accelerate") is None
    assert importlib.util.find_spec("transformers") is not None
    with pytest.raises(ModuleNotFoundError):
        import peft  # noqa: F401


@needs_cuda
def test_a_command_runs_on_the_device():
    code = "import sys, torch; print(torch.cuda.device_count(), sys.argv[1])"
    done = run_on_cuda("-c", code, "word", CUDA_DEVICE_COUNT=3)
    assert (done.returncode, done.stdout) == (0, "3 word\n")
