"""What a layout needs, and that counted bytes are those of real shards."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from litgrpo.distributed.fsdp.units import divide
from litgrpo.models.sharded_weights import ENTRIES, find_fsdp_units
from litgrpo.tools.plan.command import PlanCLI
from litgrpo.tools.plan.division import FullShard
from litgrpo.tools.plan.layouts import layout_of
from litgrpo.tools.plan.memory import Blueprint, optimizer_states, states_share
from litgrpo.tools.plan.on_devices import plan_of
from tests.support.gloo import run_by
from tests.support.models import tiny_model, tiny_policy

CONFIGS = Path(__file__).parents[3] / "configs"
WORDS = ["-c", str(CONFIGS / "quickstart.yaml"), "-c", str(CONFIGS / "hardware" / "fsdp2.yaml")]
SERVER = ["-c", str(CONFIGS / "hardware" / "server.yaml")]


def local_bytes(processes, odd, replicas):
    """Weights, gradients and moments of real shards, against those counted for this process."""
    dist.init_process_group("gloo")
    policy = tiny_policy("qwen2", hidden_size=odd)
    config = policy.model.config
    division = FullShard(processes, replicas)
    names, shape = ("replicas", "shards"), (replicas, division.shards)
    both = init_device_mesh("cpu", shape, mesh_dim_names=names)
    divide(policy, find_fsdp_units(policy), ENTRIES, both if replicas > 1 else both["shards"])
    optimizer = torch.optim.AdamW(policy.parameters())
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    local = [parameter.to_local() for parameter in policy.parameters()]
    moments = [v.to_local() for s in optimizer.state.values() for n, v in s.items() if n != "step"]
    blueprint, rank = Blueprint(config), dist.get_rank() % division.shards
    counted = division.share_of_rank(blueprint.weights, rank)
    assert counted == sum(each.nbytes for each in local)
    assert counted == sum(parameter.grad.to_local().nbytes for parameter in policy.parameters())
    assert 2 * counted == sum(each.nbytes for each in moments)
    if rank == 0:
        states = optimizer_states(torch.optim.AdamW, blueprint.trained)
        steps = 4 * len(optimizer.state)
        assert states_share(states, blueprint.trained, division) == 2 * counted + steps
    dist.destroy_process_group()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("processes", "replicas"), [(2, 1), (4, 2)])
def test_counted_bytes_are_those_of_real_shards(processes, replicas):
    run_by(processes, local_bytes, 12, replicas)


def test_hosts_and_disk_and_publishing():
    plan = plan_of(
        PlanCLI([*WORDS, *SERVER, "--chip", "h100", "--chips", "6", "--samplers", "2"]).config
    )
    found = layout_of(plan)
    numbers = 647_808
    assert found.published == 2 * numbers
    assert found.publishing.high == pytest.approx(2 * numbers / 0.5e9)
    assert found.disk == pytest.approx(3 * 4 * numbers, rel=1e-3)
    assert found.host_load == 4 * numbers
    assert found.wanted == 16 * 8 // 2
    assert found.sampler == 2 * numbers
    token = 2 * 2 * 4 * 2 * 32  # bytes: keys and values, 4 layers, 2 heads of 32
    assert found.tokens == int(0.9 * 80e9 - 2 * numbers) // token
    assert found.rows == found.tokens // (512 + 40)
    assert not any(item.name.startswith("cache") for item in plan.items)


def test_machines_share_what_is_read_and_replicas_hold_more():
    one, two, copies = (
        layout_of(plan_of(PlanCLI([*WORDS, "--chip", "h100", *words]).config))
        for words in (
            ["--chips", "8"],
            ["--chips", "16"],
            ["--chips", "16", "--trainer.strategy.init_args.replicas", "2"],
        )
    )
    assert one.host_load == pytest.approx(2 * two.host_load)
    assert copies.learning > two.learning
    assert one.published == 0


def test_a_copy_of_sixteen_over_two_is_divided_over_eight():
    weights = Blueprint(tiny_model("llama").config).weights
    assert FullShard(16, replicas=2).share(weights) == FullShard(8).share(weights)
