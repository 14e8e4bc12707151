from dataclasses import dataclass, replace

import pytest
import torch
from lightning import Callback, Trainer

from litgrpo.algorithms.advantages import ReMax
from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.surrogates import PolicyGradient
from litgrpo.data.modules import PromptData
from litgrpo.data.pairs import PairBatch
from litgrpo.evaluation.evaluator import Evaluation
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.models.loading.load import LoRA, Precision, build_policy
from litgrpo.models.reference import BaseModelReference, FrozenReference
from litgrpo.modules.grpo import GRPO
from litgrpo.rewards.reward import Reward
from litgrpo.rewards.scorer import Scorer
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.sources.ahead import Ahead
from litgrpo.rollout.sources.base import OnPolicy
from litgrpo.types import PromptBatch
from tests.learning.parts import build_training_batch, gradient_of, learner_of
from tests.support.learner import Broken, Tight, first_token
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy
from tests.support.raises import raises_for
from tests.support.training import (
    GROUP,
    LENGTH,
    batches,
    letters,
    loader,
    sample_rollout,
    train,
    vowels,
)
from tests.support.training import unchecked as module


def mean_reward(grpo):
    """Mean over 64 completions of each of two prompts."""
    rollout = sample_rollout(grpo, prompt_batch("a", "b"), "val", group_size=64)
    return grpo.scorer.start(rollout).wait().total.mean()


