"""Distillation on completions of the data in a part of the iterations."""

from dataclasses import replace

import pytest
import torch

from litgrpo.algorithms.advantages import ReMax
from litgrpo.algorithms.kl import KLInReward
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.terms import PositiveNLL
from litgrpo.callbacks.adaptive import EntropyTarget
from litgrpo.data.curriculum import Curriculum
from litgrpo.data.modules import PairData, PromptData
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.models.reference import FrozenReference
from litgrpo.rewards import Scoring
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.sources.data_completions import DataCompletions
from tests.support.models import byte_tokenizer, tiny_policy
from tests.support.raises import raises_for
from tests.support.training import module, train

ROWS = [
    {"prompt": "1+1?", "solution": "2"},
    {"prompt": "what is 3+14?", "solution": "17!"},
    {"prompt": "a", "solution": "b c"},
    {"prompt": "say xyz", "solution": "xyz, and more than six"},
]
LENGTH = 6
DISTILLING = Objective(reward_coef=0.0, kl_coef=1.0, kl_estimator="forward_kl")


def given(frac=0.0):
    return DataCompletions("solution", frac)


def distilling(frac=0.0, *, reference="the teacher", **settings):
    """A module that learns from a teacher, of which only some iterations sample."""
    defaults = {"objective": DISTILLING, "group_size": 1, "check_invariants": False}
    defaults |= {"scoring": Scoring(num_workers=0), "source": given(frac)}
    grpo = module(reference=reference, **defaults | settings)
    grpo.reference = FrozenReference(tiny_policy("qwen2", seed=1))
    return grpo


def data_of(rows=ROWS, **settings):
    return PromptData(rows, **{"batch_size": len(rows), "shuffle": False} | settings)


def seen_by(grpo, data, **trainer):
    """The result of `training_step`, and the metrics, of each iteration."""
    seen = []

    def keep(outputs, *_):
        metrics = {name: float(value) for name, value in grpo.trainer.callback_metrics.items()}
        seen.append((outputs, metrics))

    grpo.on_train_batch_end = keep
    train(grpo, data, **trainer)
    return seen


# --- an iteration on data ---


def test_the_gradient_is_that_of_the_divergence_at_the_tokens_of_the_data():
    """By transformers alone: the mean over the tokens of all solutions and their end tokens."""
    tokenizer, loss, tokens = byte_tokenizer(), 0.0, 0
    policy, teacher = tiny_policy("qwen2"), tiny_policy("qwen2", seed=1)
    for row in ROWS:
        prompt = tokenizer(row["prompt"]).input_ids
        ids = [*tokenizer(row["solution"], add_special_tokens=False).input_ids, 2][:LENGTH]
        whole, before = torch.tensor([prompt + ids]), len(prompt) - 1
        p, q = (
            each.model(whole).logits[0, before:-1].log_softmax(-1) for each in (policy, teacher)
        )
        loss, tokens = loss + (q.detach().exp() * (q.detach() - p)).sum(), tokens + len(ids)
    trained = list(policy.parameters())
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss / tokens, trained)])
    grpo = distilling(optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
    grpo.update = UpdateConfig(max_grad_norm=None, micro_batch_size=2)
    ((outputs, metrics),) = seen_by(grpo, data_of())
    start = torch.cat([p.flatten() for p in tiny_policy("qwen2").parameters()])
    moved = start - torch.cat([p.flatten() for p in grpo.policy.parameters()])
    assert (moved - expected).norm() < 1e-4 * expected.norm()
    assert metrics["policy/kl"] == pytest.approx(float(loss.detach() / tokens), rel=1e-4)
    assert outputs["iteration"].rollout.truncated.tolist() == [False, False, False, True]


def test_rows_of_data_have_the_log_probabilities_of_the_policy_and_no_entropy():
    grpo = distilling(max_iterations=2)
    first, second = seen_by(grpo, data_of())
    for outputs, metrics in (first, second):
        assert outputs["iteration"].rollout.completions[:3] == ["2", "17!", "b c"]
        assert metrics["data/on_policy"] == 0
        assert metrics["policy/sampler_mismatch"] == pytest.approx(0, abs=1e-6)
        assert metrics["perf/generated_tokens"] == 0
        assert "policy/entropy" not in metrics
    # A forward pass of the initial policy, over 2 + 4 + 4 + 6 tokens.
    rollout = first[0]["iteration"].rollout
    with torch.no_grad():
        expected = tiny_policy("qwen2").logprobs(rollout.tokens).logprobs
    torch.testing.assert_close(rollout.sampler_logprobs, expected)
    assert first[1]["policy/data_nll"] == pytest.approx(float(-expected.sum() / 16), rel=1e-5)


def test_several_steps_per_rollout_use_the_old_log_probabilities():
    update = UpdateConfig(epochs_per_rollout=2, num_mini_batches=2)
    (_, metrics), *_ = seen_by(distilling(update=update), data_of())
    assert metrics["policy/kl"] > 0
    assert abs(metrics["policy/log_ratio"]) > 0  # of the later steps


@pytest.mark.parametrize("chat", [False, True])
def test_the_tokens_are_those_of_supervised_fine_tuning(chat, tmp_path):
    tokenizer = byte_tokenizer()
    if chat:
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}"
        )
    tokenizer.save_pretrained(tmp_path)
    settings = {"tokenizer": str(tmp_path), "chat": chat}
    pairs = PairData(
        [{"prompt": row["prompt"], "completion": row["solution"]} for row in ROWS],
        **settings,
        batch_size=4,
    )
    pairs.setup("fit")
    grpo = distilling(max_completion_length=40)
    grpo.policy.tokenizer = tokenizer
    ((outputs, _),) = seen_by(grpo, data_of(**settings))
    rollout = outputs["iteration"].rollout
    prompts = zip(rollout.prompts.prompt_ids, rollout.prompts.prompt_mask, strict=True)
    found = [
        ids[mask].tolist() + completion
        for (ids, mask), completion in zip(prompts, rollout.token_lists(), strict=True)
    ]
    assert sorted(found) == sorted(pairs.sets["train"].ids)


