"""While other processes judge completions, this one asks its models what they do not depend on."""

import time

import pytest
import torch

from litgrpo.algorithms.objective import Objective
from litgrpo.data.modules import PromptData
from litgrpo.evaluation.evaluator import Evaluation
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.models.reference import FrozenReference
from litgrpo.rewards import Scoring
from litgrpo.rollout.sampling import Sampling
from tests.rewards import faulty
from tests.support.models import prompt_batch, tiny_policy
from tests.support.training import GROUP, letters, module, sample_rollout, train, vowels

TEXTS = ["a", "hello there", "xyz", "what is 3+4?"]
KL = Objective(kl_coef=0.1)


IN_WORKERS = Scoring(timeout_s=20, num_workers=2)


class Watched(FrozenReference):
    """A reference that says when it is asked, and about how many rows."""

    def __init__(self, policy, told):
        super().__init__(policy)
        self.told = told

    def logprobs(self, rows, **sampled):
        self.told(len(rows))
        return super().logprobs(rows, **sampled)


def learner(told=lambda rows: None, **settings):
    grpo = module(objective=KL, reference="another", check_invariants=False, **settings)
    grpo.reference = Watched(tiny_policy("qwen2", seed=5), told)
    grpo.optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
    return grpo


def test_the_reference_is_asked_while_workers_judge(tmp_path):
    path = tmp_path / "asked"
    reward = faulty.waiting_for(str(path))
    grpo = learner(lambda rows: path.touch(), reward=reward, scoring=IN_WORKERS)
    logged = train(grpo, PromptData(TEXTS, batch_size=4)).logged_metrics
    assert not grpo.scorer.failures  # no row waited for the reference in vain
    assert {"time/rollout_s", "time/reward_s", "time/logprobs_s", "time/learn_s"} <= {*logged}


def test_time_of_functions_that_run_in_this_process_is_time_of_rewards():
    def slow(prompts, completions):
        time.sleep(0.2)
        return vowels(prompts, completions)

    grpo = module(reward=slow, scoring=Scoring(num_workers=0), max_iterations=1)
    logged = train(grpo, PromptData(TEXTS, batch_size=4)).logged_metrics
    assert 0.2 <= logged["time/reward_s"] <= logged["time/step_s"]


def test_greedy_completions_are_sampled_while_workers_judge(tmp_path):
    path = tmp_path / "asked"
    reward = faulty.waiting_for(str(path))
    grpo = module(reward=reward, scoring=IN_WORKERS, evaluation=Evaluation(num_samples=4))
    grpo.configure_model()
    generate = grpo.rollouter.generate

    def watch(*args, sampling, **settings):
        if sampling == Sampling(temperature=0.0):
            path.touch()
        return generate(*args, sampling=sampling, **settings)

    grpo.rollouter.generate = watch
    grpo.validation_step(prompt_batch(*TEXTS), 0)
    assert path.exists()
    assert not grpo.scorer.failures


@pytest.mark.parametrize(
    "learning", [UpdateConfig(), UpdateConfig(epochs_per_rollout=2, num_mini_batches=2)]
)
def test_the_weights_are_the_same_to_the_last_bit(learning):
    ends = []
    for scoring in (Scoring(num_workers=0), IN_WORKERS):
        grpo = learner(reward=faulty.letters, scoring=scoring, update=learning, max_iterations=3)
        train(grpo, PromptData(TEXTS, batch_size=2))
        ends.append(grpo.policy.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    start = tiny_policy("qwen2").state_dict()
    assert any(not torch.equal(ends[0][name], start[name]) for name in start)


def test_the_reference_is_asked_about_every_row_once():
    rows = []
    grpo = learner(rows.append, reward=letters, max_iterations=2)
    train(grpo, PromptData(TEXTS, batch_size=4))
    assert sum(rows) == 2 * len(TEXTS) * GROUP


def long_prompts_only(prompts, completions):
    """Completions differ after a prompt of more than four letters; else all are equally good."""
    scores = letters(prompts, completions)
    return [len(prompt) > 4 and score for prompt, score in zip(prompts, scores, strict=True)]


def test_the_reference_is_asked_about_the_rollout_and_about_new_groups_only():
    rows = []
    grpo = learner(rows.append, reward=long_prompts_only, dynamic_sampling_attempts=1)
    train(grpo, PromptData(TEXTS, batch_size=4))
    # Two of four groups are informative; four more prompts are asked for, two of them informative.
    assert sum(rows) == (4 + 2) * GROUP


def test_a_rollout_that_was_not_waited_for_is_cancelled_by_the_next_or_by_close(tmp_path):
    grpo = module(reward=faulty.waiting_for(str(tmp_path / "never")), scoring=IN_WORKERS)
    rollout = sample_rollout(grpo, prompt_batch(*TEXTS))
    first = grpo.scorer.start(rollout)
    grpo.scorer.start(rollout)
    (loaded,) = grpo.scorer.runner.workers.values()
    assert [worker.busy for worker in loaded.pool.workers] == [True]
    with pytest.raises(RuntimeError, match="cancelled"):
        first.wait()
    grpo.teardown("fit")
    assert all(worker.is_lost for worker in loaded.pool.workers)
    assert not grpo.scorer.runner.workers


def test_time_before_wait_does_not_count_against_the_rows():
    grpo = module(reward=faulty.sleeps, scoring=Scoring(timeout_s=2.0, num_workers=2))
    rollout = sample_rollout(grpo, prompt_batch("a", "b"))
    rollout.completions[:] = ["a", "bad", "cc", "ddd", "e", "f", "gg", "h"]
    pending = grpo.scorer.start(rollout)
    time.sleep(3.0)  # the models take longer than the functions may
    assert pending.wait().valid.flatten().tolist() == [True, False, *[True] * 6]
    grpo.scorer.close()
