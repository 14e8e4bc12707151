"""Shard and gather on two ranks; unsharded modules stay unchanged."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from litgrpo.distributed.fsdp.units import divide, gathered, is_gathered, is_sharded
from litgrpo.models.loading.sharded_weights import ENTRIES, find_fsdp_units
from litgrpo.tensors import full_tensor
from tests.support.gloo import run_by
from tests.support.models import prompt_batch, tiny_policy


def test_what_is_not_divided_stays_whole():
    policy = tiny_policy("qwen2")
    assert not is_sharded(policy)
    assert is_gathered(policy)
    with gathered(policy, None):
        assert is_gathered(policy)


def shard_and_gather(processes):
    dist.init_process_group("gloo")
    policy = tiny_policy("gemma2")
    plain = copy.deepcopy(policy)
    assert len(find_fsdp_units(policy)) == 2
    divide(policy, find_fsdp_units(policy), ENTRIES, init_device_mesh("cpu", (processes,)))
    prompts = prompt_batch("a", "hello")
    asked = (prompts.prompt_ids, prompts.prompt_mask, prompts.prompt_ids)
    assert is_sharded(policy)
    assert not is_gathered(policy)
    for parameter, other in zip(policy.parameters(), plain.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().numel() < other.numel()
        assert torch.equal(full_tensor(parameter), other)
    expected = plain.dense_logits(*asked)
    assert torch.equal(policy.dense_logits(*asked), expected)
    with gathered(policy), gathered(policy):
        assert is_gathered(policy)
        assert not any(isinstance(p, DTensor) for p in policy.parameters())
        # Unequal numbers of calls: nothing is exchanged.
        for _ in range(1 + dist.get_rank()):
            assert torch.equal(policy.dense_logits(*asked), expected)
            trained = list(policy.parameters())
            loss = policy.dense_logits(*asked).square().mean()
            found = torch.autograd.grad(loss, trained)
    right = torch.autograd.grad(
        plain.dense_logits(*asked).square().mean(), list(plain.parameters())
    )
    assert all(map(torch.allclose, found, right))
    assert not is_gathered(policy)
    # Gradients of shards, averaged over processes, are those of the whole.
    policy.dense_logits(*asked).square().mean().backward()
    for parameter, gradient in zip(policy.parameters(), right, strict=True):
        assert torch.allclose(full_tensor(parameter.grad), gradient, atol=1e-6)
    dist.destroy_process_group()


@pytest.mark.timeout(900)
def test_two_processes_divide_gather_and_learn():
    run_by(2, shard_and_gather)
