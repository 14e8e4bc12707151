from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from litgrpo.algorithms.advantages import Normalized
from litgrpo.algorithms.importance import ImportanceCorrection
from litgrpo.algorithms.loss_aggregation import MicroBatchTokenMean
from litgrpo.algorithms.losses import Objective
from litgrpo.models.loading import Precision
from litgrpo.models.reference import FrozenReference
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.static import StaticEngine
from litgrpo.rollout.episodes import EpisodeSettings
from litgrpo.rollout.rollouter import AllGroups
from litgrpo.rollout.sampling import Sampling
from litgrpo.training import assembly
from litgrpo.training.assembly import (
    Settings,
    changing,
    check_device,
    check_sizes,
    check_trainer_precision,
    corrected,
    overlong,
    same_digits,
)
from litgrpo.training.controllers import Controllers, ReferenceSync, SteeredCoefficients
from litgrpo.training.update_config import UpdateConfig
from tests.support.models import tiny_policy
from tests.support.training import module

CPU = torch.device("cpu")
SETTINGS = Settings(
    group_size=4,
    max_completion_length=6,
    sampling=Sampling(),
    engine=LocalEngine(),
    environment=None,
    episode=EpisodeSettings(),
    update=UpdateConfig(),
    precision=Precision(),
    dynamic_sampling_attempts=0,
    seed=3,
)


@pytest.fixture
def compiles(monkeypatch):
    """A device that compiles a program for each set of shapes."""
    monkeypatch.setattr(assembly, "backend", lambda device: SimpleNamespace(static_shapes=True))


def test_what_a_compiling_device_cannot_compute_is_refused(compiles):
    static = replace(SETTINGS, engine=StaticEngine())
    check_device(static, Objective(), CPU)
    check_device(replace(static, precision=Precision(disable_dropout=False)), Objective(), CPU)
    with pytest.raises(ValueError, match="engine is LocalEngine, whose shapes follow"):
        check_device(SETTINGS, Objective(), CPU)
    with pytest.raises(ValueError, match=r"MicroBatchTokenMean, .* Take TokenMean\."):
        check_device(static, Objective(loss_aggregation=MicroBatchTokenMean()), CPU)
    both = Precision(disable_dropout=False, gradient_checkpointing=True)
    with pytest.raises(ValueError, match=r"disable_dropout.*precision\.gradient_checkpointing"):
        check_device(replace(static, precision=both), Objective(), CPU)


def test_other_devices_compute_all_of_it():
    check_device(SETTINGS, Objective(loss_aggregation=MicroBatchTokenMean()), CPU)


@pytest.mark.parametrize(
    ("changed", "trainer_precision", "same"),
    [
        ({}, "32-true", True),
        ({}, "bf16-mixed", False),
        ({"precision": Precision(dtype="bfloat16")}, "32-true", False),
        ({"precision": Precision(autocast_dtype="bfloat16")}, "32-true", False),
        ({"engine": LocalEngine(dtype="bfloat16")}, "32-true", False),
        ({"sampling": Sampling(temperature=0.0)}, "32-true", False),
    ],
)
def test_the_samplers_digits_are_the_learners_in_full_precision_only(
    changed, trainer_precision, same
):
    assert same_digits(replace(SETTINGS, **changed), trainer_precision) == same


def test_a_group_of_one_needs_a_baseline_without_a_group():
    with pytest.raises(ValueError, match="group_size is 1, but this objective compares"):
        check_sizes(1, 6, None, Objective())
    check_sizes(1, 6, None, Objective(Normalized("batch", "none")))
    with pytest.raises(ValueError, match="max_iterations is 0; it must be at least 1"):
        check_sizes(4, 6, 0, Objective())


def test_a_share_of_completions_that_are_too_long_is_punished():
    assert overlong(0, 100) == {}
    (reward,) = overlong(0.25, 100).values()
    assert reward.kwargs == {"max_completion_length": 100, "soft_punish_cache": 25}
    assert overlong(0.001, 100)["soft_overlong"].kwargs["soft_punish_cache"] == 1
    for share in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"soft_overlong is {share}; it must be between"):
            overlong(share, 100)


def test_an_engine_that_is_not_exact_is_corrected_unless_the_user_said_how():
    low, own = LocalEngine(dtype="bfloat16"), ImportanceCorrection(high=2.0)
    now, ahead = UpdateConfig(), UpdateConfig(staleness=1)
    assert corrected(Objective(), LocalEngine(), now) == Objective()
    assert corrected(Objective(), low, now).importance_correction == ImportanceCorrection()
    assert (
        corrected(Objective(), LocalEngine(), ahead).importance_correction == ImportanceCorrection()
    )
    assert corrected(Objective(importance_correction=own), low, ahead).importance_correction is own


def test_only_precisions_that_leave_prompts_alone_are_taken():
    for precision in ("32-true", "bf16-mixed", "16-mixed"):
        check_trainer_precision(precision)
    with pytest.raises(ValueError, match=r"trainer\.precision is '16-true'"):
        check_trainer_precision("16-true")


def test_what_training_changes_is_the_policy_and_a_reference_that_follows():
    objective = Objective(kl_coef=0.1)
    grpo = module(objective=objective)
    grpo.reference = FrozenReference(tiny_policy("qwen2", seed=5))
    still = changing(grpo, grpo.coefficients)
    assert {name.split(".")[0] for name in still} == {"policy"}
    follows = SteeredCoefficients(Controllers(reference=ReferenceSync()), objective)
    assert len(changing(grpo, follows)) == 2 * len(still)


def test_the_parts_share_what_they_must_agree_on():
    grpo = module(objective=Objective(kl_coef=0.1), reference="another", sampling=Sampling(0.7))
    grpo.reference = FrozenReference(tiny_policy("qwen2", seed=5))
    grpo.configure_model()
    rollouter, learner = grpo.rollouter, grpo.learner
    assert rollouter.policy is learner.policy is grpo.policy
    assert rollouter.clock is learner.clock is grpo.clock
    assert rollouter.sampling == learner.sampling == grpo.settings.sampling
    assert learner.reference is grpo.reference
    assert learner.coefficients is grpo.coefficients


def test_groups_are_replaced_only_where_the_recipe_says_so():
    grpo = module(dynamic_sampling_attempts=2)
    grpo.configure_model()
    assert grpo.dynamic_sampling.rollouter is grpo.rollouter
    assert grpo.dynamic_sampling.scorer is grpo.scorer
    always = module()
    always.configure_model()
    assert type(always.dynamic_sampling) is AllGroups


def test_a_reference_of_another_shape_cannot_follow():
    follows = Controllers(reference=ReferenceSync())
    grpo = module(objective=Objective(kl_coef=0.1), controllers=follows, reference="another")
    grpo.reference = FrozenReference(tiny_policy("llama", hidden_size=64))
    with pytest.raises(ValueError, match=r"controllers\.reference"):
        grpo.configure_model()
