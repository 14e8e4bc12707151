"""The parts that GRPO builds agree with each other, and its checkpoints restore them."""

import pytest
import torch

from litgrpo.algorithms.advantages import Normalized
from litgrpo.algorithms.objective import Objective
from litgrpo.callbacks.adaptive import ReferenceSync
from litgrpo.data.modules import PromptData
from litgrpo.models.reference import FrozenReference
from litgrpo.rollout.sampling import Sampling
from tests.support.models import tiny_policy
from tests.support.raises import raises_for
from tests.support.training import module, train


def with_reference(seed=5, **settings):
    grpo = module(objective=Objective(kl_coef=0.1), reference="another", **settings)
    grpo.reference = FrozenReference(tiny_policy("qwen2", seed=seed))
    grpo.configure_model()
    return grpo


def test_the_parts_share_what_they_must_agree_on():
    grpo = with_reference(sampling=Sampling(0.7))
    rollouter, learner = grpo.rollouter, grpo.learner
    assert rollouter.policy is learner.policy is grpo.policy
    assert rollouter.clock is learner.clock is grpo.clock
    assert rollouter.sampling == learner.sampling == grpo.sampling
    assert learner.reference is grpo.reference
    assert learner.objective is grpo.objective


def test_zero_variance_groups_are_replaced_only_on_request():
    grpo = module(dynamic_sampling_attempts=2)
    grpo.configure_model()
    (stage,) = grpo._build_stages(grpo.device)
    assert stage.rollouter is grpo.rollouter
    assert stage.scorer is grpo.scorer
    assert stage.learner is grpo.learner
    plain = module()
    plain.configure_model()
    assert plain._build_stages(plain.device) == []


def test_a_reference_of_another_shape_cannot_follow_the_policy():
    grpo = module(objective=Objective(kl_coef=0.1), reference="another")
    grpo.reference = FrozenReference(tiny_policy("llama", hidden_size=64))
    grpo.configure_model()
    with pytest.raises(ValueError, match="names or shapes"):
        ReferenceSync().on_fit_start(None, grpo)


def save(grpo):
    checkpoint = {"state_dict": grpo.state_dict(), "epoch": 1}
    grpo.on_save_checkpoint(checkpoint)
    return checkpoint


def test_checkpoints_hold_trained_weights_and_a_reference_that_moves():
    fixed = save(with_reference())
    assert {name.split(".")[0] for name in fixed["state_dict"]} == {"policy"}
    assert fixed["epoch"] == 1
    grpo = with_reference()
    ReferenceSync().setup(None, grpo, "fit")
    moving = save(grpo)
    assert len(moving["state_dict"]) == 2 * len(fixed["state_dict"])


def test_limits_are_restored():
    grpo = with_reference()
    grpo.learning_limit.max_rows, grpo.rollout_limit.max_rows = 2, 8
    checkpoint = save(grpo)
    other = with_reference()
    other.on_load_checkpoint(checkpoint)
    assert other.learner.row_limit.max_rows == 2
    assert other.rollouter.row_limit.max_rows == 8


def test_a_run_without_out_of_memory_errors_has_no_limit():
    checkpoint = save(with_reference())
    assert checkpoint["lowered"] == {}
    other = with_reference()
    other.learning_limit.max_rows = other.rollout_limit.max_rows = 4
    other.on_load_checkpoint(checkpoint)
    assert other.learner.row_limit.max_rows is None
    assert other.rollouter.row_limit.max_rows is None


def test_a_checkpoint_can_be_read_without_running_its_code(tmp_path):
    checkpoint = save(with_reference())
    torch.save(checkpoint, tmp_path / "a.ckpt")
    read = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert read.keys() == checkpoint.keys()


def drop_one(weights):
    del weights[next(iter(weights))]


def add_one(weights):
    weights["policy.extra"] = torch.zeros(1)


def reshape_one(weights):
    weights[next(iter(weights))] = torch.zeros(5)


@pytest.mark.parametrize("change", [drop_one, add_one, reshape_one])
def test_a_checkpoint_of_another_model_is_rejected_and_changes_nothing(change):
    checkpoint = save(with_reference())
    change(checkpoint["state_dict"])
    other = with_reference()
    other.learning_limit.max_rows = 2
    with raises_for("another model"):
        other.on_load_checkpoint(checkpoint)
    assert other.learner.row_limit.max_rows == 2


def test_a_group_of_one_needs_a_baseline_without_a_group():
    with raises_for("group_size"):
        module(group_size=1)
    module(group_size=1, objective=Objective(Normalized("batch", "none")))
    with raises_for("max_iterations", "0"):
        module(max_iterations=0)


def test_greedy_groups_are_not_trained_on():
    grpo = module(sampling=Sampling(temperature=0.0))
    with raises_for("sampling.temperature", "0"):
        train(grpo, PromptData(["a", "b"], batch_size=2))
