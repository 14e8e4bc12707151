import itertools
import os
import warnings
from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from litgrpo.evaluation import GreedyAccuracy, RewardMeans, SampledAccuracy, pass_at_k, wilson
from litgrpo.types import RewardTable

# 5 prompts, 4 samples each: 4, 2, 1, 0, 1 right
CORRECT = torch.tensor(
    [[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
).bool()
INDEX = torch.tensor([7, 3, 100, 0, 5])


def reward_table(rows: list[int]) -> RewardTable:
    part = CORRECT[rows].double()
    part[:, 3] = torch.nan
    valid = torch.ones_like(part, dtype=torch.bool)
    valid[:, [0, 3]] = False
    return RewardTable({"right": part}, {"right": 2.0}, 2 * part.nan_to_num(), valid)


def metrics() -> list[SampledAccuracy | GreedyAccuracy | RewardMeans]:
    return [SampledAccuracy(4, ks=(1, 2, 4)), GreedyAccuracy(), RewardMeans(["right"])]


def report(batches: list[list[int]]) -> dict[str, float]:
    """Feed rows to all metrics, batch by batch, and compute."""
    sampled, greedy, rewards = metrics()
    for rows in batches:
        sampled.update(INDEX[rows], CORRECT[rows])
        greedy.update(INDEX[rows], CORRECT[rows, 1])
        rewards.update(INDEX[rows], reward_table(rows))
    results = sampled.compute() | greedy.compute() | rewards.compute()
    return {name: value.item() for name, value in results.items()}


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample() -> None:
    for correct, k in itertools.product(range(6), range(1, 6)):
        samples = [place < correct for place in range(5)]
        expected = mean(any(chosen) for chosen in itertools.combinations(samples, k))
        assert pass_at_k(5, correct, k) == pytest.approx(expected)


def test_the_report_by_hand() -> None:
    result = report([[0, 1, 2, 3, 4]])
    assert result["avg@4"] == result["pass@1"] == pytest.approx(8 / 20)
    # 1, 1 - 1/6, 1/2, 0, 1/2
    assert result["pass@2"] == pytest.approx((1 + 5 / 6 + 1 / 2 + 0 + 1 / 2) / 5)
    assert result["pass@4"] == pytest.approx(4 / 5)
    # rates 1, .5, .25, 0, .25: variance .14375, squared error .02875, effective size .24 / .02875
    low, high = wilson(0.4 * 0.24 / 0.02875, 0.24 / 0.02875)
    assert (result["avg@4_low"], result["avg@4_high"]) == pytest.approx((low, high))
    assert result["greedy"] == pytest.approx(2 / 5)
    assert (result["greedy_low"], result["greedy_high"]) == pytest.approx(wilson(2, 5))
    # sample 0 failed in another part, sample 3 abstained; samples 1 and 2: 2, 1, 1, 0, 0 right
    assert result["reward"] == pytest.approx(2 * (2 + 1 + 1 + 0 + 0) / 10)
    assert result["right"] == pytest.approx((3 + 1 + 1 + 0 + 1) / 15)


def test_batches_order_and_repeated_rows_change_nothing() -> None:
    expected = report([[0, 1, 2, 3, 4]])
    assert report([[4], [2, 0], [3, 1]]) == expected
    assert report([[0, 1, 2], [3, 4, 0], [1], [], [4, 4]]) == expected


def test_a_metric_without_data_knows_nothing() -> None:
    result = report([[]])
    means = [result[name] for name in ("avg@4", "greedy", "reward", "right")]
    assert torch.tensor(means).isnan().all()
    assert (
        torch.tensor([result["avg@4"], result["greedy"], result["reward"], result["right"]])
        .isnan()
        .all()
    )
    assert (result["avg@4_low"], result["avg@4_high"]) == (0.0, 1.0)


def test_reset_forgets() -> None:
    metric = GreedyAccuracy()
    metric.update(INDEX, CORRECT[:, 0])
    metric.reset()
    metric.update(INDEX[:1], torch.tensor([True]))
    assert metric.compute()["greedy"] == 1.0


def test_wrong_settings_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pass@\[5\] cannot be estimated from 4 samples"):
        SampledAccuracy(4, ks=(1, 5))
    with pytest.raises(ValueError, match="expected 4 samples per prompt"):
        SampledAccuracy(4).update(INDEX, CORRECT[:, :3])
    with pytest.raises(ValueError, match="expected shape"):
        GreedyAccuracy().update(INDEX, CORRECT)
    with pytest.raises(ValueError, match="4 indices for 5 prompts"):
        SampledAccuracy(4).update(INDEX[:4], CORRECT)
    with pytest.raises(ValueError, match="16777216 rows at most"):
        GreedyAccuracy().update(torch.tensor([2**24]), torch.tensor([True]))


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    # uneven, one row on both processes, one idle process, one with an empty batch
    for name, splits in {
        "uneven": [[[0, 1], [2]], [[3, 4], [0]]],
        "empty": [[[0, 1, 2, 3, 4]], [[]]],
    }.items():
        torch.save(report(splits[rank]), folder / f"{name}{rank}.pt")
    metric = GreedyAccuracy()
    if rank == 0:
        metric.update(INDEX, CORRECT[:, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics tells the idle process that it has no data
        torch.save(metric.compute(), folder / f"idle{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_report_what_one_does(tmp_path: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.spawn(run_rank, (tmp_path,), nprocs=2)
    expected = report([[0, 1, 2, 3, 4]])
    for name in ("uneven0", "uneven1", "empty0", "empty1"):
        assert torch.load(tmp_path / f"{name}.pt") == expected
    for rank in range(2):
        assert torch.load(tmp_path / f"idle{rank}.pt")["greedy"].item() == expected["greedy"]
