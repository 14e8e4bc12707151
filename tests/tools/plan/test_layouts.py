"""Requirements of a layout, and counted bytes of real shards."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from litgrpo.distributed.fsdp.units import divide
from litgrpo.models.sharded_weights import ENTRIES, find_fsdp_units
from litgrpo.tools.plan.command import PlanCLI
from litgrpo.tools.plan.memory import MetaModel, optimizer_bytes, step_optimizer
from litgrpo.tools.plan.plan import make_layout, make_plan
from litgrpo.tools.plan.sharding import FSDPSharding
from tests.support.gloo import run_by
from tests.support.models import tiny_model, tiny_policy

CONFIGS = Path(__file__).parents[3] / "configs"
WORDS = ["-c", str(CONFIGS / "quickstart.yaml"), "-c", str(CONFIGS / "hardware" / "fsdp2.yaml")]
SERVER = ["-c", str(CONFIGS / "hardware" / "server.yaml")]


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
    counted = sharding.share_of_rank(meta_model.weights, rank)
    assert counted == sum(each.nbytes for each in local)
    assert counted == sum(parameter.grad.to_local().nbytes for parameter in policy.parameters())
    assert 2 * counted == sum(each.nbytes for each in moments)
    if rank == 0:
        states = step_optimizer(torch.optim.AdamW, meta_model.trained)
        steps = 4 * len(optimizer.state)
        assert optimizer_bytes(states, meta_model.trained, sharding) == 2 * counted + steps
    dist.destroy_process_group()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("processes", "replicas"), [(2, 1), (4, 2)])
def test_counted_bytes_are_those_of_real_shards(processes, replicas):
    run_by(processes, local_bytes, 12, replicas)


def test_hosts_disk_and_weight_sync_are_counted():
    plan = make_plan(
        PlanCLI([*WORDS, *SERVER, "--chip", "h100", "--chips", "6", "--samplers", "2"]).config
    )
    found = make_layout(plan)
    numbers = 647_808
    assert found.published == 2 * numbers
    assert found.publishing.high == pytest.approx(2 * numbers / 0.5e9)
    assert found.disk == pytest.approx(3 * 4 * numbers, rel=1e-3)
    assert found.host_load == 4 * numbers
    assert found.rows_per_rollout == 16 * 8 // 2
    assert found.sampler == 2 * numbers
    token = 2 * 2 * 4 * 2 * 32  # bytes: keys and values, 4 layers, 2 heads of 32
    assert found.tokens == int(0.9 * 80e9 - 2 * numbers) // token
    assert found.rows == found.tokens // (512 + 40)
    assert not any(item.name.startswith("cache") for item in plan.items)


def test_hosts_share_loading_and_replicas_hold_more():
    one, two, copies = (
        make_layout(make_plan(PlanCLI([*WORDS, "--chip", "h100", *words]).config))
        for words in (
            ["--chips", "8"],
            ["--chips", "16"],
            ["--chips", "16", "--trainer.strategy.init_args.replicas", "2"],
        )
    )
    assert one.host_load == pytest.approx(2 * two.host_load)
    assert copies.learning > two.learning
    assert one.published == 0


def test_sixteen_devices_with_two_replicas_shard_over_eight():
    weights = MetaModel(tiny_model("llama").config).weights
    assert FSDPSharding(16, replicas=2).share(weights) == FSDPSharding(8).share(weights)
