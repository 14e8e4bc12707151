"""Coefficients that move, a reference that follows, and that a checkpoint remembers both."""

import pytest
import torch
from lightning import Callback

from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.objective import Objective
from litgrpo.callbacks.adaptive import EntropyTarget, KLTarget, ReferenceSync
from litgrpo.models.loading.load import LoRA
from litgrpo.models.reference import BaseModelReference, FrozenReference
from litgrpo.modules.sft import SFT
from litgrpo.types import Experience, Rollout
from tests.learning.parts import learner_of
from tests.support.comms import Twins
from tests.support.models import prompt_batch, tiny_policy
from tests.support.raises import raises_for
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
        turns=torch.where(loss_mask, 0, -1),
    )


class Iterations:
    """Sets the entropy bonus of iterations without training on them.

    Args:
        target: the callback.
        coefficient: of the config.
    """

    def __init__(self, target, coefficient):
        self.target = target
        self.objective = Objective(entropy_coef=coefficient)
        self.learner = learner_of(tiny_policy("qwen2"), self.objective)
        target.on_fit_start(None, self)

    def run(self, rollout):
        """Return the coefficient of the loss, and that of the checkpoint after the iteration."""
        experience = Experience(rollout.prompts, rollout, rewards=None, logprobs=None)
        stats = self.target(experience, 0).stats
        self.target.on_train_batch_end()
        coefficient = self.learner.objective.entropy_coef
        assert float(stats["policy/entropy_coef"]) == pytest.approx(coefficient)
        return coefficient, self.target.state_dict()["coefficient"]


def test_the_entropy_bonus_counts_only_where_the_entropy_is_not_above_the_target():
    iterations = Iterations(EntropyTarget(target=1.0, step=0.25), 1.0)
    assert iterations.run(rollout_with(1.5)) == (0, 0.1)  # within the bound
    assert iterations.run(rollout_with(1.0)) == (0, 0)  # at the target it shrinks, and counts
    iterations.learner.comm = Twins()
    assert iterations.run(rollout_with(0.5)) == (0.1, 0.1)


def test_an_iteration_without_tokens_changes_no_entropy_bonus():
    iterations = Iterations(EntropyTarget(target=1.0, step=0.25), 0.05)
    empty = rollout_with(1.5)
    empty.loss_mask[:] = False
    assert iterations.run(empty) == (0.05, 0.05)


def test_the_start_up_checks_include_an_entropy_bonus_that_starts_at_zero():
    iterations = Iterations(EntropyTarget(target=1.0, step=0.02), 0.0)
    assert iterations.learner.objective.entropy_coef == 0.02


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_a_bonus_that_the_correction_does_not_weight_is_named_once(entropy_coef, caplog):
    correction = ImportanceCorrection()
    objective = Objective(entropy_coef=entropy_coef, importance_correction=correction)
    with caplog.at_level("INFO", logger="litgrpo"):
        EntropyTarget(1.0).setup(None, module(objective=objective), "fit")
    assert ("bonus is not corrected" in caplog.text) == (entropy_coef == 0)


def test_the_kl_coefficient_follows_zieglers_rule_worked_out_by_hand():
    target = KLTarget(target=0.1, rate=0.1)
    # Errors: 0.1 -> * 1.01; 1 is cut to 0.2 -> * 1.02; -1 to -0.2 -> * 0.98.
    assert target.next(1.0, 0.11) == pytest.approx(1.01)
    assert target.next(1.0, 0.2) == pytest.approx(1.02)
    assert target.next(1.0, 0.0) == pytest.approx(0.98)


