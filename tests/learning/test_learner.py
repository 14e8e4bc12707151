"""The learner without a trainer: gradients, skipped steps, OOM, tokens of an environment."""

import contextlib
import gc
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from litgrpo.algorithms.advantages import Normalized, OptimalTokenBaseline
from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.kl import KLInReward
from litgrpo.algorithms.objective import RATIO_MAX, Objective
from litgrpo.algorithms.surrogates import M2PO, KLCov
from litgrpo.algorithms.terms import PositiveNLL
from litgrpo.distributed.collectives import SingleProcess
from litgrpo.distributed.device import backend
from litgrpo.distributed.memory import free_memory, is_out_of_memory
from litgrpo.learning.static_batches import StaticBatches
from litgrpo.learning.steppers import PlainStepper, list_parameters
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.metrics import (
    SumsAndCounts,
    average_over_ranks,
    completion_advantages,
)
from litgrpo.models.loading.load import LoRA, Precision, build_policy
from litgrpo.models.reference import FrozenReference
from litgrpo.rollout.sampling import Sampling
from litgrpo.types import RewardTable, RolloutLogprobs, StepReport
from tests.learning.parts import (
    GROUP,
    ONE_PASS,
    build_training_batch,
    gradient_of,
    learner_of,
    letters,
    recording,
    rewards_of,
    rollouter_of,
)
from tests.support.algorithms import PUBLISHED
from tests.support.by_hand import with_observations
from tests.support.comms import Twins, in_turns
from tests.support.learner import Broken, Tight, first_token
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy

BATCH = ("a", "hello there", "xyz")
STATIC = StaticBatches(backend(torch.device("cpu")))


def difference(one, other):
    """Norm of the difference of two gradients over the norm of the second."""
    return float((one - other).norm() / other.norm())


# --- the gradient ---


def test_the_gradient_is_that_of_the_papers_formula(architecture):
    batch, policy = prompt_batch(*BATCH), tiny_policy(architecture)
    rollout = rollouter_of(policy).generate(batch, "train")
    learner = learner_of(policy, Objective(loss_aggregation="sequence_mean"))
    got = gradient_of(learner, learner.build_batch(rollout, rewards_of(rollout), RolloutLogprobs()))

    # DeepSeekMath, equation 3 on-policy: mean over completions of the mean over tokens of A log p.
    policy, loss = tiny_policy(architecture), torch.zeros(())
    for prompt in range(len(batch)):
        rows = range(prompt * GROUP, (prompt + 1) * GROUP)
        rewards = torch.tensor(letters([], [rollout.completions[row] for row in rows]))
        for row, reward in zip(rows, rewards, strict=True):
            said = rollout.completion_ids[row][rollout.completion_mask[row]][None]
            ids = batch.prompt_ids[prompt][batch.prompt_mask[prompt]][None]
            logits = policy.dense_logits(ids, torch.ones_like(ids, dtype=torch.bool), said)
            logprobs = logits[0, :-1].log_softmax(-1).gather(-1, said[0][:, None])
            advantage = (reward - rewards.mean()) / (rewards.std() + 1e-4)
            loss = loss - advantage * logprobs.mean() / (len(batch) * GROUP)
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert expected.norm() > 0
    assert difference(got, expected) < 1e-5


LIMITS = [
    dict(micro_batch_size=1),
    dict(micro_batch_size=2),
    dict(micro_batch_size=5),
    dict(micro_batch_tokens=40),
]
OBJECTIVES = {
    "plain": Objective(),
    "kl": Objective(kl_coef=0.1),
    "entropy": Objective(entropy_coef=0.1, top_entropy_quantile=0.4),
    "selected": Objective(surrogate=KLCov(frac=0.3)),
    "imitation": Objective(positive_nll=PositiveNLL(0.5, min_reward=0.3)),
    "kl in reward": Objective(kl_in_reward=KLInReward(0.5, "k3")),
    "dropped": Objective(surrogate=M2PO(max_second_moment=0.01), top_entropy_quantile=0.6),
}


def build_case(kind, objective, **settings):
    """A learner, and what it learns from after the policy has moved."""
    reference = FrozenReference(tiny_policy(kind, seed=5)) if objective.needs_reference else None
    learner = learner_of(tiny_policy(kind), objective, reference=reference, **settings)
    training_batch = build_training_batch(learner, prompt_batch(*BATCH))
    weights = training_batch.loss_weights
    noise = torch.linspace(-0.3, 0.3, weights.numel()).view_as(weights)
    return learner, replace(training_batch, old_logprobs=training_batch.sampler_logprobs + noise)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kind", ["qwen2", "t5"])
