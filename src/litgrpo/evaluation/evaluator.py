"""Evaluation on held-out prompts: sample, count successes, and report them with intervals."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, isnan
from typing import Any

from torch import Tensor

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import at_least, one_of
from litgrpo.distributed.collectives import all_gather_object
from litgrpo.evaluation.metrics import (
    CorpusMetrics,
    count_correct,
    count_turns,
    episode_means,
    greedy_accuracy,
    initial_distance,
    measure_text,
    reward_means,
    sampled_accuracy,
    sum_logprobs,
    sum_rewards,
    text_quality,
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
        if not 0 < self.predict_top_p <= 1:
            problem = f"model.evaluation.predict_top_p is {self.predict_top_p}"
            raise ValueError(f"{problem}; it must be above 0 and at most 1 (off).")
        at_least("model.evaluation.num_samples", self.num_samples, 1)
        for k in self.pass_at_k:
            if not 1 <= k <= self.num_samples:
                raise ValueError(
                    f"model.evaluation.pass_at_k contains {k}; it must be from 1 to "
                    f"model.evaluation.num_samples, {self.num_samples}. Raise num_samples or "
                    f"remove {k}."
                )


def format_success_rule(rewards: Mapping[str, str], threshold: float) -> str:
    """Write when a completion is correct; `rewards` are those of `Evaluator.success_rewards`."""
    other = {task: name for task, name in rewards.items() if name != rewards[""]}
    rules = [f"of task {task!r} reward {name!r}" for task, name in other.items()]
    return ", ".join(f"{rule} >= {threshold:g}" for rule in (f"reward {rewards['']!r}", *rules))


# Names of metrics of an evaluation, which no reward may have.
RESERVED = {"reward", "reward_low", "reward_high", "greedy", "greedy_low", "greedy_high"}
RESERVED |= {"unscored_frac", "greedy_unscored_frac"}
RESERVED |= {"terminated_frac", "len_mean", "distinct_1", "distinct_2"}
RESERVED |= {"initial_perplexity", "initial_kl"}
RESERVED |= {"turns", "tool_call_frac", "greedy_turns", "greedy_tool_call_frac"}


# What was measured of one prompt: {kind: the numbers that a function of `metrics` returns for it}.
Row = dict[str, Any]


def summarize_rows(rows: Sequence[Row], settings: Evaluation) -> dict[str, float]:
    """Return {name: number} of all prompts, at least one.

    A kind that a prompt lacks is left out. So is a mean of nothing, NaN, with its interval, and an
    infinite interval.
    """
    kinds = set.intersection(*map(set, rows))
    columns = {kind: [row[kind] for row in rows] for kind in kinds}
    numbers = sampled_accuracy(columns["sampled"], settings.num_samples, settings.pass_at_k)
    numbers |= reward_means(columns["rewards"])
    if "greedy" in kinds:
        numbers |= greedy_accuracy(columns["greedy"])
    if "greedy_episodes" in kinds:
        numbers |= episode_means(columns["greedy_episodes"], "greedy_")
    if "episodes" in kinds:
        numbers |= episode_means(columns["episodes"])
    if settings.corpus_metrics is not None:
        numbers |= settings.corpus_metrics.summarize(columns["corpus"])
    if "text" in kinds:
        numbers |= text_quality(columns["text"])
    if "distance" in kinds:
        numbers |= initial_distance(columns["distance"])
    report = {}
    for name, value in numbers.items():
        mean = re.sub("_(low|high)$", "", name)
        if not isnan(numbers.get(mean, value)) and (name == mean or isfinite(value)):
            report[name] = value
    return report


@dataclass(frozen=True)
class Evaluated:
    """Completions and rewards of a batch of held-out prompts."""

    rollout: Rollout  # k samples of each prompt
    rewards: RewardTable  # [B, k] their rewards
    correct: Tensor  # [B, k] 1.0 for samples that succeeded, 0.0 for others, NaN for unscored ones
    # greedy completion of each prompt; None without `Evaluation.greedy`
    greedy: Rollout | None = None
    greedy_rewards: RewardTable | None = None  # [B, 1] their rewards
    greedy_correct: Tensor | None = None  # [B, 1] as `correct`
    name: str = ""  # name of the set of prompts, "" if there is only one
    definitions: Mapping[str, str] = field(default_factory=dict)  # `Evaluator.definitions`


class Evaluator:
    """Evaluates a policy on prompts with rewards: `evaluate` each batch, then `report`.

    `ignored` rewards never decide whether a completion is correct.
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
            {name: reward.tasks for name, reward in scorer.components.items()},
            settings.success_reward,
        )
        taken = sorted(RESERVED & set(names))
        if taken:
            raise ValueError(
                f"rewards cannot be named {', '.join(taken)}: an evaluation has a metric of that "
                "name. Rename them in model.rewards."
            )
        self.rows: dict[str, dict[int, Row]] = {}  # {set of prompts, "" if only one: {index: row}}
        self.samples: dict[str, list[Rollout]] = {}  # of each set, since the last report
        self.start()

    def start(self, names: Sequence[str] = ("",)) -> None:
        """Forget what was measured; every rank names all sets, also those it has no prompt of."""
        self.rows = {name: {} for name in names}
        self.samples = {name: [] for name in names}

    @property
    def success_rule(self) -> str:
        """Rule by which a completion is correct, such as `reward 'correct' >= 1`."""
        return format_success_rule(self.success_rewards, self.settings.success_threshold)

    def definitions(self, weights: Mapping[str, float]) -> dict[str, str]:
        """Return those of `Scorer.definitions`, and under `correct` the success rule."""
        definitions = self.scorer.definitions(weights)
        functions = {definitions[f"rewards/{name}"] for name in self.success_rewards.values()}
        return {"correct": f"{self.success_rule} ({', '.join(sorted(functions))})", **definitions}

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
        """Generate completions of a batch of prompts, score them, and keep what is measured.

        `val` and `test` each have their own random numbers, the same in every iteration.
        """
        settings = self.settings
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
        measured: dict[str, Sequence[Any]] = {}
        if settings.text_quality:
            measured["text"] = measure_text(rollout)
            self.samples[name].append(rollout)
        if settings.corpus_metrics is not None:
            measured["corpus"] = [
                settings.corpus_metrics.count(
                    reply, {column: values[b] for column, values in prompts.columns.items()}
                )
                for b, reply in enumerate(replies)
            ]
        rewards = pending.wait()
        correct = self.find_correct(rewards)
        measured |= {"sampled": count_correct(correct), "rewards": sum_rewards(rewards)}
        if rollout.episodes:
            measured["episodes"] = count_turns(rollout)
        definitions = self.definitions(rewards.weights)
        evaluated = Evaluated(rollout, rewards, correct, name=name, definitions=definitions)
        if greedy is not None:
            greedy_rewards = self.scorer.start(greedy, iteration).wait()
            greedy_correct = self.find_correct(greedy_rewards)
            measured["greedy"] = greedy_correct.squeeze(1).tolist()
            if greedy.episodes:
                measured["greedy_episodes"] = count_turns(greedy)
            evaluated = replace(
                evaluated,
                greedy=greedy,
                greedy_rewards=greedy_rewards,
                greedy_correct=greedy_correct,
            )
        self._add(name, prompts, measured)
        return evaluated

    def _add(self, name: str, prompts: PromptBatch, measured: Mapping[str, Sequence[Any]]) -> None:
        """Add what was measured of a batch to its rows; of a repeated prompt the first stays."""
        for b, index in enumerate(prompts.index.tolist()):
            row = self.rows[name].setdefault(index, {})
            for kind, values in measured.items():
                row.setdefault(kind, values[b])

    def measure_initial_distance(self, initial_logprobs: InitialLogprobs) -> None:
        """Measure the samples since the last report under the initial policy."""
        for name, rollouts in self.samples.items():
            for rollout in rollouts:
                distances = sum_logprobs(rollout, initial_logprobs(rollout))
                self._add(name, rollout.prompts, {"distance": distances})

    def find_correct(self, rewards: RewardTable) -> Tensor:
        """Return [B, G] 1.0 for correct completions, 0.0 for others, NaN for unscored ones."""
        threshold = self.settings.success_threshold
        return rewards.find_correct(self.success_rewards, threshold)

    def report(self, stage: str) -> dict[str, float]:
        """Return {`stage`/name: number} of everything since the last report, over all ranks.

        With several sets of prompts {`stage`/set/name: number}. Every rank must call this. A
        sampler repeats prompts so that ranks have equally many; each counts once.
        """
        of_ranks = all_gather_object(self.rows)
        report: dict[str, float] = {}
        for name in self.rows:
            # Reversed, so that the first of several rows of a prompt stays.
            merged = {
                n: row
                for rows_of_rank in reversed(of_ranks)
                for n, row in rows_of_rank[name].items()
            }
            if rows := {index: merged[index] for index in sorted(merged)}:
                prefix = f"{stage}/{name}" if name else stage
                numbers = summarize_rows(list(rows.values()), self.settings)
                report |= {f"{prefix}/{key}": value for key, value in numbers.items()}
        self.start(list(self.rows))
        return report

    def predict(self, rollouter: Rollouter, prompts: PromptBatch) -> list[dict[str, Any]]:
        """Generate one completion of each prompt; return one dict per prompt."""
        # prompt, completion, reasoning, answer, truncated, and the columns of the data under
        # `columns`; of an episode also messages, turn_rewards, calls, failed.
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
    episode = rollout.episodes[row]
    return {
        "messages": episode.messages,
        "turn_rewards": episode.turn_rewards,
        "calls": {name: list(counts) for name, counts in episode.calls.items()},
        "failed": episode.failed,
    }