def step_gradient(grpo, batch) -> torch.Tensor:
    """The gradient of the first optimizer step, as the optimizer would see it."""
    seen = []

    class Recorder(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            params = [p for group in self.param_groups for p in group["params"]]
            seen.append(torch.cat([p.grad.flatten() for p in params]))

    grpo.optimizer = lambda params: Recorder(params, lr=0.0)
    train(grpo, loader(batch))
    return seen[1]  # before training, an optimizer of a small weight takes a step


def test_the_gradient_of_a_run_is_that_of_the_learner():
    batch, policy = prompt_batch("a", "hello there", "xyz"), tiny_policy("qwen2")
    paper = Objective(loss_aggregation="sequence_mean")
    got = step_gradient(module(objective=paper, update=UpdateConfig(max_grad_norm=None)), batch)
    learner = learner_of(policy, paper)
    expected = gradient_of(learner, build_training_batch(learner, batch))
    assert (got - expected).norm() / expected.norm() < 1e-5


def test_the_ratio_is_one_in_the_first_inner_epoch_and_moves_after_it():
    logged = []
    for epochs_per_rollout in (1, 2):
        grpo = module(
            update=UpdateConfig(epochs_per_rollout=epochs_per_rollout),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )
        logged.append(train(grpo, batches("a", "hello")).logged_metrics)
    assert float(logged[0]["policy/log_ratio"]) == 0
    assert abs(float(logged[1]["policy/log_ratio"])) > 1e-6


def test_old_logprobs_are_reused_only_if_the_sampler_is_exact(not_learned):
    batch = prompt_batch("a", "hello there")
    two_epochs = UpdateConfig(epochs_per_rollout=2)
    for sampling in (Sampling(temperature=0.7), Sampling(top_k=5, top_p=0.9)):
        grpo = module(update=two_epochs, sampling=sampling)
        train(grpo, loader(batch))
        training_batch = not_learned.pop()
        assert not not_learned
        assert training_batch.old_logprobs is training_batch.sampler_logprobs
        fresh = grpo.learner.logprobs(training_batch.tokens).logprobs
        torch.testing.assert_close(training_batch.old_logprobs, fresh, atol=1e-5, rtol=1e-5)


def test_truncated_sampling_learns_the_distribution_that_it_drew_from():
    """The gradient of the mean of A log p, p renormalized by hand over the tokens kept."""
    batch, sampling = prompt_batch("a", "hello there"), Sampling(temperature=0.9, top_k=4)
    grpo = module(sampling=sampling, update=UpdateConfig(max_grad_norm=None))
    got = step_gradient(grpo, batch)
    grpo = module(sampling=sampling)
    rollout = sample_rollout(grpo, batch)
    rewards = torch.tensor(letters([], rollout.completions)).view(-1, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    loss = torch.zeros(())
    for row, advantage in enumerate(advantages.flatten()):
        said = rollout.completion_ids[row][rollout.completion_mask[row]]
        ids = batch.prompt_ids[row // GROUP][batch.prompt_mask[row // GROUP]][None]
        logits = grpo.policy.dense_logits(ids, torch.ones_like(ids, dtype=torch.bool), said[None])
        probs = (logits[0, :-1] / 0.9).softmax(-1)
        kept = probs.topk(4).values.sum(-1)  # the policy has not moved: these are the tokens
        chosen = probs.gather(-1, said[:, None]).squeeze(-1)
        loss = loss - advantage * (chosen / kept).log().mean() / len(rewards) / GROUP
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in grpo.policy.parameters()])
    assert (got - expected).norm() / expected.norm() < 1e-5


def drawn(sampling):
    """Return the sampling of a run."""
    grpo = module(sampling=sampling)
    grpo.configure_model()
    assert grpo.rollouter.sampling == grpo.learner.sampling
    return grpo.rollouter.sampling


def test_a_candidate_set_above_the_limit_raises_and_an_open_one_is_bounded():
    with raises_for("sampling.top_k", "300", "256"):
        module(sampling=Sampling(top_k=300))
    assert drawn(Sampling(top_k=300, max_candidates=300)).top_k == 300
    assert drawn(Sampling(top_p=0.9)).top_k == 256
    assert drawn(Sampling()).top_k == 0


def test_mini_batches_take_one_optimizer_step_each():
    learning = UpdateConfig(epochs_per_rollout=2, num_mini_batches=2)
    grpo = module(update=learning, max_iterations=3)
    runner = train(grpo, batches("a", "hello", "xyz"))
    assert (grpo.iteration, runner.global_step) == (3, 12)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_it_learns_to_say_vowels(kind):
    grpo = module(
        kind,
        reward=vowels,
        objective=Objective(loss_aggregation="sequence_mean"),
        max_iterations=30,
        group_size=8,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    )
    start = mean_reward(grpo)
    train(grpo, batches("a", "b", "c", "d"))
    end = mean_reward(grpo)
    assert start < 0.1
    assert end > 0.6


def test_a_checkpoint_holds_what_is_trained_and_a_resumed_run_ends_the_same(tmp_path):
    objective = Objective(kl_coef=0.01)

    def fresh(iterations):
        grpo = module("t5", max_iterations=iterations, objective=objective)
        grpo.reference = FrozenReference(tiny_policy("t5"))
        return grpo

    whole = fresh(4)
    train(whole, batches("a", "hello"))
    train(fresh(2), batches("a", "hello")).save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert saved["iteration"] == 2
    assert all(name.startswith("policy.") for name in saved["state_dict"])
    resumed = fresh(4)
    runner = Trainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=-1
    )
    runner.fit(resumed, batches("a", "hello"), ckpt_path=tmp_path / "half.ckpt")
    assert resumed.iteration == 4
    for one, other in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_complete_run_takes_no_further_iteration(tmp_path):
    train(module(max_iterations=2), batches("a")).save_checkpoint(tmp_path / "done.ckpt")
    again = module(max_iterations=2)
    runner = Trainer(logger=False, enable_checkpointing=False, max_epochs=-1)
    runner.fit(again, batches("a"), ckpt_path=tmp_path / "done.ckpt")
    assert again.iteration == 2


def test_validation_reports_accuracies_with_intervals():
    evaluation = Evaluation(num_samples=4, pass_at_k=[1, 4], success_threshold=0.1)
    grpo = module(evaluation=evaluation)
    runner = Trainer(logger=False, enable_progress_bar=False)
    (report,) = runner.validate(
        grpo, loader(prompt_batch("a", "hello", "xyz"), num=1), verbose=False
    )
    assert report["val/avg@4_low"] <= report["val/avg@4"] <= report["val/avg@4_high"]
    assert report["val/pass@1"] == pytest.approx(report["val/avg@4"])
    assert report["val/pass@4"] >= report["val/pass@1"]
    assert {"val/greedy", "val/letters", "val/reward"} <= grpo.evaluation_report.keys()


