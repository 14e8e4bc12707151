"""A reference that is a teacher: another model, other adapters, or the policy with a hint."""

from dataclasses import replace

import pytest
import torch

from litgrpo.algorithms.divergences import DIVERGENCES, Divergence
from litgrpo.algorithms.kl import KLInReward
from litgrpo.algorithms.objective import Objective
from litgrpo.callbacks.adaptive import ReferenceSync
from litgrpo.data.modules import PromptData
from litgrpo.distributed.device import backend
from litgrpo.learning.static_batches import StaticBatches
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.models.adapters import LoRA
from litgrpo.models.loading.export import export_adapter
from litgrpo.models.loading.load import Precision, build_policy, load_policy, load_reference
from litgrpo.models.reference import AdapterReference, BaseModelReference, FrozenReference
from litgrpo.rollout.sampling import Sampling
from litgrpo.types import REFERENCE_PROMPT
from tests.learning.parts import build_training_batch, gradient_of, learner_of
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy
from tests.support.training import GROUP, batches, module, train

BATCH = ("a", "hello there", "xyz")
STATIC = StaticBatches(backend(torch.device("cpu")))


def distilling(kind="reverse_kl", **settings):
    """An objective that learns from the teacher alone."""
    return Objective(reward_coef=0.0, kl_coef=1.0, kl_estimator=kind, **settings)


def teacher_of(architecture="qwen2"):
    return FrozenReference(tiny_policy(architecture, seed=1))


