"""Evaluation on held-out prompts: sample, count successes, and report them with intervals."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from math import isfinite, isnan
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import at_least, one_of
from litgrpo.distributed.collectives import Comm, SingleProcess
from litgrpo.evaluation.metrics import (
    CorpusMetrics,
    EpisodeMeans,
    GreedyAccuracy,
    InitialPolicyDistance,
    RewardMeans,
    SampledAccuracy,
    TextQuality,
)
from litgrpo.rewards.reward import find_success_rewards
from litgrpo.rewards.scorer import Scorer
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.rollout.sampling import Purpose, Sampling
from litgrpo.text import extract_answer, extract_reasoning
from litgrpo.types import PromptBatch, RewardTable, Rollout

# [N, C] log-probabilities of a rollout under the initial policy.
InitialLogprobs = Callable[[Rollout], Tensor]


@check_field_types
@dataclass(frozen=True)
class Evaluation:
    """Settings of the evaluation on held-out prompts.

    Args:
        num_samples: k, sampled completions per prompt (verl: val_kwargs.n); avg@k is their mean
            success.
        pass_at_k: pass@j for each j listed: the probability that one of j completions succeeds.
        temperature: sampling temperature of the held-out completions.
        greedy: also generate one greedy completion per prompt.
        success_reward: the reward that decides whether a completion is correct; null: the one with
            the largest weight, of equal ones the first. Of a task that it does not score, it is the
            one with the largest weight of those that do.
        success_threshold: a completion is correct if that reward is at least this. A completion
            that the reward does not score (None) is left out of accuracies.
        predict_temperature: temperature of the completions of `predict`; 0: greedy.
        predict_top_p: top-p of `predict`, if `predict_temperature` is above 0; 1: off.
        corpus_metrics: metrics of one reply to every prompt, such as `DialogueScores`, of the
            greedy reply, or without `greedy` of the first sample.
        text_quality: measure length, fraction that terminated, and distinct-n of the samples, and
            their perplexity and KL under the initial policy.

    Example:
        >>> Evaluation(num_samples=8, pass_at_k=[1, 8], success_reward="correct").greedy
        True
    """

    num_samples: int = 4
    pass_at_k: list[int] = field(default_factory=lambda: [1, 4])
    temperature: float = 1.0
    greedy: bool = True
    success_reward: str | None = None
    success_threshold: float = 1.0
    predict_temperature: float = 0.0
    predict_top_p: float = 1.0
    corpus_metrics: CorpusMetrics | None = None
    text_quality: bool = True

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 < self.predict_top_p <= 1:
            given = f"model.evaluation.predict_top_p is {self.predict_top_p}"
            raise ValueError(f"{given}; it must be above 0 and at most 1 (off).")
        at_least("model.evaluation.num_samples", self.num_samples, 1)
        for k in self.pass_at_k:
            if not 1 <= k <= self.num_samples:
                raise ValueError(
                    f"model.evaluation.pass_at_k contains {k}; it must be from 1 to "
                    f"model.evaluation.num_samples, {self.num_samples}. Raise num_samples or "
                    f"remove {k}."
                )


def format_success_rule(rewards: Mapping[str, str], threshold: float) -> str:
    """Write when a completion is correct.

    Args:
        rewards: {task: the reward that decides there}, "" for all others.
        threshold: a completion is correct from here on.

    Example:
        >>> format_success_rule({"": "correct"}, 1.0)
        "reward 'correct' >= 1"
        >>> format_success_rule({"": "correct", "chat": "judge"}, 0.5)
        "reward 'correct' >= 0.5, of task 'chat' reward 'judge' >= 0.5"
    """
    other = {task: name for task, name in rewards.items() if name != rewards[""]}
    rules = [f"of task {task!r} reward {name!r}" for task, name in other.items()]
    return ", ".join(f"{rule} >= {threshold:g}" for rule in (f"reward {rewards['']!r}", *rules))


# Names of metrics of an evaluation, which no reward may have.
RESERVED = {"reward", "reward_low", "reward_high", "greedy", "greedy_low", "greedy_high"}
RESERVED |= {"unscored_frac", "greedy_unscored_frac"}
RESERVED |= {"terminated_frac", "len_mean", "distinct_1", "distinct_2"}
RESERVED |= {"initial_perplexity", "initial_kl"}
RESERVED |= {"turns", "tool_call_frac", "greedy_turns", "greedy_tool_call_frac"}


class SetMetrics:
    """Metrics of one set of held-out prompts.

    Args:
        settings: evaluation settings.
        reward_names: names of the reward components.
        device: device of the metrics.
    """

    def __init__(
        self, settings: Evaluation, reward_names: Sequence[str], device: torch.device
    ) -> None:
        self.sampled = SampledAccuracy(settings.num_samples, settings.pass_at_k)
        self.greedy = GreedyAccuracy()
        self.rewards = RewardMeans(reward_names)
        self.episodes, self.greedy_episodes = EpisodeMeans(), EpisodeMeans("greedy_")
        self.text_quality = TextQuality()
        self.initial_distance = InitialPolicyDistance()
        self.corpus = settings.corpus_metrics
        # The metrics that are reported. `initial_distance` is not among them: see `report`.
        self.metrics: list[Metric] = [self.sampled, self.rewards]
        if settings.greedy:
            self.metrics += [self.greedy, self.greedy_episodes]
        self.metrics.append(self.episodes)
        if self.corpus is not None:
            self.metrics.append(self.corpus)
        if settings.text_quality:
            self.metrics.append(self.text_quality)
        self.without_initial: list[Rollout] = []  # samples that `initial_distance` has not seen
        for metric in (*self.metrics, self.initial_distance):
            metric.to(device)

    def measure_initial_distance(self, initial_logprobs: InitialLogprobs) -> None:
        """Add the samples that lack log-probabilities under the initial policy."""
        for rollout in self.without_initial:
            indices = rollout.prompts.index
            self.initial_distance.update(indices, rollout, initial_logprobs(rollout))
        self.without_initial = []

    def report(
        self, *, with_initial_distance: bool
    ) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Return {name: number}, and {name: one number per prompt} with `index`, over all ranks.

        Args:
            with_initial_distance: also report the distance from the initial policy.
        """
        report: dict[str, float] = {}
        for metric in self.metrics:
            report |= compute_and_reset(metric)
        if with_initial_distance:
            report |= compute_and_reset(self.initial_distance)
        per_prompt = {"index": list(map(float, self.sampled.indices))}
        for metric in (self.sampled, self.greedy, self.rewards):
            per_prompt |= metric.per_prompt
        return report, per_prompt


