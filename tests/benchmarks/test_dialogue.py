"""The test subject does what it is said to do, and the tables say what the numbers are."""

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader

from litgrpo.algorithms.losses import Objective, PolicyGradient
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.sampling import Sampling
from litgrpo.training.learner import Learner
from tests.benchmarks.dialogue import (
    by_persona,
    corpus_bleu,
    differences,
    resample_bleu,
    table,
)
from tests.benchmarks.lapdog_released import Released, WrongSign
from tests.support.models import prompt_batch, tiny_policy

TEXTS = ("a", "what is 3+4?", "hello", "xy")


def always_one(prompts, completions):
    return [1.0] * len(prompts)


def subject(**settings):
    released = Released(
        "",
        {"one": Reward(always_one)},
        group_size=1,
        max_completion_length=12,
        max_iterations=1,
        sampling=Sampling(temperature=0.0),
        objective=Objective(
            WrongSign(), surrogate=PolicyGradient(), loss_aggregation="sequence_mean"
        ),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        **settings,
    )
    released.policy = tiny_policy("t5")
    released.policy.eos_ids = tuple(range(2, 40))
    return released


def fit(module):
    silent = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = Trainer(**silent, accelerator="cpu", max_epochs=-1, enable_model_summary=False)
    trainer.fit(module, DataLoader([prompt_batch(*TEXTS)], batch_size=None))


def test_the_released_objective_makes_what_it_rewards_less_likely(monkeypatch):
    module, seen = subject(check_invariants=False), []
    learn = Learner.update

    def record_call(learner, training_batch, stepper):
        seen.append(training_batch)
        return learn(learner, training_batch, stepper)

    monkeypatch.setattr(Learner, "update", record_call)
    fit(module)
    (training_batch,) = seen
    before, after = (
        policy.logprobs(training_batch.tokens).logprobs.mean()
        for policy in (subject().policy, module.policy.eval())
    )
    assert after < before - 0.01


def test_the_released_objective_learns_padding_too():
    module = subject()
    module.configure_model()
    rollout = module.rollouter.generate(prompt_batch(*TEXTS), "train")
    assert not rollout.completion_mask.all()
    rewards = module.scorer.start(rollout).wait()
    logprobs = module.learner.old_and_reference_logprobs(rollout)
    training_batch = module.learner.build_batch(rollout, rewards, logprobs)
    assert training_batch.completion_mask.all()
    length = rollout.completion_mask.shape[1]
    assert training_batch.loss_weights.unique().tolist() == pytest.approx([1 / length / 4])
    assert training_batch.advantages.unique().tolist() == [-1.0]


def test_the_invariants_refuse_the_released_objective():
    with pytest.raises(ValueError, match="Not trained: the invariant"):
        fit(subject())


def run(f1, replies=("a b c d", "a b c e", "x")):
    answers = [[4, 4, 4, 3, 2, 1, 4, 3, 2, 1], [4, 4, 3, 2, 1, 0, 4, 3, 2, 1], [1, 1, *[0] * 8]]
    persona = ["p", "p", "q"]
    scores = {"f1": f1, "rougeL": f1, "reward": f1}
    return scores | {"persona": persona, "reply": list(replies), "counts": answers}


def test_a_persona_counts_once_whatever_its_prompts_and_seeds():
    assert by_persona([run([1.0, 3.0, 10.0]), run([3.0, 5.0, 20.0])], "f1") == [3.0, 15.0]


def test_the_tables_show_levels_and_paired_differences():
    runs = {"supervised only": [run([1.0, 3.0, 10.0])], "GRPO": [run([2.0, 4.0, 11.0])] * 2}
    levels = table(runs).splitlines()
    assert levels[2].startswith("| supervised only | 6 [")
    assert f"| {corpus_bleu(runs['GRPO'][0]):.2f} [" in levels[3]
    moved = "+1 [+1, +1] | +1 [+1, +1] | +1 [+1, +1] | +0.00 [+0.00, +0.00] | +0.00 |"
    assert moved in differences(runs)


def test_bleu_is_resampled_by_persona_with_the_same_draws_for_every_row():
    one, other = run([1.0, 3.0, 10.0]), run([0.0, 0.0, 0.0])
    assert resample_bleu([one]) == resample_bleu([other])
    whole = {corpus_bleu(one), *(corpus_bleu(part(one, persona)) for persona in "pq")}
    drawn = {round(score, 9) for score in resample_bleu([one, one])}
    assert drawn == {round(score, 9) for score in whole}  # both, or one of them twice


def part(found, persona):
    rows = [row for row, name in enumerate(found["persona"]) if name == persona]
    return {"counts": [found["counts"][row] for row in rows]}