@pytest.mark.parametrize("callback", [EntropyTarget(target=1.0), KLTarget(0.1)])
def test_a_checkpoint_written_right_after_resuming_holds_the_same_coefficient(callback):
    callback.load_state_dict({"coefficient": 0.04})
    grpo = module(objective=Objective(kl_coef=0.1, entropy_coef=0.01))
    grpo.reference = FrozenReference(tiny_policy("qwen2"))
    grpo.configure_model()
    callback.on_fit_start(None, grpo)
    callback.on_train_start(None, grpo)
    assert callback.state_dict() == {"coefficient": 0.04}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: EntropyTarget(0.0), "EntropyTarget.target is 0.0; it must be above 0"),
        (lambda: KLTarget(1.0, rate=-1), "KLTarget.rate is -1"),
        (lambda: ReferenceSync(every=0), "ReferenceSync.every is 0"),
        (lambda: ReferenceSync(mixup_alpha=1.5), "at most 1"),
        (lambda: KLTarget(1.0).setup(None, module(), "fit"), "kl_coef is 0"),
        (lambda: ReferenceSync().setup(None, module(), "fit"), "kl_coef is 0"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()


def test_a_reference_under_adapters_or_of_other_shapes_is_refused():
    with pytest.raises(ValueError, match="under LoRA adapters"):
        BaseModelReference(tiny_policy("qwen2")).check_can_mix(tiny_policy("qwen2"))
    with pytest.raises(ValueError, match="ReferenceSync"):
        FrozenReference(tiny_policy("qwen2")).check_can_mix(tiny_policy("gpt2"))


@pytest.mark.parametrize("callback", [EntropyTarget(1.0), KLTarget(0.1), ReferenceSync()])
def test_supervised_training_has_no_objective_to_adapt(callback):
    with raises_for(type(callback).__name__, "SFT", "Leave out"):
        callback.setup(None, SFT(""), "fit")


def adaptive():
    """Callbacks that change all that they can."""
    return [
        EntropyTarget(target=20.0, step=0.01),
        KLTarget(target=1e-6),
        ReferenceSync(every=2, mixup_alpha=0.5),
    ]


def run_iterations(iterations, **settings):
    grpo = module(objective=KL, max_iterations=iterations, **settings)
    grpo.reference = FrozenReference(tiny_policy("qwen2"))
    grpo.optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
    return grpo


class Weights(Callback):
    """Keeps the policy's weights after each iteration."""

    def __init__(self):
        self.after = {}

    def on_train_batch_end(self, trainer, pl_module, *_):
        weights = [parameter.flatten() for parameter in pl_module.policy.parameters()]
        self.after[pl_module.iteration] = torch.cat(weights)


def test_the_reference_goes_half_the_way_every_second_iteration():
    start = torch.cat([p.flatten() for p in tiny_policy("qwen2").parameters()])
    for iterations, share in [(1, 0.0), (2, 0.5), (3, 0.5)]:
        grpo, weights = run_iterations(iterations), Weights()
        train(grpo, batches("a", "hello"), callbacks=[weights, *adaptive()])
        after = weights.after
        reference = torch.cat([p.flatten() for p in grpo.reference.policy.parameters()])
        expected = start if iterations < 2 else start + share * (after[2] - start)
        torch.testing.assert_close(reference, expected.detach())
        assert not any(p.requires_grad for p in grpo.reference.parameters())


def test_coefficients_are_logged_and_move():
    runner = train(run_iterations(3), batches("a", "hello"), callbacks=adaptive())
    logged = runner.logged_metrics
    assert logged["policy/entropy_coef"] == pytest.approx(0.03)
    assert logged["policy/entropy"] > 0
    assert logged["policy/kl_coef"] != pytest.approx(0.1)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_run_goes_on_with_coefficients_and_reference(stop, tmp_path):
    data, path = batches("a", "hello"), tmp_path / "stopped.ckpt"
    whole, uninterrupted = run_iterations(5), adaptive()
    train(whole, data, callbacks=uninterrupted)
    train(run_iterations(stop), data, callbacks=adaptive()).save_checkpoint(path)
    resumed, continued = run_iterations(5), adaptive()
    train(resumed, data, callbacks=continued, ckpt=path)
    for ours, theirs in zip(continued, uninterrupted, strict=True):
        assert ours.state_dict() == theirs.state_dict()
    assert resumed.learner.objective == whole.learner.objective
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_without_callbacks_a_resumed_run_has_the_coefficients_of_the_recipe(tmp_path):
    """The reference that has moved is that of the checkpoint."""
    data, path = batches("a", "hello"), tmp_path / "stopped.ckpt"
    before = run_iterations(2)
    train(before, data, callbacks=adaptive()).save_checkpoint(path)
    recipe = Objective(kl_coef=0.7, entropy_coef=0.3)
    grpo = module(objective=recipe, max_iterations=3)
    grpo.reference = FrozenReference(tiny_policy("qwen2"))
    grpo.optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
    train(grpo, data, ckpt=path)
    assert (grpo.learner.objective.kl_coef, grpo.learner.objective.entropy_coef) == (0.7, 0.3)
    for ours, theirs in zip(
        grpo.reference.parameters(), before.reference.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_later_fit_without_callbacks_has_the_coefficients_of_the_recipe():
    grpo = run_iterations(1)
    train(grpo, batches("a", "hello"), callbacks=adaptive())
    assert grpo.learner.objective != KL
    grpo.max_iterations = 2
    train(grpo, batches("a", "hello"))
    assert grpo.learner.objective == KL


def test_a_reference_that_follows_cannot_go_with_adapters():
    grpo = run_iterations(1, lora=LoRA(rank=2))
    grpo.reference = BaseModelReference(grpo.policy)
    with pytest.raises(ValueError, match="Leave out lora"):
        train(grpo, batches("a", "hello"), callbacks=adaptive())