def test_the_gradient_does_not_depend_on_micro_batches_ragged_or_static(name, kind):
    learner, training_batch = build_case(kind, OBJECTIVES[name])
    learner.policy.double()  # T5's scores are not scaled: in float32 they round to more than 1e-5
    expected = gradient_of(learner, training_batch)
    for limits in LIMITS:
        config = replace(ONE_PASS, **limits)
        for batching in (learner.micro_batching, STATIC):
            other = replace(learner, update_config=config, micro_batching=batching)
            assert difference(gradient_of(other, training_batch), expected) < 1e-5


def test_log_probabilities_before_an_update_are_without_dropout():
    # The last update leaves the policy in train mode, and stored rollouts are not sampled.
    learner = learner_of(tiny_policy("qwen2"))
    rollout = rollouter_of(learner.policy).generate(prompt_batch("a", "hello there"), "train")
    for compute in (learner.old_and_reference_logprobs, learner.add_policy_logprobs):
        learner.policy.train()
        compute(rollout)
        assert not learner.policy.training


def test_rows_without_gradient_are_skipped_and_the_gradient_stays(monkeypatch):
    learner, training_batch = build_case("qwen2", Objective())
    half = torch.arange(len(training_batch))[:, None] % 2
    training_batch = replace(training_batch, advantages=training_batch.advantages * half)
    skipped = gradient_of(learner, training_batch)
    monkeypatch.setattr(Objective, "needs", {"all_rows"})
    assert difference(skipped, gradient_of(learner, training_batch)) < 1e-5


def test_equal_rewards_leave_the_gradient_at_zero():
    learner = learner_of(tiny_policy("qwen2"))
    always_half = lambda prompts, completions: [0.5 for _ in completions]  # noqa: E731
    gradient = gradient_of(
        learner, build_training_batch(learner, prompt_batch(*BATCH), always_half)
    )
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_the_gradient_is_clipped_and_its_norm_is_that_before():
    learner, training_batch = build_case("qwen2", Objective())
    norm = float(gradient_of(learner, training_batch).norm())
    clipped = replace(learner, update_config=replace(ONE_PASS, max_grad_norm=norm / 2))
    stepper = recording(learner.policy)
    report = clipped.take_optimizer_step(training_batch, stepper)
    assert float(stepper.optimizer.seen[0].norm()) == pytest.approx(norm / 2, rel=1e-4)
    assert report.sums["optim/grad_norm"].tolist() == pytest.approx([norm, 1.0], rel=1e-5)


def test_two_processes_that_hold_the_same_have_the_gradient_of_one():
    learner, training_batch = build_case("qwen2", Objective())
    alone = learner.take_optimizer_step(training_batch, recording(learner.policy)).sums[
        "policy/loss"
    ]
    expected = gradient_of(learner, training_batch)
    # Their weights are half as large; gradients are averaged, so each has its own twice.
    twins = replace(learner, comm=Twins())
    halved = replace(training_batch, loss_weights=training_batch.loss_weights / 2)
    assert difference(gradient_of(twins, halved), expected) < 1e-6
    both = twins.take_optimizer_step(halved, recording(learner.policy)).sums["policy/loss"]
    torch.testing.assert_close(both, alone)


# --- log-probabilities before the update ---


def test_old_logprobs_are_needed_for_several_steps_only():
    policy = tiny_policy("qwen2")
    rollout = rollouter_of(policy).generate(prompt_batch(*BATCH), "train")
    for config, needed in [
        (UpdateConfig(), False),
        (UpdateConfig(epochs_per_rollout=2), True),
        (UpdateConfig(num_mini_batches=2), True),
    ]:
        reused = learner_of(policy, update_config=config).old_and_reference_logprobs(rollout)
        assert (reused.old is rollout.sampler_logprobs) == needed
        assert reused.ref is None
        computed = learner_of(policy, update_config=config, reuse_sampler_logprobs=False)
        fresh = computed.old_and_reference_logprobs(rollout).old
        assert (fresh is not None) == needed
        if needed:
            assert fresh is not rollout.sampler_logprobs
            torch.testing.assert_close(fresh, rollout.sampler_logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=0, top_k=5)])
def test_old_logprobs_of_greedy_completions_are_those_of_the_policy(sampling):
    policy = tiny_policy("qwen2")
    rollout = rollouter_of(policy, sampling=sampling).generate(prompt_batch(*BATCH), "train")
    for reuse in (True, False):
        learner = learner_of(
            policy,
            update_config=UpdateConfig(epochs_per_rollout=2),
            sampling=sampling,
            reuse_sampler_logprobs=reuse,
        )
        old = learner.old_and_reference_logprobs(rollout).old
        mask = rollout.loss_mask
        torch.testing.assert_close(old[mask], rollout.sampler_logprobs[mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(top_k=5)])
