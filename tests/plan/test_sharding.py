"""Shares of weights and rows, compared with torch's FSDP2."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from litgrpo.distributed.fsdp.units import divide
from litgrpo.models.loading.sharded_weights import ENTRIES, find_fsdp_units
from litgrpo.plan.memory import MetaModel, optimizer_bytes, step_optimizer
from litgrpo.plan.sharding import DDPSharding, FSDPSharding, SingleDevice, XLASharding
from tests.support.gloo import run_by
from tests.support.models import tiny_model, tiny_policy


def test_the_largest_shard_is_that_of_torch_chunk():
    for rows in (1, 3, 8, 10):
        for number in (2, 4):
            weight = torch.empty(rows, 3)
            assert FSDPSharding(number).share([weight]) == weight.chunk(number)[0].nbytes


def test_replicas_shard_over_fewer_processes():
    weight = [torch.empty(8, 4)]
    assert FSDPSharding(8).share(weight) == 4 * 4
    assert FSDPSharding(8, replicas=2).share(weight) == 2 * 4 * 4
    assert DDPSharding(8).share(weight) == SingleDevice().share(weight) == 8 * 4 * 4


@pytest.mark.parametrize(
    ("sharding", "rows"),
    [(XLASharding(4), 2), (DDPSharding(4), 8), (FSDPSharding(4), 8), (SingleDevice(), 8)],
)
def test_each_process_has_micro_batches_and_chips_share_one(sharding, rows):
    assert sharding.micro_rows(8, 64) == rows
    assert sharding.logit_rows(8, 64) == 8


def test_a_process_has_at_most_its_share_of_the_rows():
    assert FSDPSharding(4).micro_rows(32, 64) == 16


def test_gathered_weights_are_counted():
    layers = [[torch.empty(10, requires_grad=True)], [torch.empty(20, requires_grad=True)]]
    outside = [torch.empty(30, requires_grad=True)]
    found = FSDPSharding(2).gather(layers, outside)
    assert found["rollout"][0] == 4 * 60
    assert found["learning"][0] == 4 * (2 * 20 + 30) + 4 * (20 + 30)
    assert DDPSharding(2).gather(layers, outside)["learning"][0] == 4 * 60


def local_bytes(processes, odd, replicas):
    """Compare weights, gradients and optimizer state of real shards with the counted bytes."""
    dist.init_process_group("gloo")
    policy = tiny_policy("qwen2", hidden_size=odd)
    config = policy.model.config
    sharding = FSDPSharding(processes, replicas)
    names, shape = ("replicas", "shards"), (replicas, sharding.shards)
    both = init_device_mesh("cpu", shape, mesh_dim_names=names)
    divide(policy, find_fsdp_units(policy), ENTRIES, both if replicas > 1 else both["shards"])
    optimizer = torch.optim.AdamW(policy.parameters())
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    local = [parameter.to_local() for parameter in policy.parameters()]
    moments = [v.to_local() for s in optimizer.state.values() for n, v in s.items() if n != "step"]
    meta_model, rank = MetaModel(config), dist.get_rank() % sharding.shards
    counted, held = sharding.share(meta_model.weights), sum(shard.nbytes for shard in local)
    assert held == sum(parameter.grad.to_local().nbytes for parameter in policy.parameters())
    assert 2 * held == sum(moment.nbytes for moment in moments)
    assert held <= counted
    if rank == 0:
        assert held == counted
        states = step_optimizer(torch.optim.AdamW, meta_model.trained)
        steps = 4 * len(optimizer.state)
        assert optimizer_bytes(states, meta_model.trained, sharding) == 2 * counted + steps
    dist.destroy_process_group()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("processes", "replicas"), [(2, 1), (4, 2)])
def test_counted_bytes_are_those_of_real_shards(processes, replicas):
    run_by(processes, local_bytes, 12, replicas)


def test_sixteen_devices_with_two_replicas_shard_over_eight():
    weights = MetaModel(tiny_model("llama").config).weights
    assert FSDPSharding(16, replicas=2).share(weights) == FSDPSharding(8).share(weights)
