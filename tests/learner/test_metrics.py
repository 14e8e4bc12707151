import pytest
import torch

from litgrpo.learner.metrics import Totals, averages, of_completions
from litgrpo.parallel.comm import SingleProcess
from litgrpo.types import StepReport
from tests.comms import Twins, in_turns

CPU = torch.device("cpu")


def pair(total, count):
    return torch.tensor([float(total), float(count)])


def test_an_average_counts_tokens_and_not_micro_batches():
    totals = Totals()
    totals.add({"kl": pair(10, 1)})
    totals.add({"kl": pair(2, 3)})
    assert totals.averages(SingleProcess(), CPU)["kl"] == 3  # 12 / 4, no mean of 10 and 2 / 3


def test_an_average_over_processes_weighs_each_by_what_it_counted():
    def process(total, count):
        def mean(comm):
            totals = Totals()
            totals.add({"kl": pair(total, count)})
            return totals.averages(comm, CPU)["kl"]

        return mean

    assert [float(each) for each in in_turns(process(10, 1), process(2, 3))] == [3.0, 3.0]


def test_nothing_counted_is_zero_and_no_division_by_zero():
    totals = Totals()
    totals.add({"clip": pair(0, 0)})
    assert totals.averages(SingleProcess(), CPU)["clip"] == 0


@pytest.mark.parametrize("comm", [SingleProcess(), Twins()])
def test_skipped_steps_count_in_the_learning_rate_and_nowhere_else(comm):
    reports = [StepReport(0.1, {"policy/loss": pair(4, 1)}), StepReport(0.3, skipped={})]
    logged = averages({"reward/mean": torch.tensor(0.5)}, reports, comm, CPU)
    assert logged.keys() == {"reward/mean", "policy/loss", "optim/lr"}
    assert logged["reward/mean"] == 0.5
    assert logged["policy/loss"] == 4
    assert float(logged["optim/lr"]) == pytest.approx(0.2)


def test_extremes_are_of_all_processes_and_pairs_are_weighed():
    def process(smallest, largest, total, count):
        seen = {"completion/len_min": torch.tensor(smallest), "reward/max": torch.tensor(largest)}
        seen |= {"policy/entropy": pair(total, count), "reward/mean": torch.tensor(largest)}
        return lambda comm: averages(seen, [StepReport(0.1)], comm, CPU)

    for found in in_turns(process(3.0, 1.0, 10, 1), process(2.0, 5.0, 2, 3)):
        assert found["completion/len_min"] == 2
        assert found["reward/max"] == 5
        assert found["policy/entropy"] == 3
        assert found["reward/mean"] == 3


def test_an_extreme_of_nothing_is_zero():
    seen = {"completion/terminated_len_min": torch.tensor(torch.inf)}
    seen["completion/terminated_len_max"] = torch.tensor(-torch.inf)
    found = averages(seen, [StepReport(0.1)], SingleProcess(), CPU)
    assert found["completion/terminated_len_min"] == found["completion/terminated_len_max"] == 0


def test_the_share_that_is_clipped_has_extremes_over_optimizer_steps():
    reports = [StepReport(0.1, {"policy/clip_low_frac": pair(n, 4)}) for n in (0, 1, 3)]
    found = averages({}, reports, SingleProcess(), CPU)
    assert float(found["policy/clip_low_frac"]) == pytest.approx(4 / 12)
    assert found["policy/clip_low_frac_min"] == 0
    assert found["policy/clip_low_frac_max"] == 0.75


def test_the_advantage_of_a_completion_is_that_of_its_policy_tokens():
    tokens = torch.tensor([[0.0, -2.0, -2.0], [1.5, 0.0, 1.5], [0.0, 0.0, 0.0]])
    assert of_completions(tokens).tolist() == [-2.0, 1.5, 0.0]