@pytest.mark.parametrize("architecture", ["qwen2", "t5"])
def test_norms_of_scores_are_computed_before_the_update_if_advantages_need_them(
    architecture, sampling
):
    policy = tiny_policy(architecture)
    rollout = rollouter_of(policy, sampling=sampling).generate(prompt_batch(*BATCH), "train")
    tokens, mask = rollout.tokens, rollout.loss_mask
    found = {}
    for name, batching, limit in (
        ("whole", None, None),
        ("micro-batches", None, 3),
        ("static", STATIC, 3),
    ):
        config = UpdateConfig(micro_batch_size=limit)
        given = {} if batching is None else {"micro_batching": batching}
        learner = learner_of(
            policy, Objective(OptimalTokenBaseline()), config, sampling=sampling, **given
        )
        policy.static_shapes = batching is not None
        logprobs = learner.old_and_reference_logprobs(rollout)
        assert logprobs.old is None
        found[name] = logprobs.score_norms
        assert not found[name][~mask].any()
    policy.static_shapes = False
    # |e - p|^2 of the distribution p that a token was drawn from
    hidden = policy.hidden(tokens)
    probs = (policy.head(hidden).float() / sampling.policy_temperature).softmax(-1)
    if tokens.candidate_ids is not None:
        ids = tokens.candidate_ids[mask].long()
        kept = torch.zeros_like(probs, dtype=torch.bool)
        kept = kept.scatter(1, ids.clamp(min=0), True) & (probs > 0)
        probs = probs.where(kept, 0.0) / probs.where(kept, 0.0).sum(1, keepdim=True)
    of_token = torch.nn.functional.one_hot(rollout.completion_ids[mask], probs.shape[1])
    expected = (of_token - probs).square().sum(1).detach()
    for name in found:
        torch.testing.assert_close(found[name][mask], expected, atol=1e-5, rtol=1e-4)
    assert learner_of(policy).old_and_reference_logprobs(rollout).score_norms is None


def test_a_ratio_to_the_sampler_needs_no_pass_before_the_update():
    policy = tiny_policy("qwen2")
    rollout = rollouter_of(policy).generate(prompt_batch(*BATCH), "train")
    learner = learner_of(
        policy,
        Objective(old_policy="sampler"),
        update_config=UpdateConfig(epochs_per_rollout=2),
        reuse_sampler_logprobs=False,
    )
    assert learner.old_and_reference_logprobs(rollout).old is None


def test_reference_logprobs_are_the_references_own():
    policy, other = tiny_policy("qwen2"), tiny_policy("qwen2", seed=5)
    rollout = rollouter_of(policy).generate(prompt_batch(*BATCH), "train")
    learner = learner_of(policy, Objective(kl_coef=0.1), reference=FrozenReference(other))
    found = learner.old_and_reference_logprobs(rollout).ref
    expected = learner_of(other).logprobs(rollout.tokens).logprobs
    torch.testing.assert_close(found, expected.detach())
    assert not torch.allclose(found, rollout.sampler_logprobs)


def test_truncated_sampling_is_learned_over_the_tokens_that_were_left():
    sampling = Sampling(temperature=0.9, top_k=4)
    learner = learner_of(tiny_policy("qwen2"), sampling=sampling)
    training_batch = build_training_batch(learner, prompt_batch(*BATCH))
    assert training_batch.tokens.candidate_ids is not None
    found = learner.logprobs(training_batch.tokens).logprobs
    torch.testing.assert_close(
        found.detach(), training_batch.sampler_logprobs, atol=1e-5, rtol=1e-5
    )


def test_how_far_the_sampler_is_from_the_policy_is_measured_before_the_policy_moves():
    learner, training_batch = build_case(
        "qwen2", Objective(importance_correction=ImportanceCorrection())
    )
    learner = replace(learner, update_config=UpdateConfig(epochs_per_rollout=2))
    off = replace(training_batch, sampler_logprobs=training_batch.sampler_logprobs - 0.25)
    first, second = learner.update(off, recording(learner.policy))
    total, count = first.sums["policy/sampler_mismatch"]
    rows = (training_batch.advantages != 0).any(1)
    assert float(total / count) == pytest.approx(0.25, abs=1e-4)
    assert count == training_batch.loss_mask[rows].sum()
    assert "policy/sampler_mismatch" not in second.sums


# --- several steps ---