def test_encoder_decoders_learn_from_data():
    grpo = module(
        "t5",
        objective=DISTILLING,
        reference="the teacher",
        group_size=1,
        source=given(),
        check_invariants=False,
    )
    grpo.reference = FrozenReference(tiny_policy("t5", seed=1))
    ((outputs, metrics),) = seen_by(grpo, data_of())
    assert metrics["policy/kl"] > 0
    assert outputs["iteration"].rollout.completions[0] == "2"


# --- which iterations ---


def test_the_share_of_iterations_that_sample_follows_the_fraction():
    for frac in (0.0, 0.3, 0.9):
        drawn = [given(frac).is_on_policy(seed=3, iteration=n) for n in range(4000)]
        assert sum(drawn) / 4000 == pytest.approx(frac, abs=0.03)
    one, two = ([given(0.5).is_on_policy(seed, n) for n in range(64)] for seed in (0, 1))
    assert one != two


def test_iterations_alternate_between_samples_and_data():
    grpo = distilling(0.5, max_iterations=6, check_invariants=True)
    seen = seen_by(grpo, data_of())
    sampled = [given(0.5).is_on_policy(grpo.seed, n) for n in range(6)]
    assert {*sampled} == {True, False}
    assert [bool(metrics["data/on_policy"]) for _, metrics in seen] == sampled
    for (outputs, metrics), was_sampled in zip(seen, sampled, strict=True):
        assert (outputs["iteration"].rollout.completions[:3] == ["2", "17!", "b c"]) != was_sampled
        assert metrics["policy/kl"] > 0


def weights_of(grpo):
    return {name: value.clone() for name, value in grpo.policy.state_dict().items()}


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path):
    def run(iterations, ckpt=None):
        grpo = distilling(0.5, max_iterations=iterations)
        runner = train(grpo, data_of(batch_size=2, shuffle=True), ckpt)
        return grpo, runner

    whole, _ = run(5)
    first, runner = run(2)
    runner.save_checkpoint(tmp_path / "two.ckpt")
    resumed, _ = run(5, tmp_path / "two.ckpt")
    expected = weights_of(whole)
    assert not all(torch.equal(value, expected[name]) for name, value in weights_of(first).items())
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(resumed).items())


# --- what does not fit ---


def with_objective(**changes):
    return {"objective": replace(DISTILLING, **changes)}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (with_objective(reward_coef=1.0), "model.objective.reward_coef"),
        (with_objective(kl_estimator="k3"), "model.objective.kl_estimator"),
        ({"group_size": 2}, "model.group_size"),
        ({"sampling": Sampling(top_k=5)}, "model.sampling.top_k"),
        (with_objective(kl_in_reward=KLInReward(0.1)), "model.objective.kl_in_reward"),
        (with_objective(positive_nll=PositiveNLL(0.1)), "model.objective.positive_nll"),
        (with_objective(advantages=ReMax()), "model.objective.advantages"),
        ({"dynamic_sampling_attempts": 2}, "model.dynamic_sampling_attempts"),
    ],
)
def test_options_that_need_sampled_completions_are_rejected(settings, named):
    with raises_for("model.source is DataCompletions", named):
        distilling(**settings)


def test_an_entropy_target_needs_sampled_completions():
    with raises_for("EntropyTarget", "model.source is DataCompletions"):
        EntropyTarget(target=0.5).setup(None, distilling(), "fit")


def test_a_fraction_of_all_iterations_is_rejected():
    for frac in (-0.1, 1.0):
        with raises_for("model.source.on_policy_frac", str(frac)):
            DataCompletions("solution", frac)


@pytest.mark.parametrize("value", ["", None, 7, ["b"]])
def test_a_prompt_without_a_completion_is_rejected_before_training(value):
    with raises_for("model.source.column", "value 1"):
        train(distilling(), data_of([ROWS[0], {"prompt": "b", "solution": value}]))


def test_a_missing_column_is_named_with_those_that_are_there():
    grpo = distilling(source=DataCompletions("solutoin"))
    with raises_for("solutoin", "did you mean", "solution"):
        train(grpo, data_of())


def test_a_curriculum_is_rejected():
    with raises_for("data.curriculum"):
        train(distilling(), data_of(curriculum=Curriculum()))