def test_predictions_name_prompt_completion_and_columns():
    batch = prompt_batch("a", "hello")
    batch = PromptBatch(
        batch.prompt_ids, batch.prompt_mask, batch.prompts, {"level": [1, 2]}, batch.index
    )
    runner = Trainer(logger=False, enable_progress_bar=False)
    (rows,) = runner.predict(module(), loader(batch, num=1))
    assert [row["prompt"] for row in rows] == ["a", "hello"]
    assert [row["columns"]["level"] for row in rows] == [1, 2]
    assert {"completion", "reasoning", "answer", "truncated"} <= rows[0].keys()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(group_size=0), "group_size is 0; it must be at least 1"),
        (dict(group_size=1), "group_size is 1, but .* compares completions"),
        (dict(max_completion_length=0), "max_completion_length is 0"),
        (
            dict(evaluation=Evaluation(success_reward="right")),
            "evaluation.success_reward",
        ),
    ],
)
def test_invalid_settings_raise_before_anything_is_loaded(settings, message):
    with pytest.raises(ValueError, match=message):
        module(**settings)


def test_pass_at_k_above_the_number_of_samples_raises():
    with pytest.raises(ValueError, match="pass_at_k"):
        Evaluation(pass_at_k=[8])


@pytest.mark.parametrize("kind", ["qwen2", "t5"])
def test_lora_trains_adapters_only_and_is_kept_near_the_model_without_them(kind, tmp_path):
    grpo = module(kind, objective=Objective(kl_coef=0.1), lora=LoRA(rank=2), max_iterations=2)
    grpo.policy = build_policy(tiny_model(kind), byte_tokenizer(), lora=grpo.lora)
    before = {name: weight.clone() for name, weight in grpo.policy.state_dict().items()}
    runner = train(grpo, batches("a", "hello"))
    assert isinstance(grpo.reference, BaseModelReference)
    moved = {n for n, weight in grpo.policy.state_dict().items() if not weight.equal(before[n])}
    assert moved
    assert all("lora_" in name for name in moved)
    runner.save_checkpoint(tmp_path / "lora.ckpt")
    saved = torch.load(tmp_path / "lora.ckpt", weights_only=True)["state_dict"]
    assert all("lora_" in name for name in saved)


def test_mixed_precision_recomputes_the_old_logprobs_and_learns_in_float32_weights():
    grpo = module(update=UpdateConfig(epochs_per_rollout=2))
    runner = train(grpo, batches("a", "hello"), precision="bf16-mixed")
    assert all(parameter.dtype == torch.float32 for parameter in grpo.policy.parameters())
    assert runner.logged_metrics["optim/grad_norm"].isfinite()


def test_a_precision_that_converts_prompts_raises():
    with pytest.raises(ValueError, match="precision"):
        train(module(), batches("a"), precision="bf16-true")


def test_low_precision_weights_recompute_the_old_logprobs(not_learned):
    for dtype, same in [("float32", True), ("bfloat16", False)]:
        learning = UpdateConfig(epochs_per_rollout=2)
        grpo = module(update=learning, precision=Precision(dtype=dtype))
        grpo.policy.to(getattr(torch, dtype))
        train(grpo, batches("a", "hello"))
        training_batch = not_learned.pop()
        assert (training_batch.old_logprobs is training_batch.sampler_logprobs) == same


def test_pairs_instead_of_prompts_raise():
    mask = torch.ones(1, 2, dtype=torch.bool)
    pairs = PairBatch(torch.ones(1, 2, dtype=torch.long), mask, mask)
    with raises_for("PairBatch", "PromptData"):
        train(module(), loader(pairs))


