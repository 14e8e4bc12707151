"""While other processes judge completions, this one asks its models what they do not depend on."""

import time

import pytest
import torch

from litgrpo.algorithm.objective import Objective
from litgrpo.data.prompts import PromptData
from litgrpo.learner.config import Evaluation, UpdateConfig
from litgrpo.models.reference import FrozenModel
from litgrpo.rewards import InProcessRunner, ProcessRunner
from litgrpo.rollout.sampling import Sampling
from tests.conftest import prompt_batch, tiny_policy
from tests.modules.test_grpo import GROUP, letters, module, train
from tests.rewards import faulty

TEXTS = ["a", "hello there", "xyz", "what is 3+4?"]
KL = Objective(kl_coef=0.1)


@pytest.fixture
def guard():
    guard = ProcessRunner(timeout_s=20, workers=2)
    yield guard
    guard.close()


class Watched(FrozenModel):
    """A reference that says when it is asked, and about how many rows."""

    def __init__(self, policy, told):
        super().__init__(policy)
        self.told = told

    def logprobs(self, *tokens, **sampled):
        self.told(len(tokens[3]))
        return super().logprobs(*tokens, **sampled)


def learner(told=lambda rows: None, **settings):
    grpo = module(objective=KL, reference="another", check_invariants=False, **settings)
    grpo.reference = Watched(tiny_policy("qwen2", seed=5), told)
    grpo.optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
    return grpo


def test_the_reference_is_asked_while_workers_judge(guard, tmp_path):
    path = tmp_path / "asked"
    reward = faulty.waiting_for(str(path))
    grpo = learner(lambda rows: path.touch(), reward=reward, reward_runner=guard)
    logged = train(grpo, PromptData(TEXTS, batch_size=4)).logged_metrics
    assert not guard.failures  # no row waited for the reference in vain
    assert {"time/rollout_s", "time/reward_s", "time/reference_s", "time/learn_s"} <= {*logged}


def test_greedy_completions_are_sampled_while_workers_judge(guard, tmp_path):
    path = tmp_path / "asked"
    reward = faulty.waiting_for(str(path))
    grpo = module(reward=reward, reward_runner=guard, evaluation=Evaluation(samples=4))
    generate = grpo.generate

    def sampled(prompts, purpose, group_size, sampling):
        if sampling == Sampling(temperature=0.0):
            path.touch()
        return generate(prompts, purpose, group_size, sampling)

    grpo.generate = sampled
    grpo._evaluate(prompt_batch(*TEXTS), "val")
    assert not guard.failures


@pytest.mark.parametrize(
    "learning", [UpdateConfig(), UpdateConfig(inner_epochs=2, num_mini_batches=2)]
)
def test_the_weights_are_the_same_to_the_last_bit(guard, learning):
    ends = []
    for how in (InProcessRunner(), guard):
        grpo = learner(reward=faulty.letters, reward_runner=how, update=learning, max_iterations=3)
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


def test_no_reference_is_asked_about_groups_that_may_be_replaced():
    events = []

    def judged(prompts, completions):
        events.append("rewards")
        return letters(prompts, completions)

    grpo = learner(lambda rows: events.append("reference"), reward=judged, max_resamples=1)
    train(grpo, PromptData(TEXTS, batch_size=4))
    assert events[0] == "rewards"
    assert "rewards" not in events[events.index("reference") :]


def test_what_was_never_gathered_ends_with_the_next_question_or_the_guard(guard, tmp_path):
    grpo = module(reward=faulty.waiting_for(str(tmp_path / "never")), reward_runner=guard)
    rollout = grpo.generate(prompt_batch(*TEXTS), "train", GROUP, Sampling())
    grpo.start_reward(rollout)
    grpo.start_reward(rollout)
    assert len(guard.crew.busy) == 1
    grpo.teardown("fit")
    assert not guard.crew.busy
    assert not guard.crew.launchers


def test_time_in_which_nobody_looks_is_not_the_rows():
    guard = ProcessRunner(timeout_s=1.0, workers=2)
    grpo = module(reward=faulty.sleeps, reward_runner=guard)
    rollout = grpo.generate(prompt_batch("a", "b"), "train", GROUP, Sampling())
    rollout.completions[:] = ["a", "bad", "cc", "ddd", "e", "f", "gg", "h"]
    gather = grpo.start_reward(rollout)
    time.sleep(2.0)  # the models take longer than the functions may
    start = time.monotonic()
    rewards = gather()
    assert time.monotonic() - start < 2.0
    assert rewards.valid.flatten().tolist() == [True, False, *[True] * 6]
    guard.close()
