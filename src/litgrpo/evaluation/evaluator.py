"""Answers held-out prompts, counts successes, and reports them with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
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


class Counts:
    """What is counted of one set of held-out prompts.

    Args:
        settings: how prompts are answered and counted.
        parts: names of the rewards.
        device: where it is counted.
    """

    def __init__(self, settings: Evaluation, parts: Sequence[str], device: torch.device) -> None:
        self.sampled = SampledAccuracy(settings.samples, settings.pass_at)
        self.greedy = GreedyAccuracy()
        self.rewards = RewardMeans(parts)
        self.corpus = settings.corpus
        self.metrics: list[Metric] = [self.sampled, self.rewards]
        self.metrics += [self.greedy] * settings.greedy
        self.metrics += [] if self.corpus is None else [self.corpus]
        for metric in self.metrics:
            metric.to(device)


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
        self.counts: dict[str, Counts] = {}  # of each set of prompts, "" where there is only one
        self.start(torch.device("cpu"))

    def start(self, device: torch.device, names: Sequence[str] = ("",)) -> None:
        """Count on this device from now on.

        Args:
            device: where prompts and rewards are.
            names: of the sets of prompts. Every process counts all of them, also those of which it
                sees no prompt.
        """
        self.device, self.counts = device, {}
        parts, settings = list(self.scorer.parts), self.settings
        for name in names:
            self.counts[name] = Counts(settings, parts, device)
            settings = replace(settings, corpus=deepcopy(settings.corpus))  # each counts its own

    def evaluate(
        self,
        rollouter: Rollouter,
        prompts: PromptBatch,
        purpose: Purpose,
        iteration: int,
        *,
        name: str = "",
    ) -> tuple[Rollout, RewardTable]:
        """Answer prompts and count successes.

        Args:
            rollouter: samples.
            prompts: B prompts.
            purpose: `val` or `test`: each has random numbers of its own, the same every time.
            iteration: number of finished iterations.
            name: of the set of prompts, where there are several.

        Returns:
            The sampled rollout and its rewards.
        """
        settings, counts = self.settings, self.counts[name]
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
        counts.sampled.update(prompts.index, self._successes(rewards))
        counts.rewards.update(prompts.index, rewards)
        if settings.greedy:
            successes = self._successes(self.scorer.submit(greedy, iteration).result())
            counts.greedy.update(prompts.index, successes.squeeze(1))
        if counts.corpus is not None:
            counts.corpus.update(prompts.index, replies, prompts.columns)
        return rollout, rewards

    def _successes(self, rewards: RewardTable) -> Tensor:
        """[B, G] True where the reward that counts reached its threshold."""
        part = rewards.parts[self.success]
        successes = (part >= self.settings.threshold) & rewards.valid
        return successes.to(self.device)

    def report(self, stage: str) -> dict[str, float]:
        """{`stage`/name: number} of everything counted since the last report.

        With several sets of prompts {`stage`/set/name: number}.
        """
        report: dict[str, float] = {}
        # Sets that the trainer's limits leave out were answered by no process.
        seen = {name: each for name, each in self.counts.items() if each.sampled.update_called}
        for set_name, counts in seen.items():
            path = "/".join(filter(None, (stage, set_name)))
            for metric in counts.metrics:
                values = metric.compute().items()
                report |= {f"{path}/{name}": float(value) for name, value in values}
                metric.reset()
        return report

    def predict(self, rollouter: Rollouter, prompts: PromptBatch) -> list[dict[str, Any]]:
        """Answer prompts.

        Returns:
            One dict per prompt: prompt, completion, reasoning, answer, truncated, other columns.
        """
        asked = self.settings
        sampling = Sampling(temperature=asked.predict_temperature, top_p=asked.predict_top_p)
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
