"""Answers held-out prompts, counts successes, and reports them with intervals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from math import isnan
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from litgrpo.arguments import one_of, require
from litgrpo.distributed.collectives import Comm, SingleProcess
from litgrpo.evaluation.accuracy import GreedyAccuracy, RewardMeans, SampledAccuracy
from litgrpo.evaluation.episodes import Played
from litgrpo.evaluation.fluency import Fluency, StartFluency
from litgrpo.evaluation.settings import Evaluation
from litgrpo.rewards.scorer import Scorer
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.rollout.sampling import Purpose, Sampling
from litgrpo.text import extract_answer, extract_reasoning
from litgrpo.types import PromptBatch, RewardTable, Rollout

# [N, C] log-probabilities of a rollout under the weights that training started from.
StartLogprobs = Callable[[Rollout], Tensor]


# Numbers of an evaluation beside those of its rewards.
RESERVED = {"reward", "reward_low", "reward_high", "greedy", "greedy_low", "greedy_high"}
RESERVED |= {"ended_frac", "len_mean", "distinct_1", "distinct_2", "start_perplexity", "start_kl"}
RESERVED |= {"turns", "called_frac", "greedy_turns", "greedy_called_frac"}


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
        self.played, self.greedy_played = Played(), Played("greedy_")
        self.fluency = Fluency()
        self.start = StartFluency()
        self.corpus = settings.corpus
        self.metrics: list[Metric] = [self.sampled, self.rewards]
        self.metrics += [self.greedy, self.greedy_played] * settings.greedy + [self.played]
        self.metrics += [] if self.corpus is None else [self.corpus]
        self.metrics += [self.fluency] * settings.fluency
        self.unscored: list[Rollout] = []  # not yet seen by the start of training
        for metric in (*self.metrics, self.start):
            metric.to(device)

    def score(self, start_logprobs: StartLogprobs) -> None:
        """Ask the start of training about the samples that it has not seen."""
        for rollout in self.unscored:
            self.start.update(rollout.prompts.index, rollout, start_logprobs(rollout))
        self.unscored = []

    def numbers(self, *, scored: bool) -> tuple[dict[str, float], dict[str, list[float]]]:
        """{name: number}, and {name: one number per prompt} with `index`, of all processes.

        Args:
            scored: whether the start of training has seen the samples.
        """
        report: dict[str, float] = {}
        for metric in [*self.metrics, *[self.start] * scored]:
            report |= values_of(metric)
        of_prompts = {"index": list(map(float, self.sampled.places))}
        for metric in (self.sampled, self.greedy, self.rewards):
            of_prompts |= metric.of_prompts
        return report, of_prompts


def values_of(metric: Metric) -> dict[str, float]:
    """{name: number} of a metric, which is empty afterwards."""
    values = {name: float(value) for name, value in metric.compute().items()}
    metric.reset()
    return values


@dataclass(frozen=True)
class Evaluated:
    """What a batch of held-out prompts was answered.

    Args:
        rollout: k samples of each prompt.
        rewards: [B, k] theirs.
        greedy: the most likely completion of each prompt; None where it was not asked for.
        greedy_rewards: [B, 1] theirs.
        right: [B, k] True where a sample succeeded.
        greedy_right: [B, 1] the same of the most likely completions.
        name: of the set of prompts, "" where there is only one.
    """

    rollout: Rollout
    rewards: RewardTable
    right: Tensor
    greedy: Rollout | None = None
    greedy_rewards: RewardTable | None = None
    greedy_right: Tensor | None = None
    name: str = ""


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
        taken = sorted(RESERVED & set(names))
        require(
            not taken,
            f"a reward cannot be named {taken}: an evaluation has a number of that name already.",
        )
        # What the start of training says; None where it has to be asked for later, by `complete`.
        self.start_logprobs: StartLogprobs | None = None
        self.counts: dict[str, Counts] = {}  # of each set of prompts, "" where there is only one
        # Of the last report: {set: {name: one number per prompt}}, and what waits for `complete`.
        self.of_prompts: dict[str, dict[str, list[float]]] = {}
        self.stage, self.waiting = "val", False
        self.unscored: dict[str, list[Rollout]] = {}
        self.start(torch.device("cpu"))

    def start(self, device: torch.device, names: Sequence[str] = ("",)) -> None:
        """Count on this device from now on.

        Args:
            device: where prompts and rewards are.
            names: of the sets of prompts. Every process counts all of them, also those of which it
                sees no prompt.
        """
        self.device, self.counts = device, {}
        parts, first = list(self.scorer.parts), self.settings
        for name in names:
            self.counts[name] = Counts(first, parts, device)
            first = replace(first, corpus=copy.deepcopy(first.corpus))  # each counts its own

    @property
    def sampling(self) -> Sampling:
        """How held-out prompts are sampled."""
        return Sampling(temperature=self.settings.temperature)

    def evaluate(
        self,
        rollouter: Rollouter,
        prompts: PromptBatch,
        purpose: Purpose,
        iteration: int,
        *,
        name: str = "",
    ) -> Evaluated:
        """Answer prompts and count successes.

        Args:
            rollouter: samples.
            prompts: B prompts.
            purpose: `val` or `test`: each has random numbers of its own, the same every time.
            iteration: number of finished iterations.
            name: of the set of prompts, where there are several.
        """
        settings, counts = self.settings, self.counts[name]
        sampled: dict[str, Any] = {"group_size": settings.samples, "sampling": self.sampling}
        rollout = rollouter.generate(prompts, purpose, iteration, **sampled)
        pending = self.scorer.start(rollout, iteration)
        replies, greedy = rollout.completions[:: settings.samples], None
        if settings.greedy:  # while reward functions of other processes judge the samples
            likely: dict[str, Any] = {"group_size": 1, "sampling": Sampling(temperature=0.0)}
            greedy = rollouter.generate(prompts, purpose, iteration, **likely)
            replies = greedy.completions
        if settings.fluency:
            counts.fluency.update(prompts.index, rollout)
            counts.unscored.append(rollout)
        if self.start_logprobs is not None:
            counts.score(self.start_logprobs)
        rewards = pending.wait()
        right = self._successes(rewards)
        counts.sampled.update(prompts.index, right)
        counts.rewards.update(prompts.index, rewards)
        counts.played.update(prompts.index, rollout)
        answered = Evaluated(rollout, rewards, right, name=name)
        if greedy is not None:
            judged = self.scorer.start(greedy, iteration).wait()
            likely_right = self._successes(judged)
            counts.greedy_played.update(prompts.index, greedy)
            counts.greedy.update(prompts.index, likely_right.squeeze(1))
            answered = replace(
                answered, greedy=greedy, greedy_rewards=judged, greedy_right=likely_right
            )
        if counts.corpus is not None:
            counts.corpus.update(prompts.index, replies, prompts.columns)
        return answered

    def _successes(self, rewards: RewardTable) -> Tensor:
        """[B, G] True where the reward that counts reached its threshold."""
        part = rewards.parts[self.success]
        successes = (part >= self.settings.threshold) & rewards.valid
        return successes.to(self.device)

    def report(self, stage: str, comm: Comm = SingleProcess()) -> dict[str, float]:  # noqa: B008
        """{`stage`/name: number} of everything counted since the last report.

        With several sets of prompts {`stage`/set/name: number}. `of_prompts` then holds {set:
        {name: one number per prompt}}.

        Args:
            stage: `val` or `test`.
            comm: the processes that counted. A set is reported by all of them where one answered a
                prompt of it: adding up their counts is a collective operation.
        """
        scored = self.settings.fluency and self.start_logprobs is not None
        self.stage, self.waiting = stage, self.settings.fluency and not scored
        report: dict[str, float] = {}
        self.of_prompts = {}
        # Sets that the trainer's limits leave out were answered by no process.
        answered = [float(each.sampled.update_called) for each in self.counts.values()]
        seen = comm.max(torch.tensor(answered, device=self.device)).tolist()
        for name, counts in compress(self.counts.items(), seen):
            numbers, self.of_prompts[name] = counts.numbers(scored=scored)
            report |= self._named(name, numbers)
            self.unscored[name], counts.unscored = counts.unscored, []
        return report

    def score(self, start_logprobs: StartLogprobs) -> None:
        """Ask the start of training about the samples of the last report."""
        for name, rollouts in self.unscored.items():
            self.counts[name].unscored = rollouts
            self.counts[name].score(start_logprobs)
        self.unscored = {}

    def complete(self) -> dict[str, float]:
        """{`stage`/name: number}: what the last report lacked, after `score`."""
        report: dict[str, float] = {}
        for name in self.of_prompts:  # sets that were left out were answered by nobody
            report |= self._named(name, values_of(self.counts[name].start))
        self.waiting = False
        return report

    def _named(self, name: str, numbers: dict[str, float]) -> dict[str, float]:
        path = "/".join(filter(None, (self.stage, name)))
        return {f"{path}/{key}": value for key, value in numbers.items()}

    def predict(self, rollouter: Rollouter, prompts: PromptBatch) -> list[dict[str, Any]]:
        """Answer prompts.

        Returns:
            One dict per prompt: prompt, completion, reasoning, answer, truncated, other columns; of
            an episode also messages, turn_rewards, calls, failed.
        """
        asked = self.settings
        sampling = Sampling(temperature=asked.predict_temperature, top_p=asked.predict_top_p)
        rollout = rollouter.generate(prompts, "predict", group_size=1, sampling=sampling)
        return [
            {name: values[row] for name, values in prompts.columns.items()}
            | {
                "prompt": rollout.prompts.prompts[row],  # with what an environment added
                "completion": text,
                "reasoning": extract_reasoning(text),
                "answer": extract_answer(text),
                "truncated": bool(rollout.truncated[row]),
            }
            | _episode(rollout, row)
            for row, text in enumerate(rollout.completions)
        ]


def _episode(rollout: Rollout, row: int) -> dict[str, Any]:
    """What a file of predictions holds of an episode; nothing of a single turn."""
    if not rollout.episodes:
        return {}
    assert rollout.turn_rewards is not None
    played = rollout.episodes[row]
    rewards = rollout.turn_rewards[row, : len(played.assistant_texts)].tolist()
    return {
        "messages": played.messages,
        "turn_rewards": [None if isnan(reward) else reward for reward in rewards],
        "calls": {name: list(counts) for name, counts in played.calls.items()},
        "failed": played.failed,
    }
