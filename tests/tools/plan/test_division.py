"""Shares of weights and rows, held against what torch's FSDP2 keeps."""

import pytest
import torch

from litgrpo.tools.plan.division import Alone, Chips, FullShard, Replicas


def test_shards_are_those_of_torch_chunk():
    for rows in (1, 3, 8, 10):
        for number in (2, 4):
            whole = torch.empty(rows, 3)
            chunks = [each.numel() for each in whole.chunk(number)]
            division = FullShard(number)
            found = [division.shard_numel(whole.shape, rank) for rank in range(number)]
            assert found == chunks + [0] * (number - len(chunks))


def test_replicas_of_shards_divide_over_fewer_processes():
    weight = [torch.empty(8, 4)]
    assert FullShard(8).share(weight) == 4 * 4
    assert FullShard(8, replicas=2).share(weight) == 2 * 4 * 4
    assert Replicas(8).share(weight) == Alone().share(weight) == 8 * 4 * 4


@pytest.mark.parametrize(
    ("division", "rows"), [(Chips(4), 2), (Replicas(4), 8), (FullShard(4), 8), (Alone(), 8)]
)
def test_processes_have_micro_batches_of_their_own_and_chips_share_one(division, rows):
    assert division.micro_rows(8, 64) == rows
    assert division.head_rows(8, 64) == 8


def test_a_process_has_no_more_rows_than_its_share():
    assert FullShard(4).micro_rows(32, 64) == 16


def test_what_is_gathered():
    layers = [[torch.empty(10, requires_grad=True)], [torch.empty(20, requires_grad=True)]]
    outside = [torch.empty(30, requires_grad=True)]
    weights = [*layers[0], *layers[1], *outside]
    found = FullShard(2).gathered(weights, layers, outside)
    assert found.rollout[0] == 4 * 60
    assert found.learning == 4 * (2 * 20 + 30) + 4 * (20 + 30)
    assert Alone().gathered(weights, layers, outside).learning == 0
    assert Replicas(2).gathered(weights, layers, outside).learning == 4 * 60
