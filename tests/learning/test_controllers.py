"""Coefficients that move, a reference that follows, and that a checkpoint remembers both."""

import pytest
import torch

from litgrpo.algorithms.objective import Objective
from litgrpo.distributed.collectives import SingleProcess
from litgrpo.learning.controllers import (
    AdaptiveCoefficients,
    Controllers,
    EntropyTarget,
    FixedCoefficients,
    KLTarget,
    ReferenceSync,
)
from litgrpo.models.loading.load import LoRA
from litgrpo.models.reference import BaseModelReference, FrozenReference
from litgrpo.types import Rollout
from tests.support.comms import Twins
from tests.support.models import prompt_batch, tiny_policy
from tests.support.training import batches, train
from tests.support.training import unchecked as module

KL = Objective(kl_coef=0.1)


def test_the_entropy_bonus_grows_below_the_target_shrinks_above_and_stays_in_bounds():
    target = EntropyTarget(target=1.0, step=0.25, max_coef=0.5)
    assert [target.next(0.25, entropy) for entropy in (0.9, 1.0, 1.1)] == [0.5, 0.0, 0.0]
    assert target.next(0.5, 0.0) == 0.5
    assert target.next(0.0, 2.0) == 0.0


def rollout_with(entropy):
    """Two rows of a policy whose tokens were as surprising; an environment said the others."""
    loss_mask = torch.tensor([[1, 0, 1], [1, 0, 0]]).bool()
    seen = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    return Rollout(
        prompt_batch("a"),
        2,
        seen.long(),
        seen,
        -entropy * loss_mask.float(),
        torch.zeros(2, dtype=torch.bool),
        loss_mask=loss_mask,
    )


def test_the_entropy_bonus_counts_only_where_the_entropy_is_not_above_the_target():
    target = EntropyTarget(target=1.0, step=0.25)
    coefficients = AdaptiveCoefficients(Controllers(entropy=target), Objective(entropy_coef=1.0))
    coefficients.update_entropy_coef(rollout_with(1.5), SingleProcess())
    assert coefficients.sampled_entropy == 1.5
    assert coefficients.objective.entropy_coef == 0
    assert coefficients.entropy_coef == 0.1  # within the bound
    coefficients.update_entropy_coef(rollout_with(0.5), Twins())
    assert coefficients.sampled_entropy == 0.5
    assert coefficients.objective.entropy_coef == coefficients.entropy_coef == 0.1


def test_an_iteration_without_tokens_changes_no_entropy_bonus():
    target = EntropyTarget(target=1.0, step=0.25)
    coefficients = AdaptiveCoefficients(Controllers(entropy=target), Objective(entropy_coef=0.05))
    empty = rollout_with(1.5)
    empty.loss_mask[:] = False
    coefficients.update_entropy_coef(empty, SingleProcess())
    assert coefficients.objective.entropy_coef == coefficients.entropy_coef == 0.05


def test_the_kl_coefficient_follows_zieglers_rule_worked_out_by_hand():
    target = KLTarget(target=0.1, rate=0.1)
    # Errors: 0.1 -> * 1.01; 1 is cut to 0.2 -> * 1.02; -1 to -0.2 -> * 0.98.
    assert target.next(1.0, 0.11) == pytest.approx(1.01)
    assert target.next(1.0, 0.2) == pytest.approx(1.02)
    assert target.next(1.0, 0.0) == pytest.approx(0.98)


def test_a_checkpoint_written_right_after_resuming_holds_the_same_coefficients():
    controllers = Controllers(entropy=EntropyTarget(target=1.0), kl=KLTarget(0.1))
    saved = {"entropy_coef": 0.04, "kl_coef": 0.2}
    coefficients = AdaptiveCoefficients(controllers, Objective(kl_coef=0.1, entropy_coef=0.01))
    coefficients.load_state_dict(saved)
    assert coefficients.state_dict() == saved