def test_the_ratio_is_one_in_the_first_step_and_moves_after_it():
    config = UpdateConfig(epochs_per_rollout=2, num_mini_batches=3)
    learner = learner_of(tiny_policy("qwen2"), update_config=config)
    training_batch = build_training_batch(learner, prompt_batch(*BATCH))
    optimizer = torch.optim.SGD(learner.policy.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    reports = learner.update(training_batch, PlainStepper(optimizer, scheduler))
    assert [report.lr for report in reports] == pytest.approx([0.1 / n for n in range(1, 7)])
    ratios = [float(report.sums["policy/log_ratio"][0]) for report in reports]
    assert ratios[0] == pytest.approx(0.0, abs=1e-4)
    assert all(abs(ratio) > 1e-3 for ratio in ratios[3:])


def test_weights_are_made_for_each_optimizer_step():
    objective = Objective(loss_aggregation="sequence_mean")
    learner = learner_of(tiny_policy("qwen2"), objective, UpdateConfig(num_mini_batches=3))
    training_batch = build_training_batch(learner, prompt_batch(*BATCH))
    per_row = training_batch.loss_weights.sum(1)
    torch.testing.assert_close(per_row, torch.full((3 * GROUP,), 1 / GROUP))


def test_groups_without_variance_leave_the_denominators_of_their_step_if_excluded():
    objective = Objective(
        Normalized(scale="none"),
        advantage_clip=0.25,
        loss_aggregation="sequence_mean",
        exclude_zero_variance=True,
    )
    learner = learner_of(tiny_policy("qwen2"), objective)
    rollout = rollouter_of(learner.policy).generate(prompt_batch(*BATCH), "train")
    total = torch.zeros(3, GROUP).double()
    total[0, 0], total[2, 0] = 1.0, -2.0  # the second group has no variance
    rewards = RewardTable({"r": total}, {"r": 1.0}, total, torch.ones_like(total).bool())

    training_batch = learner.build_batch(
        rollout, rewards, learner.old_and_reference_logprobs(rollout)
    )

    per_row = training_batch.loss_weights.sum(1).view(3, GROUP)
    expected = torch.tensor([1.0, 0.0, 1.0]) / (2 * GROUP)
    torch.testing.assert_close(per_row, expected[:, None].expand(3, GROUP))
    assert training_batch.advantages.abs().max() == 0.25


# --- a number that is not finite ---


@pytest.mark.parametrize(
    ("kind", "value"), [("loss", float("nan")), ("loss", float("inf")), ("gradient", 0.0)]
)
@pytest.mark.parametrize("static", [False, True])
def test_one_bad_micro_batch_leaves_weights_and_moments_bitwise(kind, value, static):
    objective = Broken(prompt=first_token("hello there"), kind=kind, value=value)
    learner = learner_of(
        tiny_policy("qwen2"), objective, UpdateConfig(micro_batch_size=1, num_mini_batches=3)
    )
    learner = replace(learner, micro_batching=STATIC) if static else learner
    training_batch = build_training_batch(learner, prompt_batch(*BATCH))
    optimizer = torch.optim.AdamW(learner.policy.parameters(), lr=1e-2)
    seen = []

    class Watched(PlainStepper):
        def step(self, finish):
            result = super().step(finish)
            moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
            weights = [p.detach().clone() for p in learner.policy.parameters()]
            seen.append((weights, moments))
            return result

    reports = learner.update(training_batch, Watched(optimizer))
    first, second, third = ([tensor for part in each for tensor in part] for each in seen)
    assert [report.skipped is None for report in reports] == [True, False, True]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(seen[1][1], seen[2][1], strict=True))
    # Rows 4 to 7 were asked the second prompt; those without advantage need not be named.
    assert set(reports[1].skipped) <= {4, 5, 6, 7}
    assert set(reports[1].skipped.values()) == {kind}
    assert not reports[1].sums
    assert third


@pytest.mark.parametrize(
    ("field", "name"),
    [("advantages", "advantage"), ("sampler_logprobs", "log-probability at sampling")],
)
def test_a_bad_number_of_the_rollout_is_named(field, name):
    learner, training_batch = build_case("qwen2", Objective())
    values = getattr(training_batch, field).clone()
    values[5, 0] = torch.nan
    stepper = recording(learner.policy)
    report = learner.take_optimizer_step(replace(training_batch, **{field: values}), stepper)
    assert report.skipped == {5: name}
    assert stepper.optimizer.seen == [None]


def test_a_row_outside_of_the_loss_is_not_named():
    learner, training_batch = build_case("qwen2", Objective())
    values = training_batch.sampler_logprobs.clone()
    values[[2, 5], 0] = torch.nan
    weights = training_batch.loss_weights.clone()
    weights[2] = 0.0
    broken = replace(training_batch, sampler_logprobs=values, loss_weights=weights)
    report = learner.take_optimizer_step(broken, recording(learner.policy))
    assert report.skipped == {5: "log-probability at sampling"}


