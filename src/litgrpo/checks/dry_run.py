"""A small version of a run for the start-up checks, which leaves the run unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from litgrpo.checks.episode_checks import small_episodes
from litgrpo.distributed.precision import matmul_precision
from litgrpo.learning.learner import Learner
from litgrpo.models.policy import Policy
from litgrpo.rewards.reward import Reward
from litgrpo.rewards.scorer import Scorer
from litgrpo.rewards.scoring import Scoring
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.types import REFERENCE_PROMPT, PromptBatch, RewardTable, Rollout, TrainingBatch

# A few short rows, independent of the size of the run.
PROMPTS, GROUP, PROMPT_LEN, COMPLETION_LEN = 3, 4, 256, 16
EXTRA_PADDING = 3
FULL_TOLERANCE = 1e-4  # of float32 and float64


@dataclass(frozen=True)
class DryRun:
    """Rollouter and learner of a run, with short completions and small groups.

    Args:
        rollouter: generates short completions in small groups.
        learner: shares the policy with the learner of the run.
        probe: reward function that records its inputs.

    Example:
        `DryRun.from_run(module.rollouter, module.learner).generate(prompts)`
    """

    rollouter: Rollouter
    learner: Learner
    probe: RecordingReward

    @staticmethod
    def from_run(rollouter: Rollouter, learner: Learner) -> DryRun:
        """Make the small version of a run."""
        policy = learner.policy
        sizes: dict[str, Any] = {
            "policy": policy,
            "group_size": min(learner.group_size, GROUP),
            "max_completion_length": min(learner.max_completion_length, COMPLETION_LEN),
        }
        objective = learner.objective
        if not objective.reward_coef:  # a policy that is its own teacher has no gradient
            objective = replace(objective, reward_coef=1.0)
        learner = replace(learner, objective=objective, **sizes)
        if rollouter.episodes is not None:
            rollouter = replace(rollouter, episodes=small_episodes(policy))
        return DryRun(replace(rollouter, **sizes), learner, RecordingReward())

    def generate(self, prompts: PromptBatch) -> Rollout:
        """Generate completions as in the first iteration."""
        return self.rollouter.generate(prompts, "train")

    def build_batch(self, rollout: Rollout) -> TrainingBatch:
        """Build the training batch of a first iteration; rewards differ within every group."""
        rewards = self.rewards(rollout)
        logprobs = self.learner.old_and_reference_logprobs(rollout)
        return self.learner.build_batch(rollout, rewards, logprobs)

    def rewards(self, rollout: Rollout) -> RewardTable:
        """Compute rewards that differ within every group."""
        scorer = Scorer({"probe": Reward(self.probe)}, Scoring(num_workers=0))
        return scorer.start(rollout).wait()


class RecordingReward:
    """Reward function that records its inputs; its rewards are 0, 0.5, 1, 0, ..."""

    def __call__(
        self, prompts: list[str], completions: list[str], **columns: list[Any]
    ) -> list[float]:
        """N rewards."""
        self.inputs = {"prompts": prompts, "completions": completions} | columns
        return [row % 3 / 2 for row in range(len(prompts))]

    def count_misplaced(self, rollout: Rollout, batch: TrainingBatch) -> float:
        """Count rows whose reward or training row belongs to another prompt."""
        prompt_of = torch.arange(len(batch)) // rollout.group_size
        correct = batch.tokens.prompt_of.cpu() == prompt_of
        columns = {**rollout.prompts.columns, "prompts": rollout.prompts.prompts}
        for row, prompt in enumerate(prompt_of.tolist()):
            expected = {name: values[prompt] for name, values in columns.items()}
            expected["completions"] = rollout.completions[row]
            correct[row] &= expected == {name: self.inputs[name][row] for name in expected}
        return float((~correct).sum())


def select_few_prompts(prompts: PromptBatch) -> PromptBatch:
    """Select the first prompts of a batch, cut to a short length; the reference reads them, too."""
    batch = prompts.select(range(min(PROMPTS, len(prompts))))
    ids, mask = batch.prompt_ids[:, -PROMPT_LEN:], batch.prompt_mask[:, -PROMPT_LEN:]
    columns = {name: values for name, values in batch.columns.items() if name != REFERENCE_PROMPT}
    return replace(batch, prompt_ids=ids, prompt_mask=mask, columns=columns)


def pad_prompts(prompts: PromptBatch) -> PromptBatch:
    """Add padding on the left that holds a real token id, so that attending to it shows."""
    filler = int(prompts.prompt_ids[0, -1])
    wider = (EXTRA_PADDING, 0)
    mask = nn.functional.pad(prompts.prompt_mask, wider)
    ids = nn.functional.pad(prompts.prompt_ids, wider).masked_fill(~mask, filler)
    return replace(prompts, prompt_ids=ids, prompt_mask=mask)


@contextmanager
def restore_end_tokens(policy: Policy) -> Iterator[None]:
    """Restore a policy's end tokens, which the checks extend to get short completions."""
    eos_ids = policy.eos_ids
    try:
        yield
    finally:
        policy.eos_ids = eos_ids


def pick_end_tokens(policy: Policy, rollout: Rollout) -> tuple[int, ...]:
    """Return the end tokens and two sampled tokens, so that similar completions end early."""
    thirds = (rollout.lengths[0] // 3, rollout.lengths[-1] // 2)
    ids = [int(rollout.completion_ids[row, t]) for row, t in zip((0, -1), thirds, strict=True)]
    return tuple(sorted({*policy.eos_ids, *ids}))


def coarsest_dtype(policy: Policy, exact_logprobs: bool) -> torch.dtype:
    """Return the dtype of a run with the largest machine epsilon.

    Weights (`precision.dtype`), matrix products (`precision.autocast_dtype`), the trainer's
    autocast (`trainer.precision`) and the engine (`engine.dtype`) can each have another dtype.
    """
    device = policy.model.device.type
    dtypes = {p.dtype for p in policy.parameters() if p.is_floating_point()}
    if policy.autocast_dtype is not None:
        dtypes.add(policy.autocast_dtype)
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    if not exact_logprobs:
        dtypes.add(torch.bfloat16)  # the lowest precision of engines
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def tolerance(policy: Policy, exact_logprobs: bool = True) -> float:
    """Return the tolerance of log-probabilities (nats) and gradients.

    1e-4, or 32 units in the last place of the lowest precision of the run: bfloat16 0.25, float16
    and TF32 0.03.

    Args:
        policy: of the run.
        exact_logprobs: the engine computes in the policy's precision.
    """
    eps = torch.finfo(coarsest_dtype(policy, exact_logprobs)).eps
    if matmul_precision() != "highest":
        eps = max(eps, torch.finfo(torch.float16).eps)
    return max(FULL_TOLERANCE, 32 * eps)


@contextmanager
def restore_modes(*modules: nn.Module | None) -> Iterator[None]:
    """Restore the train or eval mode of every submodule."""
    parts = [part for module in modules if module is not None for part in module.modules()]
    modes = [(part, part.training) for part in parts]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