def plain_divergence(policy, teacher, training_batch, divergence: Divergence):
    """Mean over tokens of the divergence of whole rows of logits, by transformers alone."""
    total, tokens = 0.0, training_batch.tokens
    for row, length in enumerate(tokens.completion_mask.sum(1).tolist()):
        of = tokens.prompt_of[row]
        prompt = tokens.prompt_ids[of][tokens.prompt_mask[of]][None]
        ids = tokens.completion_ids[row : row + 1, :length]
        one, two = (
            each.dense_logits(prompt, torch.ones_like(prompt).bool(), ids)[0, :length]
            for each in (policy, teacher.policy)
        )
        total = total + divergence(one, two.detach()).sum()
    return total / tokens.completion_mask.sum()


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_gradient_is_that_of_the_divergence_at_every_sampled_token(architecture, kind):
    policy, teacher = tiny_policy(architecture), teacher_of(architecture)
    learner = learner_of(policy, distilling(kind), reference=teacher)
    training_batch = build_training_batch(learner, prompt_batch(*BATCH))
    got = gradient_of(learner, training_batch)
    loss = plain_divergence(policy, teacher, training_batch, DIVERGENCES[kind])
    trained = [p for p in policy.parameters() if p.requires_grad]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])
    assert (got - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", [*DIVERGENCES, "k3"])
def test_the_gradient_depends_on_neither_split_nor_padding(kind):
    policy, teacher = tiny_policy("qwen2"), teacher_of()
    whole = learner_of(policy, distilling(kind), reference=teacher)
    training_batch = build_training_batch(whole, prompt_batch(*BATCH, length=20))
    expected = gradient_of(whole, training_batch)
    split = UpdateConfig(micro_batch_size=2, micro_batch_tokens=None, max_grad_norm=None)
    variants = [
        learner_of(policy, distilling(kind), split, reference=teacher),
        learner_of(policy, distilling(kind), split, reference=teacher, micro_batching=STATIC),
    ]
    for learner in variants:
        got = gradient_of(learner, training_batch)
        assert (got - expected).norm() < 1e-5 * expected.norm()
    policy.few_logits = 2 * 3 * 2 * policy.vocab_size
    assert policy.chunk_size(100, num_models=2) == 3
    got = gradient_of(whole, training_batch)
    assert (got - expected).norm() < 1e-5 * expected.norm()


def test_a_divergence_computes_no_log_probabilities_of_the_teacher(monkeypatch):
    """The head of the teacher runs in the update only."""
    policy, teacher = tiny_policy("qwen2"), teacher_of()
    learner, calls = learner_of(policy, distilling(), reference=teacher), []
    head = teacher.policy.head
    monkeypatch.setattr(teacher.policy, "head", lambda hidden: calls.append(0) or head(hidden))
    training_batch = build_training_batch(learner, prompt_batch(*BATCH))
    assert training_batch.ref_logprobs is None
    assert not calls
    assert gradient_of(learner, training_batch).norm() > 0
    assert calls
    both = distilling(kl_in_reward=KLInReward(0.1))
    found = build_training_batch(learner_of(policy, both, reference=teacher), prompt_batch(*BATCH))
    assert found.ref_logprobs is not None
    torch.testing.assert_close(found.ref_hidden, training_batch.ref_hidden)


def test_static_shapes_give_the_same_gradient():
    policy, teacher = tiny_policy("qwen2"), teacher_of()
    learner = learner_of(policy, distilling(), reference=teacher)
    training_batch = build_training_batch(learner, prompt_batch(*BATCH))
    expected = gradient_of(learner, training_batch)
    policy.static_shapes = teacher.policy.static_shapes = True
    learner = learner_of(policy, distilling(), reference=teacher, micro_batching=STATIC)
    again = build_training_batch(learner, prompt_batch(*BATCH))
    assert again.ref_hidden is not None
    got = gradient_of(learner, training_batch)
    assert (got - expected).norm() < 1e-5 * expected.norm()


def test_the_divergence_is_over_the_tokens_that_could_be_sampled():
    policy, teacher = tiny_policy("qwen2"), teacher_of()
    sampling = Sampling(temperature=0.7, top_k=5, max_candidates=5)
    learner = learner_of(policy, distilling(), sampling=sampling, reference=teacher)
    training_batch = build_training_batch(learner, prompt_batch(*BATCH))
    new = learner.logprobs(training_batch.tokens, training_batch.ref_hidden)
    row = int(training_batch.tokens.completion_mask.sum(1).argmax())
    of = training_batch.tokens.prompt_of[row]
    prompt = training_batch.tokens.prompt_ids[of][training_batch.tokens.prompt_mask[of]][None]
    first = training_batch.tokens.completion_ids[row : row + 1, :0]
    ids = training_batch.tokens.candidate_ids[row, 0].long()
    one, two = (
        each.dense_logits(prompt, torch.ones_like(prompt).bool(), first)[0, :1, ids] / 0.7
        for each in (policy, teacher.policy)
    )
    torch.testing.assert_close(new.divergence[row, :1], DIVERGENCES["reverse_kl"](one, two))


def test_a_sampled_token_has_the_gradient_of_the_reverse_kl_on_average():
    """With enough samples of one token: that of the divergence over the vocabulary."""
    policy, teacher = tiny_policy("qwen2"), teacher_of()
    settings = {"max_completion_length": 1, "group_size": 4000}
    exact, sampled = (
        gradient_of(learner, build_training_batch(learner, prompt_batch("a"), **settings))
        for learner in (
            replace(learner_of(policy, distilling(kind), reference=teacher), group_size=4000)
            for kind in ("reverse_kl", "k3")
        )
    )
    similarity = float(exact @ sampled / exact.norm() / sampled.norm())
    assert similarity > 0.9


@pytest.mark.parametrize("kind", ["reverse_kl", "k3", "forward_kl", "jsd"])
def test_the_policy_approaches_its_teacher_without_rewards(kind):
    grpo = module(
        objective=distilling(kind),
        reference="the teacher",
        group_size=32 if kind == "k3" else GROUP,  # its gradient is noisy
        max_iterations=40,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        check_invariants=False,
    )
    grpo.reference = teacher_of()
    train(grpo, batches("a", "bc"))
    exact = "reverse_kl" if kind == "k3" else kind  # an estimate has outliers
    assert divergence_of(grpo.policy, exact) < 0.85 * divergence_of(tiny_policy("qwen2"), exact)


def divergence_of(policy, kind):
    """Mean divergence from the teacher on the policy's own samples."""
    learner = learner_of(policy, distilling(kind), reference=teacher_of())
    training_batch = build_training_batch(learner, prompt_batch("a", "bc"))
    new = learner.logprobs(training_batch.tokens, training_batch.ref_hidden)
    return float(learner.objective.loss(new, training_batch).loss.detach())


def test_a_group_of_one_is_enough_for_a_teacher():
    grpo = module(objective=distilling(), reference="the teacher", group_size=1)
    grpo.reference = teacher_of()
    runner = train(grpo, batches("a", "bc"))
    assert float(runner.callback_metrics["policy/kl"]) > 0


# --- which teacher ---


@pytest.fixture
def base(tmp_path):
    tiny_model("qwen2").save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def test_other_adapters_on_the_same_base_model_are_a_teacher(base, tmp_path):
    trained = load_policy(base, lora=LoRA(rank=2))
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    export_adapter(trained, tmp_path / "teacher")
    policy = load_policy(base, lora=LoRA(rank=4))
    teacher = load_reference(policy, str(tmp_path / "teacher"), base, Precision())
    assert isinstance(teacher, AdapterReference)
    learner = learner_of(policy, distilling("k3"), reference=teacher)
    training_batch = build_training_batch(learner, prompt_batch(*BATCH))
    with torch.no_grad():
        expected = trained.logprobs(training_batch.tokens).logprobs
    torch.testing.assert_close(training_batch.ref_logprobs, expected)
    learner = learner_of(policy, distilling(), reference=teacher)
    training_batch = build_training_batch(learner, prompt_batch(*BATCH))
    got = gradient_of(learner, training_batch)
    teacher = FrozenReference(trained)
    loss = plain_divergence(policy, teacher, training_batch, DIVERGENCES["reverse_kl"])
    own = [p for p in policy.parameters() if p.requires_grad]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, own)])
    assert (got - expected).norm() < 1e-4 * expected.norm()