def test_log_probabilities_of_a_low_precision_engine_are_recomputed_and_corrected(updates):
    engine = LocalEngine(dtype="bfloat16")
    grpo = module(engine=engine, update=UpdateConfig(epochs_per_rollout=2))
    runner = train(grpo, batches("a", "hello there"))
    ((training_batch, _),) = updates
    fresh = learner_of(tiny_policy("qwen2")).logprobs(training_batch.tokens).logprobs
    torch.testing.assert_close(training_batch.old_logprobs, fresh, atol=1e-5, rtol=1e-5)
    gap = (training_batch.old_logprobs - training_batch.sampler_logprobs).abs()
    expected = gap[training_batch.tokens.completion_mask].mean()
    assert 1e-4 < expected < 0.1
    torch.testing.assert_close(runner.logged_metrics["policy/sampler_mismatch"], expected)
    weights = ImportanceCorrection()(
        training_batch.old_logprobs, training_batch.sampler_logprobs, gap > -1
    )
    assert 1e-4 < (weights - 1).abs().mean() < 0.1
    exact = train(module(update=UpdateConfig(epochs_per_rollout=2)), batches("a")).logged_metrics
    assert exact["policy/sampler_mismatch"] < 1e-5


def test_the_logged_loss_does_not_depend_on_the_split():
    batch = prompt_batch("a", "hello there", "xyz")
    losses = []
    for size in (None, 1, 5):
        learning = UpdateConfig(epochs_per_rollout=2, micro_batch_size=size)
        grpo = module(update=learning, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
        runner = train(grpo, loader(batch))
        losses.append(float(runner.callback_metrics["policy/loss"]))
        assert abs(float(runner.callback_metrics["policy/advantage_mean"])) < 1e-5
    assert abs(losses[0]) > 1e-3  # the second epoch is not on-policy
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)


# --- non-finite numbers and OOM ---


def test_a_skipped_step_keeps_the_optimizer_state_and_training_continues():
    good, bad = Objective(), Broken(prompt=first_token("a"))
    seen = []

    class Now(GRPO):
        def training_step(self, prompts, batch_idx):
            self.learner.objective = bad if self.iteration == 1 else good
            output = super().training_step(prompts, batch_idx)
            state = self.optimizers().optimizer.state_dict()["state"]
            flat = torch.cat([p.detach().flatten() for p in self.policy.parameters()])
            seen.append((flat, state[0]["exp_avg"].clone(), float(state[0]["step"])))
            return output

    grpo = module(max_iterations=3, check_invariants=False)
    grpo.__class__ = Now
    train(grpo, batches("a", "hello there"))
    for second, first in zip(seen[1], seen[0], strict=True):
        assert torch.equal(torch.as_tensor(second), torch.as_tensor(first))
    assert not torch.equal(seen[2][0], seen[1][0])
    assert [step for *_, step in seen] == [1.0, 1.0, 2.0]


def test_weights_that_are_no_numbers_sample_without_a_crash_and_are_named(updates):
    grpo = module(check_invariants=False)
    next(grpo.policy.parameters()).data.fill_(torch.nan)
    train(grpo, batches("a", "hello there"))
    ((_, (report,)),) = updates
    assert report.skipped is not None
    assert set(report.skipped.values()) <= {"log-probability at sampling", "advantage"}
    assert grpo.iteration == 1


@dataclass(frozen=True)
class TightEngine(LocalEngine):
    """Memory suffices for eight rows."""

    def generate(self, requests):
        if requests.max_rows is None or requests.max_rows > 8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ...")
        return super().generate(requests)


@pytest.mark.filterwarnings("ignore:Out of memory with")
def test_oom_halves_the_rollout_and_keeps_the_completions():
    prompts = prompt_batch(*"abcdefgh")
    whole = sample_rollout(module(), prompts)
    grpo = module(engine=TightEngine())
    with pytest.warns(UserWarning, match="model.engine.max_rows = 8"):
        halved = sample_rollout(grpo, prompts)
    assert grpo.rollouter.row_limit.max_rows == 8
    assert torch.equal(whole.completion_ids, halved.completion_ids)