def compute_and_reset(metric: Metric) -> dict[str, float]:
    """Return {name: number} of a metric, and reset it.

    A mean of nothing, NaN, is left out with its interval, and so is an infinite interval.
    """
    values = {name: float(value) for name, value in metric.compute().items()}
    metric.reset()
    known = {}
    for name, value in values.items():
        mean = re.sub("_(low|high)$", "", name)
        if not isnan(values.get(mean, value)) and (name == mean or isfinite(value)):
            known[name] = value
    return known


@dataclass(frozen=True)
class Evaluated:
    """Completions and rewards of a batch of held-out prompts.

    Args:
        rollout: k samples of each prompt.
        rewards: [B, k] their rewards.
        correct: [B, k] 1.0 for samples that succeeded, 0.0 for others, NaN for unscored ones.
        greedy: greedy completion of each prompt; None without `Evaluation.greedy`.
        greedy_rewards: [B, 1] their rewards.
        greedy_correct: [B, 1] the same of the greedy completions.
        name: name of the set of prompts, "" if there is only one.

    Example:
        Two prompts with two samples each, without greedy completions::

            Evaluated(
                rollout=Rollout(...),
                rewards=RewardTable(...),
                correct=tensor([[1.0, 0.0], [0.0, 0.0]]),
            )
    """

    rollout: Rollout
    rewards: RewardTable
    correct: Tensor
    greedy: Rollout | None = None
    greedy_rewards: RewardTable | None = None
    greedy_correct: Tensor | None = None
    name: str = ""