def test_a_policy_without_adapters_cannot_have_adapters_as_teacher(base, tmp_path):
    export_adapter(load_policy(base, lora=LoRA(rank=2)), tmp_path / "teacher")
    with pytest.raises(ValueError, match="is an adapter in PEFT's format"):
        load_reference(load_policy(base), str(tmp_path / "teacher"), base, Precision())


def test_a_teacher_with_another_tokenizer_is_rejected_in_one_sentence(base, tmp_path):
    other = byte_tokenizer()
    vocabulary = other.get_vocab()
    assert vocabulary["a"] != vocabulary["b"]
    swapped = other.backend_tokenizer.to_str()
    a, b = vocabulary["a"], vocabulary["b"]
    swapped = swapped.replace(f'"a":{a}', f'"a":{b}').replace(f'"b":{b}', f'"b":{a}')
    tiny_model("qwen2").save_pretrained(tmp_path / "teacher")
    other.save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher" / "tokenizer.json").write_text(swapped)
    with pytest.raises(ValueError, match=r"another tokenizer than the policy \(2 tokens differ"):
        load_reference(load_policy(base), str(tmp_path / "teacher"), base, Precision())


def test_a_teacher_may_pad_its_vocabulary_further_but_not_less(base, tmp_path):
    model = tiny_model("qwen2", seed=1)
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    model.save_pretrained(tmp_path / "wide")
    byte_tokenizer().save_pretrained(tmp_path / "wide")
    wide = str(tmp_path / "wide")
    policy = load_policy(base)
    teacher = load_reference(policy, wide, base, Precision())
    learner = learner_of(policy, distilling(), reference=teacher)
    training_batch = build_training_batch(learner, prompt_batch(*BATCH))
    assert gradient_of(learner, training_batch).isfinite().all()
    with pytest.raises(ValueError, match="has a vocabulary of"):
        load_reference(load_policy(wide), base, wide, Precision())


def test_callbacks_do_not_keep_the_hidden_states_of_the_teacher():
    grpo = module(objective=distilling("reverse_kl"), check_invariants=False)
    seen = {}
    grpo.on_train_batch_end = lambda outputs, *_: seen.update(outputs)
    grpo.reference = teacher_of()
    train(grpo, PromptData(list(BATCH), batch_size=len(BATCH)))
    assert seen["iteration"].steps[0].sums["policy/kl"][0] > 0
    assert seen["iteration"].batch.ref_hidden is None
    assert seen["iteration"].experience.logprobs.ref_hidden is None


