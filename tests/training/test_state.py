from dataclasses import replace

import pytest
import torch

from litgrpo.algorithms.losses import Objective
from litgrpo.training.controllers import Controllers, KLTarget, SteeredCoefficients
from litgrpo.training.state import load, save
from tests.support.models import tiny_policy
from tests.training.parts import learner_of, rollouter_of


def parts(kl_coef=0.1):
    policy = tiny_policy("qwen2")
    steered = SteeredCoefficients(Controllers(kl=KLTarget(0.1)), Objective(kl_coef=kl_coef))
    learner = replace(learner_of(policy), coefficients=steered)
    return learner, rollouter_of(policy)


def saved(learner, rollouter, kept=("trained",)):
    weights = {"trained": torch.ones(2), "frozen": torch.zeros(3)}
    checkpoint = {"state_dict": dict(weights), "epoch": 1}
    save(checkpoint, {name: weights[name] for name in kept}, learner, rollouter)
    return checkpoint


def test_weights_that_never_change_are_left_out_and_the_trainers_own_state_stays():
    checkpoint = saved(*parts())
    assert list(checkpoint["state_dict"]) == ["trained"]
    assert checkpoint["epoch"] == 1


def test_coefficients_and_limits_are_taken_up():
    learner, rollouter = parts(kl_coef=0.3)
    learner.max_rows, rollouter.max_rows = 2, 8
    checkpoint = saved(learner, rollouter)
    other, sampler = parts()
    load(checkpoint, {"trained": torch.zeros(2)}, other, sampler)
    assert other.objective.kl_coef == 0.3
    assert (other.max_rows, sampler.max_rows) == (2, 8)


def test_where_memory_sufficed_there_is_no_limit():
    checkpoint = saved(*parts())
    assert checkpoint["lowered"] == {}
    learner, rollouter = parts()
    learner.max_rows = rollouter.max_rows = 4
    load(checkpoint, {"trained": torch.zeros(2)}, learner, rollouter)
    assert learner.max_rows is None
    assert rollouter.max_rows is None


def test_a_checkpoint_can_be_read_without_running_code_of_it(tmp_path):
    learner, rollouter = parts()
    learner.max_rows = 2
    checkpoint = saved(learner, rollouter)
    torch.save(checkpoint, tmp_path / "a.ckpt")
    read = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert read.keys() == checkpoint.keys()
    assert read["lowered"] == {"micro_batch_size": 2}


@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        ({"trained": torch.zeros(2), "more": torch.zeros(1)}, "missing more"),
        ({}, "unexpected trained"),
        ({"trained": torch.zeros(5)}, "of another shape trained"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(expected, problem):
    learner, rollouter = parts()
    learner.max_rows = 2
    checkpoint = saved(*parts(kl_coef=0.7))
    with pytest.raises(ValueError, match=problem):
        load(checkpoint, expected, learner, rollouter)
    assert learner.max_rows == 2
    assert learner.objective.kl_coef == 0.1