class Evaluator:
    """Evaluates a policy on prompts with rewards.

    Args:
        settings: evaluation settings.
        scorer: computes rewards.
        ignored: rewards that never decide whether a completion is correct.

    Raises:
        ValueError: `settings.success_reward` is not a reward, or a reward has the name of a metric.

    Example:
        One evaluation, as the module does it::

            evaluator = Evaluator(Evaluation(num_samples=2, pass_at_k=[1, 2]), scorer)
            evaluator.start(device)
            for iteration, prompts in enumerate(loader):
                evaluator.evaluate(rollouter, prompts, "val", iteration)
            evaluator.report("val")  # {"val/avg@2": 0.42, "val/avg@2_low": 0.37, ...}
    """

    def __init__(self, settings: Evaluation, scorer: Scorer, ignored: Collection[str] = ()) -> None:
        names = list(scorer.components)
        self.settings = settings
        self.scorer = scorer
        if settings.success_reward is not None:
            one_of("model.evaluation.success_reward", settings.success_reward, names)
        # {task: the reward that decides there}, "" for all others
        self.success_rewards = find_success_rewards(
            {name: weight for name, weight in scorer.weights.items() if name not in ignored},
            {name: each.tasks for name, each in scorer.components.items()},
            settings.success_reward,
        )
        taken = sorted(RESERVED & set(names))
        if taken:
            raise ValueError(
                f"rewards cannot be named {', '.join(taken)}: an evaluation has a metric of that "
                "name. Rename them in model.rewards."
            )
        # Set by the module; None if the initial policy has to be loaded later, by the module's
        # `complete_evaluation`.
        self.initial_logprobs: InitialLogprobs | None = None
        self.metrics: dict[str, SetMetrics] = {}  # of each set of prompts, "" if only one
        # Of the last report: {set: {name: one number per prompt}}.
        self.per_prompt: dict[str, dict[str, list[float]]] = {}
        # True if the last report lacks the distance from the initial policy.
        self.is_incomplete, self.stage = False, "val"
        self.without_initial: dict[str, list[Rollout]] = {}
        self.start(torch.device("cpu"))

    def start(self, device: torch.device, names: Sequence[str] = ("",)) -> None:
        """Start new metrics.

        Args:
            device: device of prompts and rewards.
            names: names of the sets of prompts. Every rank has the metrics of all sets, including
                sets of which it has no prompt.
        """
        self.device, self.metrics = device, {}
        settings = self.settings
        for name in names:
            self.metrics[name] = SetMetrics(settings, list(self.scorer.components), device)
            # A metric has state, so each set needs a copy.
            settings = replace(settings, corpus_metrics=copy.deepcopy(settings.corpus_metrics))

    @property
    def success_rule(self) -> str:
        """Rule by which a completion is correct, such as `reward 'correct' >= 1`."""
        return format_success_rule(self.success_rewards, self.settings.success_threshold)

    @property
    def sampling(self) -> Sampling:
        """Sampling settings for completions of held-out prompts."""
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
        """Generate completions of a batch of prompts and update the metrics.

        Args:
            rollouter: generates completions.
            prompts: B prompts.
            purpose: `val` or `test`; each has its own random numbers, the same every time.
            iteration: number of finished iterations.
            name: name of the set of prompts, if there are several.
        """
        settings, metrics = self.settings, self.metrics[name]
        rollout = rollouter.generate(
            prompts, purpose, iteration, group_size=settings.num_samples, sampling=self.sampling
        )
        pending = self.scorer.start(rollout, iteration)
        replies, greedy = rollout.completions[:: settings.num_samples], None
        if settings.greedy:  # reward functions score the samples in other processes meanwhile
            greedy = rollouter.generate(
                prompts, purpose, iteration, group_size=1, sampling=Sampling(temperature=0.0)
            )
            replies = greedy.completions
        if settings.text_quality:
            metrics.text_quality.update(prompts.index, rollout)
            metrics.without_initial.append(rollout)
        if self.initial_logprobs is not None:
            metrics.measure_initial_distance(self.initial_logprobs)
        rewards = pending.wait()
        correct = self.find_correct(rewards)
        metrics.sampled.update(prompts.index, correct)
        metrics.rewards.update(prompts.index, rewards)
        metrics.episodes.update(prompts.index, rollout)
        evaluated = Evaluated(rollout, rewards, correct, name=name)
        if greedy is not None:
            greedy_rewards = self.scorer.start(greedy, iteration).wait()
            greedy_correct = self.find_correct(greedy_rewards)
            metrics.greedy_episodes.update(prompts.index, greedy)
            metrics.greedy.update(prompts.index, greedy_correct.squeeze(1))
            evaluated = replace(
                evaluated,
                greedy=greedy,
                greedy_rewards=greedy_rewards,
                greedy_correct=greedy_correct,
            )
        if metrics.corpus is not None:
            metrics.corpus.update(prompts.index, replies, prompts.columns)
        return evaluated

    def find_correct(self, rewards: RewardTable) -> Tensor:
        """Return [B, G] 1.0 for correct completions, 0.0 for others, NaN for unscored ones."""
        threshold = self.settings.success_threshold
        return rewards.find_correct(self.success_rewards, threshold).to(self.device)

    def report(self, stage: str, comm: Comm = SingleProcess()) -> dict[str, float]:  # noqa: B008
        """Return {`stage`/name: number} of everything since the last report.

        With several sets of prompts {`stage`/set/name: number}. `per_prompt` then holds {set:
        {name: one number per prompt}}.

        Args:
            stage: `val` or `test`.
            comm: communication between the ranks.
        """
        has_distance = self.settings.text_quality and self.initial_logprobs is not None
        self.stage, self.is_incomplete = stage, self.settings.text_quality and not has_distance
        report: dict[str, float] = {}
        self.per_prompt = {}
        # Adding up the metrics of a set is a collective operation, so all processes must agree on
        # the sets: `trainer.limit_val_batches` may skip some, and a rank may have no prompt of one.
        updated = [float(each.sampled.update_called) for each in self.metrics.values()]
        seen = comm.max(torch.tensor(updated, device=self.device)).tolist()
        for name, metrics in compress(self.metrics.items(), seen):
            numbers, self.per_prompt[name] = metrics.report(with_initial_distance=has_distance)
            report |= self._add_prefix(name, numbers)
            self.without_initial[name], metrics.without_initial = metrics.without_initial, []
        return report

    def measure_initial_distance(self, initial_logprobs: InitialLogprobs) -> None:
        """Measure the samples of the last report under the initial policy."""
        for name, rollouts in self.without_initial.items():
            self.metrics[name].without_initial = rollouts
            self.metrics[name].measure_initial_distance(initial_logprobs)
        self.without_initial = {}

    def complete(self) -> dict[str, float]:
        """Return the {`stage`/name: number} that the last report lacks.

        Call `measure_initial_distance` first.
        """
        report: dict[str, float] = {}
        for name in self.per_prompt:
            distance = compute_and_reset(self.metrics[name].initial_distance)
            report |= self._add_prefix(name, distance)
        self.is_incomplete = False
        return report

    def _add_prefix(self, name: str, numbers: dict[str, float]) -> dict[str, float]:
        prefix = f"{self.stage}/{name}" if name else self.stage
        return {f"{prefix}/{key}": value for key, value in numbers.items()}

    def predict(self, rollouter: Rollouter, prompts: PromptBatch) -> list[dict[str, Any]]:
        """Generate one completion of each prompt.

        Returns:
            One dict per prompt: prompt, completion, reasoning, answer, truncated, and the columns
            of the data under `columns`; of an episode also messages, turn_rewards, calls, failed.
        """
        settings = self.settings
        sampling = Sampling(temperature=settings.predict_temperature, top_p=settings.predict_top_p)
        rollout = rollouter.generate(prompts, "predict", group_size=1, sampling=sampling)
        return [
            {
                "prompt": rollout.prompts.prompts[row],  # with the text an environment added
                "completion": text,
                "reasoning": extract_reasoning(text),
                "answer": extract_answer(text),
                "truncated": bool(rollout.truncated[row]),
                "columns": {name: values[row] for name, values in prompts.columns.items()},
            }
            | _describe_episode(rollout, row)
            for row, text in enumerate(rollout.completions)
        ]


def _describe_episode(rollout: Rollout, row: int) -> dict[str, Any]:
    """Return the fields of a prediction that only an episode has."""
    if not rollout.episodes:
        return {}
    assert rollout.turn_rewards is not None
    episode = rollout.episodes[row]
    rewards = rollout.turn_rewards[row, : len(episode.assistant_texts)].tolist()
    return {
        "messages": episode.messages,
        "turn_rewards": [None if isnan(reward) else reward for reward in rewards],
        "calls": {name: list(counts) for name, counts in episode.calls.items()},
        "failed": episode.failed,
    }