def test_nothing_moves_unless_asked_for():
    objective = Objective(kl_coef=0.1, entropy_coef=0.2)
    coefficients = FixedCoefficients(objective)
    coefficients.update_entropy_coef(rollout_with(0.0), SingleProcess())
    coefficients.update({"policy/kl": torch.tensor(9.0)}, 1, tiny_policy("qwen2"), None)
    assert coefficients.objective is objective


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: EntropyTarget(0.0), "entropy.target is 0.0; it must be above 0"),
        (lambda: KLTarget(1.0, rate=-1), "kl.rate is -1"),
        (lambda: ReferenceSync(every=0), "reference.every is 0"),
        (lambda: ReferenceSync(mixup_alpha=1.5), "at most 1"),
        (lambda: module(controllers=Controllers(kl=KLTarget(1.0))), "kl_coef is 0"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()


def test_a_reference_under_adapters_or_of_other_shapes_is_refused():
    with pytest.raises(ValueError, match="under LoRA adapters"):
        BaseModelReference(tiny_policy("qwen2")).check_can_mix(tiny_policy("qwen2"))
    with pytest.raises(ValueError, match=r"controllers\.reference"):
        FrozenReference(tiny_policy("qwen2")).check_can_mix(tiny_policy("gpt2"))


def run_iterations(iterations, **settings):
    controllers = Controllers(
        entropy=EntropyTarget(target=20.0, step=0.01),
        kl=KLTarget(target=1e-6),
        reference=ReferenceSync(every=2, mixup_alpha=0.5),
    )
    grpo = module(objective=KL, controllers=controllers, max_iterations=iterations, **settings)
    grpo.reference = FrozenReference(tiny_policy("qwen2"))
    grpo.optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
    return grpo


def test_the_reference_goes_half_the_way_every_second_iteration():
    start = torch.cat([p.flatten() for p in tiny_policy("qwen2").parameters()])
    for iterations, share in [(1, 0.0), (2, 0.5), (3, 0.5)]:
        grpo, after = run_iterations(iterations), {}
        grpo.configure_model()
        follow = grpo.learner.update_coefficients

        def remember(stats, iteration, grpo=grpo, after=after, follow=follow):
            after[iteration] = torch.cat([p.flatten() for p in grpo.policy.parameters()])
            follow(stats, iteration)

        grpo.learner.update_coefficients = remember
        train(grpo, batches("a", "hello"))
        reference = torch.cat([p.flatten() for p in grpo.reference.policy.parameters()])
        expected = start if iterations < 2 else start + share * (after[2] - start)
        torch.testing.assert_close(reference, expected.detach())
        assert not any(p.requires_grad for p in grpo.reference.parameters())


def test_coefficients_are_logged_and_move():
    logged = train(run_iterations(3), batches("a", "hello")).logged_metrics
    assert logged["policy/entropy_coef"] == pytest.approx(0.03)
    assert logged["policy/entropy"] > 0
    assert logged["policy/kl_coef"] != pytest.approx(0.1)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_run_goes_on_with_coefficients_and_reference(stop, tmp_path):
    whole = run_iterations(5)
    train(whole, batches("a", "hello"))
    runner = train(run_iterations(stop), batches("a", "hello"))
    runner.save_checkpoint(tmp_path / "stopped.ckpt")
    resumed = run_iterations(5)
    train(resumed, batches("a", "hello"), ckpt=tmp_path / "stopped.ckpt")
    assert resumed.coefficients.state_dict() == whole.coefficients.state_dict()
    assert resumed.learner.objective == whole.learner.objective
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_coefficient_that_nothing_steers_is_the_recipes_on_resume(tmp_path):
    runner = train(run_iterations(1), batches("a", "hello"))
    runner.save_checkpoint(tmp_path / "stopped.ckpt")
    recipe = Objective(kl_coef=0.7, entropy_coef=0.3)
    controllers = Controllers(reference=ReferenceSync())
    grpo = module(objective=recipe, controllers=controllers, max_iterations=2)
    grpo.reference = FrozenReference(tiny_policy("qwen2"))
    grpo.optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
    train(grpo, batches("a", "hello"), ckpt=tmp_path / "stopped.ckpt")
    assert (grpo.learner.objective.kl_coef, grpo.learner.objective.entropy_coef) == (0.7, 0.3)


def test_a_reference_that_follows_cannot_go_with_adapters():
    grpo = run_iterations(1, lora=LoRA(rank=2))
    grpo.reference = BaseModelReference(grpo.policy)
    with pytest.raises(ValueError, match="Leave out lora"):
        train(grpo, batches("a", "hello"))
