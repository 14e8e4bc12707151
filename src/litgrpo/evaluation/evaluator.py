"""Answers held-out prompts, counts successes, and reports them with intervals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from litgrpo.arguments import one_of
from litgrpo.evaluation.accuracy import GreedyAccuracy, RewardMeans, SampledAccuracy
from litgrpo.evaluation.settings import Evaluation
from litgrpo.rewards.scorer import Scorer
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.rollout.sampling import Purpose, Sampling
from litgrpo.text import extract_answer, extract_reasoning
from litgrpo.types import PromptBatch, RewardTable, Rollout


class Evaluator:
    """Evaluation of a policy on prompts with rewards.

    Args:
        settings: how prompts are answered and counted.
        scorer: judges completions.

    Raises:
        ValueError: `settings.success` names no reward.
    """

    def __init__(self, settings: Evaluation, scorer: Scorer) -> None:
        names = list(scorer.parts)
        self.settings = settings
        self.scorer = scorer
        self.success = names[0] if settings.success is None else settings.success
        one_of("evaluation.success", self.success, names)
        self.sampled_accuracy = SampledAccuracy(settings.samples, settings.pass_at)
        self.greedy_accuracy = GreedyAccuracy()
        self.reward_means = RewardMeans(names)
        self.metrics: list[Metric] = [self.sampled_accuracy, self.reward_means]
        if settings.greedy:
            self.metrics.append(self.greedy_accuracy)
        if settings.corpus is not None:
            self.metrics.append(settings.corpus)

    def start(self, device: torch.device) -> None:
        """Count on this device from now on."""
        for metric in self.metrics:
            metric.to(device)

    def evaluate(
        self, rollouter: Rollouter, prompts: PromptBatch, purpose: Purpose, iteration: int
    ) -> tuple[Rollout, RewardTable]:
        """Answer prompts and count successes.

        Args:
            rollouter: samples.
            prompts: B prompts.
            purpose: `val` or `test`: each has random numbers of its own, the same every time.
            iteration: number of finished iterations.

        Returns:
            The sampled rollout and its rewards.
        """
        settings = self.settings
        sampling = Sampling(temperature=settings.temperature)
        sampled: dict[str, Any] = {"group_size": settings.samples, "sampling": sampling}
        rollout = rollouter.generate(prompts, purpose, iteration, **sampled)
        pending = self.scorer.submit(rollout, iteration)
        replies = rollout.completions[:: settings.samples]
        if settings.greedy:  # while reward functions of other processes judge the samples
            likely: dict[str, Any] = {"group_size": 1, "sampling": Sampling(temperature=0.0)}
            greedy = rollouter.generate(prompts, purpose, iteration, **likely)
            replies = greedy.completions
        rewards = pending.result()
        self.sampled_accuracy.update(prompts.index, self._successes(rewards))
        self.reward_means.update(prompts.index, rewards)
        if settings.greedy:
            successes = self._successes(self.scorer.submit(greedy, iteration).result())
            self.greedy_accuracy.update(prompts.index, successes.squeeze(1))
        if settings.corpus is not None:
            settings.corpus.update(prompts.index, replies, prompts.columns)
        return rollout, rewards

    def _successes(self, rewards: RewardTable) -> Tensor:
        """[B, G] True where the reward that counts reached its threshold."""
        part = rewards.parts[self.success]
        successes = (part >= self.settings.threshold) & rewards.valid
        return successes.to(self.sampled_accuracy.device)

    def report(self, stage: str) -> dict[str, float]:
        """{`stage`/name: number} of everything counted since the last report."""
        report: dict[str, float] = {}
        for metric in self.metrics:
            report |= {f"{stage}/{name}": float(value) for name, value in metric.compute().items()}
            metric.reset()
        return report

    def predict(self, rollouter: Rollouter, prompts: PromptBatch) -> list[dict[str, Any]]:
        """Answer prompts.

        Returns:
            One dict per prompt: prompt, completion, reasoning, answer, truncated, other columns.
        """
        sampling = Sampling(temperature=self.settings.predict_temperature)
        rollout = rollouter.generate(prompts, "predict", group_size=1, sampling=sampling)
        return [
            {name: values[row] for name, values in prompts.columns.items()}
            | {
                "prompt": prompts.prompts[row],
                "completion": text,
                "reasoning": extract_reasoning(text),
                "answer": extract_answer(text),
                "truncated": bool(rollout.truncated[row]),
            }
            for row, text in enumerate(rollout.completions)
        ]
