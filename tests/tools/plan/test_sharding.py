"""Shares of weights and rows, compared with torch's FSDP2."""

import pytest
import torch

from litgrpo.tools.plan.sharding import DDPSharding, FSDPSharding, SingleDevice, XLASharding


def test_shards_are_those_of_torch_chunk():
    for rows in (1, 3, 8, 10):
        for number in (2, 4):
            whole = torch.empty(rows, 3)
            chunks = [each.numel() for each in whole.chunk(number)]
            sharding = FSDPSharding(number)
            found = [sharding.shard_numel(whole.shape, rank) for rank in range(number)]
            assert found == chunks + [0] * (number - len(chunks))


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
    weights = [*layers[0], *layers[1], *outside]
    found = FSDPSharding(2).gather(weights, layers, outside)
    assert found.rollout == 4 * 60
    assert found.learning == 4 * (2 * 20 + 30) + 4 * (20 + 30)
    assert SingleDevice().gather(weights, layers, outside).learning == 0
    assert DDPSharding(2).gather(weights, layers, outside).learning == 4 * 60
