"""Rollouter, rewards and learner of a small policy, without module or trainer."""

from typing import Any

import torch

from litgrpo.algorithms.objective import Objective
from litgrpo.learning.learner import Learner
from litgrpo.learning.steppers import PlainStepper
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.models.policy import Policy
from litgrpo.models.reference import Reference
from litgrpo.rewards.reward import Reward
from litgrpo.rewards.scorer import Scorer
from litgrpo.rewards.scoring import Scoring
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.rollout.sampling import Sampling
from litgrpo.types import PromptBatch, RewardTable, Rollout, TrainingBatch

GROUP, LENGTH = 4, 6
PLAIN = Objective()
ONE_PASS = UpdateConfig(micro_batch_tokens=None, max_grad_norm=None)


def letters(prompts, completions):
    """Share of the longest completion that is letters."""
    return [sum(letter.isalpha() for letter in text) / LENGTH for text in completions]


def rollouter_of(policy: Policy, **settings: Any) -> Rollouter:
    """Samples four completions of at most six tokens."""
    return Rollouter(policy, **{"group_size": GROUP, "max_completion_length": LENGTH} | settings)


def learner_of(
    policy: Policy,
    objective: Objective = PLAIN,
    update_config: UpdateConfig = ONE_PASS,
    *,
    sampling: Sampling | None = None,
    reference: Reference | None = None,
    **settings: Any,
) -> Learner:
    """Learns from the same."""
    sampling = Sampling() if sampling is None else sampling
    sizes = (GROUP, LENGTH)
    return Learner(policy, objective, update_config, sampling, *sizes, reference, **settings)


def rewards_of(rollout: Rollout, function=letters) -> RewardTable:
    """Return the rewards of a function in this process."""
    scorer = Scorer({"reward": Reward(function)}, Scoring(num_workers=0))
    return scorer.start(rollout).wait()


def build_training_batch(
    learner: Learner, batch: PromptBatch, function=letters, **settings: Any
) -> TrainingBatch:
    """Build the training batch of a first iteration."""
    rollouter = rollouter_of(learner.policy, sampling=learner.sampling, **settings)
    rollout = rollouter.generate(batch, "train")
    logprobs = learner.old_and_reference_logprobs(rollout)
    return learner.build_batch(rollout, rewards_of(rollout, function), logprobs)


class Recorder(torch.optim.SGD):
    """Keeps the gradient of each step that it does not take; None where there was none."""

    def __init__(self, params) -> None:
        super().__init__(params, lr=0.0)
        self.seen: list[torch.Tensor | None] = []

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        known = [p.grad.flatten() for p in params if p.grad is not None]
        self.seen.append(torch.cat(known).clone() if known else None)


def recording(policy: Policy) -> PlainStepper:
    """Takes no step, but its optimizer keeps the gradients."""
    return PlainStepper(Recorder([p for p in policy.parameters() if p.requires_grad]))


def gradient_of(learner: Learner, training_batch: TrainingBatch) -> torch.Tensor:
    """The gradient of one optimizer step on these rows, as the optimizer sees it."""
    stepper = recording(learner.policy)
    learner.policy.train()
    learner.take_optimizer_step(training_batch, stepper)
    return stepper.optimizer.seen[0]