# --- a hint that only the teacher sees ---


def with_hint(rows, **settings):
    template = "{{ prompt }} {{ answer }}"
    return PromptData(rows, reference_template=template, batch_size=len(rows), **settings)


ROWS = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "what is 3+14?", "answer": "17"}]


def test_the_teacher_reads_the_prompt_with_the_hint():
    grpo = module(objective=distilling(), check_invariants=False)
    seen = {}
    grpo.on_train_batch_end = lambda outputs, *_: seen.update(outputs)
    grpo.reference = teacher_of()
    train(grpo, with_hint(ROWS))
    rollout = seen["iteration"].rollout
    tokens = rollout.reference_tokens
    texts = byte_tokenizer().batch_decode(
        [ids[mask] for ids, mask in zip(tokens.prompt_ids, tokens.prompt_mask, strict=True)]
    )
    assert [text.removeprefix("<bos>").strip() for text in sorted(texts, key=len)] == [
        "1+1? 2",
        "what is 3+14? 17",
    ]
    assert torch.equal(tokens.completion_ids, rollout.completion_ids)


@pytest.mark.parametrize("chat", [False, True])
def test_the_hint_is_added_to_the_instruction_of_the_template(chat, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    settings = {"template": "Add: {{ prompt }}", "chat": chat, "tokenizer": str(tmp_path)}
    data = with_hint(ROWS, **settings)
    data.setup("fit")
    (ids, _) = data.sets["train"].columns[REFERENCE_PROMPT]
    assert tokenizer.decode(ids).removeprefix("<bos>").strip() == "Add: 1+1? 2"


def test_a_policy_learns_what_it_would_answer_with_the_hint():
    """The divergence from itself with a hint falls, and the teacher moves with the policy."""
    sync = ReferenceSync(every=1, mixup_alpha=0.5)
    grpo = module(
        objective=distilling(),
        max_iterations=2,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    grpo.reference = FrozenReference(tiny_policy("qwen2"))
    before = [p.clone() for p in grpo.reference.parameters()]
    runner = train(grpo, with_hint(ROWS), callbacks=[sync])
    assert float(runner.callback_metrics["policy/kl"]) > 0  # of equal weights: the hint alone
    assert any(
        not torch.equal(one, two)
        for one, two in zip(before, grpo.reference.parameters(), strict=True)
    )


def test_the_start_up_checks_hold_for_a_policy_that_is_its_own_teacher():
    """Without a hint both are equal, and the gradient of the distillation is only rounding."""
    grpo = module(objective=distilling())
    grpo.reference = FrozenReference(tiny_policy("qwen2"))
    runner = train(grpo, batches("a", "bc"))
    assert abs(float(runner.callback_metrics["policy/kl"])) < 1e-6


def test_adapters_learn_from_their_base_model_with_the_hint(base):
    policy = load_policy(base, lora=LoRA(rank=2))
    grpo = module(objective=distilling(), check_invariants=False)
    grpo.policy, grpo.reference = policy, BaseModelReference(policy)
    runner = train(grpo, with_hint(ROWS))
    assert float(runner.callback_metrics["policy/kl"]) > 0


def test_a_template_that_nothing_reads_is_rejected():
    grpo = module()
    with pytest.raises(ValueError, match="there is no KL term that compares"):
        train(grpo, with_hint(ROWS))


def test_validation_prompts_have_no_hint(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    data = with_hint(ROWS, val=[{"prompt": "without an answer?"}], tokenizer=str(tmp_path))
    data.setup("fit")
    assert REFERENCE_PROMPT in data.sets["train"].columns
    assert REFERENCE_PROMPT not in data.sets["val"].columns


def test_encoder_decoder_models_learn_from_a_teacher():
    policy = build_policy(tiny_model("t5", initializer_factor=1.0), byte_tokenizer())
    teacher = FrozenReference(
        build_policy(tiny_model("t5", seed=1, initializer_factor=1.0), byte_tokenizer())
    )
    learner = learner_of(policy, distilling(), reference=teacher)
    training_batch = build_training_batch(learner, prompt_batch(*BATCH))
    assert gradient_of(learner, training_batch).norm() > 0