def test_lower_limits_are_part_of_the_checkpoint(tmp_path):
    first = module(
        objective=Tight(),
        engine=TightEngine(),
        update=UpdateConfig(micro_batch_size=4),
        check_invariants=False,
    )
    with (
        pytest.warns(UserWarning, match="model.update.micro_batch_size = 2"),
        pytest.warns(UserWarning, match="model.engine.max_rows = 8"),
    ):
        train(first, batches(*"abcd")).save_checkpoint(tmp_path / "a.ckpt")
    again = module(max_iterations=2, update=UpdateConfig(micro_batch_size=4))
    train(again, batches(*"abcd"), ckpt=tmp_path / "a.ckpt")
    assert again.iteration == 2
    assert (again.learner.row_limit.max_rows, again.rollouter.row_limit.max_rows) == (2, 8)


class Sevens(Scorer):
    """The place to override: what `combine` returns is what training, and all else, uses."""

    def combine(self, results, group_size, iteration):
        table = super().combine(results, group_size, iteration)
        return replace(table, total=torch.full_like(table.total, 7.0))


class OfSevens(GRPO):
    scorer_class = Sevens


def test_a_subclass_that_overrides_the_rewards_trains_on_them():
    grpo = OfSevens(
        "", [letters], group_size=GROUP, max_completion_length=LENGTH, check_invariants=False
    )
    grpo.policy = tiny_policy("qwen2")
    trainer = Trainer(
        max_epochs=-1, max_steps=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(grpo, loader(prompt_batch("a", "b"), 2))
    assert trainer.callback_metrics["reward/mean"] == 7
    assert 0 <= trainer.callback_metrics["reward/letters"] < 7


class Outputs(Callback):
    """Keeps what the last iteration returned."""

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        self.seen = outputs


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("source", [OnPolicy(), Ahead()])
def test_remax_compares_each_completion_with_the_greedy_one(group_size, source):
    batch = prompt_batch("a", "hello there", "xyz")
    remax = Objective(ReMax(), surrogate=PolicyGradient())
    settings = dict(objective=remax, group_size=group_size)
    grpo, outputs = module(**settings, source=source), Outputs()
    greedy = sample_rollout(grpo, batch, "val", group_size=1, sampling=Sampling(temperature=0.0))
    baseline = torch.tensor(letters([], greedy.completions)).double()

    data = PromptData(["a", "hello there", "xyz"], batch_size=3, shuffle=False)
    runner = train(grpo, data, callbacks=[outputs])

    rewards = outputs.seen["iteration"].rewards
    torch.testing.assert_close(rewards.greedy, baseline)
    expected = (rewards.total - baseline[:, None]).float()
    torch.testing.assert_close(outputs.seen["iteration"].advantages.float(), expected)
    assert expected.any()
    assert runner.callback_metrics["reward/greedy_mean"] == pytest.approx(float(baseline.mean()))
    generated = greedy.lengths.sum() + outputs.seen["iteration"].rollout.lengths.sum()
    assert runner.callback_metrics["perf/generated_tokens"] == generated


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(dynamic_sampling_attempts=2), "dynamic_sampling_attempts"),
        (dict(rewards={"letters": Reward(letters, normalize="group")}), "letters.normalize is"),
    ],
)
def test_a_greedy_baseline_needs_rewards_that_can_be_compared(settings, message):
    given = {"rewards": {"letters": Reward(letters)}} | settings
    with pytest.raises(ValueError, match=message):
        GRPO("", **given, objective=Objective(ReMax()))


def test_what_a_reward_logs_is_logged_and_budgets_are_in_the_checkpoint():
    def counts(completions, log_metric):
        log_metric("texts", len(completions))
        return [1.0] * len(completions)

    grpo = module(reward=counts, check_invariants=False)
    trainer = Trainer(
        max_epochs=-1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(grpo, loader(prompt_batch("a", "b"), 2))
    assert trainer.callback_metrics["reward/texts"] == 2 * GROUP
    checkpoint = {"state_dict": grpo.state_dict()}
    grpo.on_save_checkpoint(checkpoint)
    assert checkpoint["judges"] == {}