def test_a_bad_number_is_named_if_a_weight_has_no_gradient():
    learner, training_batch = build_case("qwen2", Objective())
    learner.policy.model.register_parameter("unused", torch.nn.Parameter(torch.ones(1)))
    values = training_batch.advantages.clone()
    values[5, 0] = torch.nan
    report = learner.take_optimizer_step(
        replace(training_batch, advantages=values), recording(learner.policy)
    )
    assert report.skipped == {5: "advantage"}


def test_a_process_drops_its_step_when_the_number_is_another_ones():
    class Other(Twins):
        def sum(self, value):
            return value + 1

    learner, training_batch = build_case("qwen2", Objective())
    stepper = recording(learner.policy)
    report = replace(learner, comm=Other()).take_optimizer_step(training_batch, stepper)
    assert report.skipped == {}
    assert stepper.optimizer.seen == [None]


# --- memory ---


class FailsAt(TorchDispatchMode):
    """Runs out of memory at the operator of this number."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **(kwargs or {}))


def count_tensors_of_graphs():
    """Tensors in memory that belong to a graph of autograd."""
    free_memory()
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return sum(each.grad_fn is not None for each in tensors)


@pytest.fixture
def few_objects():
    """What other tests have left is neither collected nor counted, which would take seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*")
@pytest.mark.parametrize("kind", ["all weights", "checkpointing", "adapters", "bfloat16"])
@pytest.mark.parametrize("model_type", ["gemma2", "qwen2", "llama", "gpt2", "t5"])
def test_a_pass_that_runs_out_of_memory_leaves_no_tensor_behind(model_type, kind):
    precision = Precision(
        gradient_checkpointing=kind == "checkpointing",
        autocast_dtype="bfloat16" if kind == "bfloat16" else None,
    )
    lora = LoRA(rank=2) if kind == "adapters" else None
    policy = build_policy(tiny_model(model_type), byte_tokenizer(), precision=precision, lora=lora)
    learner = learner_of(policy, Objective())
    tokens = rollouter_of(policy).generate(prompt_batch(*BATCH), "train").tokens

    def run(number):
        with contextlib.suppress(torch.OutOfMemoryError), FailsAt(number) as mode:
            learner.logprobs(tokens).logprobs.sum().backward()
        return mode.left

    limit = 10**6
    run(limit)  # the first pass also tries kernels
    used = limit - run(limit)
    before = count_tensors_of_graphs()
    for number in range(used // 12, used, used // 6):  # in the forward and the backward pass
        assert run(number) == 0
        assert count_tensors_of_graphs() == before, f"operator {number} of {used}"


def test_an_optimizer_state_that_does_not_fit_says_what_to_do():
    learner, training_batch = build_case("qwen2", Objective())

    class Full(PlainStepper):
        def step(self, clip_gradients):
            clip_gradients(list_parameters(self.optimizer))
            raise torch.OutOfMemoryError("CUDA out of memory")

    stepper = Full(torch.optim.AdamW(learner.policy.parameters()))
    with pytest.raises(RuntimeError, match=r"optimizer step.*model\.lora") as raised:
        learner.take_optimizer_step(training_batch, stepper)
    assert not is_out_of_memory(raised.value)  # no attempt repeats it


def test_short_memory_halves_the_micro_batch_and_keeps_the_gradient():
    learner, training_batch = build_case("qwen2", Objective())
    whole = gradient_of(learner, training_batch)
    tight, _ = build_case("qwen2", Tight(), update_config=replace(ONE_PASS, micro_batch_size=5))
    said = "model.update.micro_batch_size = 2"
    with pytest.warns(UserWarning, match=said):
        found = gradient_of(tight, training_batch)
    assert difference(found, whole) < 1e-6
    assert tight.row_limit.max_rows == 2
    gradient_of(tight, training_batch)  # begins with two rows, so there is no further warning


@pytest.mark.filterwarnings("ignore:Out of memory")
def test_the_gradient_of_an_attempt_that_ran_out_of_memory_is_dropped():
    calls = []

    @dataclass(frozen=True)
    class Late(Objective):
        """Memory runs out once, after the first micro-batch has added its gradient."""

        def loss(self, new, training_batch):
            calls.append(len(training_batch))
            if len(calls) == 2:
                raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")
            return super().loss(new, training_batch)

    learner, training_batch = build_case("qwen2", Objective())
    late, _ = build_case("qwen2", Late(), update_config=replace(ONE_PASS, micro_batch_size=4))
    assert (
        difference(gradient_of(late, training_batch), gradient_of(learner, training_batch)) < 1e-6
    )
    assert len(calls) > 4


@pytest.mark.filterwarnings("ignore:Out of memory")
def test_memory_too_short_for_one_row_says_what_to_do():
    @dataclass(frozen=True)
    class TooTight(Objective):
        def loss(self, new, training_batch):
            raise torch.OutOfMemoryError("out of memory")

    learner, training_batch = build_case("qwen2", TooTight())
    message = "model.update.micro_batch_size.*gradient_checkpointing"
    with pytest.raises(RuntimeError, match=message):
        gradient_of(learner, training_batch)


def test_several_processes_repeat_their_step_together():
    learner, training_batch = build_case("qwen2", Tight())
    with pytest.warns(UserWarning, match="model.update.micro_batch_size"):
        gradient_of(replace(learner, comm=Twins()), training_batch)


def test_short_memory_before_the_update_changes_no_number():
    policy = tiny_policy("qwen2")
    rollout = rollouter_of(policy).generate(prompt_batch(*BATCH), "train")
    other = FrozenReference(tiny_policy("qwen2", seed=5))
    learner = learner_of(policy, Objective(kl_coef=0.1), reference=other)
    expected = learner.old_and_reference_logprobs(rollout).ref
    ask = other.policy.logprobs

    def tight(rows, **how):
        if len(rows) > 3:
            raise MemoryError
        return ask(rows, **how)

    other.policy.logprobs = tight
    with pytest.warns(UserWarning, match="model.update.micro_batch_size"):
        found = learner.old_and_reference_logprobs(rollout).ref
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert learner.row_limit.max_rows == 2


# --- tokens of an environment ---


TURNS = {
    **PUBLISHED,
    "entropy": Objective(entropy_coef=0.1, top_entropy_quantile=0.5),
    "gamma": Objective(gamma=0.8),
    "correction": Objective(importance_correction=ImportanceCorrection("sequence")),
}


@pytest.mark.parametrize("name", TURNS)
def test_only_tokens_of_the_policy_are_learned_from(name):
    """The gradient by log-probabilities is 0 on observations, for any log-probabilities."""
    objective = TURNS[name]
    reference = FrozenReference(tiny_policy("qwen2", seed=5)) if objective.needs_reference else None
    config = UpdateConfig(epochs_per_rollout=2, micro_batch_size=5)
    learner = learner_of(tiny_policy("qwen2"), objective, config, reference=reference)
    rollout = rollouter_of(learner.policy).generate(prompt_batch(*BATCH), "train")
    mask = rollout.completion_mask.clone()
    mask[mask.sum(1) > 3, 2] = False
    said = rollout.completion_mask & ~mask
    assert said.any()
    silent = rollout.sampler_logprobs.masked_fill(~mask, 0.0)
    rollout = replace(with_observations(rollout, mask), sampler_logprobs=silent)
    training_batch = learner.build_batch(
        rollout, rewards_of(rollout), learner.old_and_reference_logprobs(rollout)
    )
    assert not training_batch.loss_weights[said].any()
    assert not training_batch.advantages[said].any()
    assert torch.equal(rollout.lengths, mask.sum(1))

    # The policy's own log-probabilities there may be anything.
    ask, moved = learner.policy.logprobs, []

    def strange(rows, **how):
        new, of = ask(rows, **how), rows.completion_mask
        where = torch.zeros_like(of)
        where[of.sum(1) > 3, 2] = True
        moved.append(int(where.sum()))
        shift = where * 7.0 * rows.completion_ids.sign()
        return replace(new, logprobs=new.logprobs + shift, entropy=new.entropy + shift)

    expected = gradient_of(learner, training_batch)
    report = learner.take_optimizer_step(training_batch, recording(learner.policy))
    learner.policy.logprobs = strange
    other_values = {
        field: getattr(training_batch, field).masked_fill(said, -2.5)
        for field in ("sampler_logprobs", "old_logprobs", "ref_logprobs")
        if getattr(training_batch, field) is not None
    }
    strange_batch = replace(training_batch, **other_values)
    assert torch.equal(gradient_of(learner, strange_batch), expected)
    assert sum(moved) > 0
    again = learner.take_optimizer_step(strange_batch, recording(learner.policy))
    assert again.sums.keys() == report.sums.keys()
    for key, value in report.sums.items():
        assert torch.equal(again.sums[key], value), key


def test_all_ranks_count_in_selections_and_cross_entropies():
    imitation = PositiveNLL(0.5, min_reward=-1.0)
    learner = learner_of(tiny_policy("qwen2"), Objective(positive_nll=imitation))
    rollout = rollouter_of(learner.policy).generate(prompt_batch(*BATCH), "train")
    rewards, num_tokens = rewards_of(rollout), int(rollout.loss_mask.sum())
    # 1.5 of the tokens of a rank: one token; of two equal ranks three, which are two of each.
    selecting = Objective(surrogate=KLCov(frac=1.5 / num_tokens), positive_nll=imitation)
    learner = replace(learner, objective=selecting)

    counts, weights = [], []
    for comm in (SingleProcess(), Twins()):
        each = replace(learner, comm=comm)
        rows = each.build_batch(rollout, rewards, RolloutLogprobs())
        weights.append(rows.term_weights)
        counts.append(int(each.prepare_step(rows).selected.sum()))

    assert counts == [1, 2]
    torch.testing.assert_close(weights[1], weights[0] / 2)
    torch.testing.assert_close(weights[0].sum(), torch.tensor(1.0))


def test_observations_have_the_gradient_of_their_cross_entropy():
    objective = Objective(observation_nll_coef=0.3, positive_nll=PositiveNLL(0.2, min_reward=0.3))
    config = UpdateConfig(micro_batch_size=5, max_grad_norm=None)
    learner = learner_of(tiny_policy("qwen2"), objective, config)
    rollout = rollouter_of(learner.policy).generate(prompt_batch(*BATCH), "train")
    said = torch.zeros_like(rollout.completion_mask)
    said[:, 2] = rollout.completion_mask[:, 2]
    mask, rewards = rollout.completion_mask & ~said, rewards_of(rollout)
    silent = rollout.sampler_logprobs.masked_fill(said, 0.0)
    rollout = replace(with_observations(rollout, mask), sampler_logprobs=silent)
    plain = replace(learner, objective=Objective())
    both, alone = (
        gradient_of(each, each.build_batch(rollout, rewards, RolloutLogprobs()))
        for each in (learner, plain)
    )

    policy = tiny_policy("qwen2").train()
    correct = (rewards.total.flatten() >= 0.3)[:, None] & mask
    logprobs = policy.logprobs(replace(rollout.tokens, predicted=None)).logprobs
    (-0.3 * logprobs[said].mean() - 0.2 * logprobs[correct].mean()).backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert said.any()
    assert 0 < correct.sum() < mask.sum()
    assert difference(both - alone, expected) < 1e-4


def test_the_kl_in_the_reward_lowers_the_advantage_of_what_the_reference_finds_unlikely():
    reference = FrozenReference(tiny_policy("qwen2", seed=5))
    option = KLInReward(coef=0.5)
    learner = learner_of(
        tiny_policy("qwen2"),
        Objective(Normalized("none", "none"), kl_in_reward=option),
        reference=reference,
    )
    rollout = rollouter_of(learner.policy).generate(prompt_batch(*BATCH), "train")
    logprobs, rewards = learner.old_and_reference_logprobs(rollout), rewards_of(rollout)

    found = learner.build_batch(rollout, rewards, logprobs)

    gap = torch.where(rollout.loss_mask, rollout.sampler_logprobs - logprobs.ref, 0.0)
    expected = rewards.total.flatten() - 0.5 * gap.sum(1).double()
    torch.testing.assert_close(found.advantages[:, 0].double(), expected, rtol=1e-5, atol=1e-6)
    assert gap.abs().sum() > 0
    total, count = learner.reward_kl_stats(rollout, logprobs)["policy/kl_in_reward"]
    torch.testing.assert_close(total / count, gap.sum() / rollout.loss_mask.sum())


def test_the_kl_in_the_reward_of_a_stale_rollout_is_that_of_the_policy_before_the_update():
    stale, policy = tiny_policy("qwen2", seed=7), tiny_policy("qwen2")
    rollout = rollouter_of(stale).generate(prompt_batch(*BATCH), "train")
    objective = Objective(Normalized("none", "none"), kl_in_reward=KLInReward(coef=0.5))
    rewards, mask = rewards_of(rollout), rollout.loss_mask
    with torch.no_grad():
        of_policy = policy.logprobs(rollout.tokens).logprobs

    for changes in ({"importance_correction": ImportanceCorrection()}, {"old_policy": "sampler"}):
        learner = learner_of(
            policy,
            replace(objective, **changes),
            reference=FrozenReference(tiny_policy("qwen2", seed=5)),
        )
        learner.reuse_sampler_logprobs = False
        logprobs = learner.old_and_reference_logprobs(rollout)
        found = learner.build_batch(rollout, rewards, logprobs)

        gap = torch.where(mask, of_policy - logprobs.ref, 0.0)
        expected = rewards.total.flatten() - 0.5 * gap.sum(1).double()
        torch.testing.assert_close(found.advantages[:, 0].double(), expected, rtol=1e-4, atol=1e-4)
        total, count = learner.reward_kl_stats(rollout, logprobs)["policy/kl_in_reward"]
        torch.testing.assert_close(total / count, gap.sum() / mask.sum(), rtol=1e-4, atol=1e-4)
        assert found.old_logprobs is None  # one optimizer step: the ratio stays exactly 1


CPU = torch.device("cpu")


def pair(total, count):
    return torch.tensor([float(total), float(count)])


def test_an_average_counts_tokens_and_not_micro_batches():
    totals = SumsAndCounts()
    totals.add({"kl": pair(10, 1)})
    totals.add({"kl": pair(2, 3)})
    assert totals.averages(SingleProcess(), CPU)["kl"] == 3  # 12 / 4, no mean of 10 and 2 / 3


def test_sums_of_many_micro_batches_do_not_lose_small_ones():
    totals = SumsAndCounts()
    for number in (2**24, 1, 1, 1):
        totals.add({"tokens": pair(number, number)})
    assert totals.sums["tokens"].tolist() == [2**24 + 3, 2**24 + 3]


def test_the_largest_ratio_of_all_micro_batches_is_kept():
    totals = SumsAndCounts()
    for ratio in (1.5, 3.0, 0.5):
        totals.add({RATIO_MAX: pair(ratio, 1)})
    assert totals.averages(SingleProcess(), CPU)[RATIO_MAX] == 3.0


def test_an_average_over_processes_weighs_each_by_what_it_counted():
    def process(total, count):
        def mean(comm):
            totals = SumsAndCounts()
            totals.add({"kl": pair(total, count)})
            return totals.averages(comm, CPU)["kl"]

        return mean

    assert [float(each) for each in in_turns(process(10, 1), process(2, 3))] == [3.0, 3.0]


def test_an_average_of_nothing_is_left_out():
    totals = SumsAndCounts()
    totals.add({"clip": pair(0, 0), "kl": pair(0, 1)})
    assert totals.averages(SingleProcess(), CPU) == {"kl": 0}


@pytest.mark.parametrize("comm", [SingleProcess(), Twins()])
def test_skipped_steps_count_in_the_learning_rate_and_nowhere_else(comm):
    reports = [StepReport(0.1, {"policy/loss": pair(4, 1)}), StepReport(0.3, skipped={})]
    logged = average_over_ranks({"reward/mean": torch.tensor(0.5)}, reports, comm, CPU)
    assert logged.keys() == {"reward/mean", "policy/loss", "optim/lr"}
    assert logged["reward/mean"] == 0.5
    assert logged["policy/loss"] == 4
    assert float(logged["optim/lr"]) == pytest.approx(0.2)


def test_extremes_are_of_all_processes_and_pairs_are_weighed():
    def process(smallest, largest, total, count):
        seen = {"completion/len_min": torch.tensor(smallest), "reward/max": torch.tensor(largest)}
        seen |= {"policy/entropy": pair(total, count), "reward/mean": torch.tensor(largest)}
        return lambda comm: average_over_ranks(seen, [StepReport(0.1)], comm, CPU)

    for found in in_turns(process(3.0, 1.0, 10, 1), process(2.0, 5.0, 2, 3)):
        assert found["completion/len_min"] == 2
        assert found["reward/max"] == 5
        assert found["policy/entropy"] == 3
        assert found["reward/mean"] == 3


def test_an_extreme_of_nothing_is_left_out():
    seen = {"completion/terminated_len_min": torch.tensor(torch.inf)}
    seen["completion/terminated_len_max"] = torch.tensor(-torch.inf)
    found = average_over_ranks(seen, [StepReport(0.1)], SingleProcess(), CPU)
    assert found.keys() == {"optim/lr"}


def test_the_share_that_is_clipped_has_extremes_over_optimizer_steps():
    reports = [StepReport(0.1, {"policy/clip_low_frac": pair(n, 4)}) for n in (0, 1, 3)]
    found = average_over_ranks({}, reports, SingleProcess(), CPU)
    assert float(found["policy/clip_low_frac"]) == pytest.approx(4 / 12)
    assert found["policy/clip_low_frac_min"] == 0
    assert found["policy/clip_low_frac_max"] == 0.75


def test_the_advantage_of_a_completion_is_that_of_its_last_policy_token():
    tokens = torch.tensor([[0.0, -1.0, -2.0], [1.5, 0.0, 0.5], [0.7, 0.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[0, 1, 1], [1, 0, 1], [1, 0, 0], [0, 0, 0]]).bool()
    found = completion_advantages(tokens, mask)
    assert torch.equal(found, torch.tensor([-2.0, 0.5, 0.7, 0.0]))
