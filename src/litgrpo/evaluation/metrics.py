"""Metrics of held-out prompts, exact over processes and over repeated rows.

A distributed sampler repeats prompts to fill its last batch, so every metric remembers the prompt
of each number and counts a prompt once.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from math import comb, nan
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from litgrpo.argument_types import check_argument_types
from litgrpo.evaluation.intervals import (
    bootstrap_ratio,
    mean_interval,
    proportion_interval,
    wilson_interval,
)
from litgrpo.text.overlap import bleu, bleu_counts, rouge_f, token_f1, without_articles
from litgrpo.types import RewardTable, Rollout

# States are float32 and flat, the shape and type that a process without prompts contributes; above
# this number float32 cannot represent every integer, so two indices would become equal.
MAX_INDEX = 2**24


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate without bias the probability that at least one of k samples is correct.

    Args:
        num_samples: samples drawn for a prompt, at least k.
        num_correct: number of them that are correct.
        k: number of samples that may be submitted.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1.
    """
    # 1 - C(n - c, k) / C(n, k)
    return 1 - comb(num_samples - num_correct, k) / comb(num_samples, k)


class PromptMetric(Metric):
    """Collects one row of numbers per prompt; a repeated prompt is counted once."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    index: list[Tensor]
    values: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        # {name: one number per prompt} of all processes, in the order of `indices`, by `compute`
        self.per_prompt: dict[str, list[float]] = {}
        self.indices: list[int] = []
        self.add_state("index", default=[], dist_reduce_fx="cat")
        self.add_state("values", default=[], dist_reduce_fx="cat")

    def collect(self, index: Tensor, values: Tensor) -> None:
        """Add a batch.

        Args:
            index: [B] position of each prompt in its data set.
            values: [B, K] numbers to remember.
        """
        if len(index) != len(values):
            raise ValueError(f"got {len(index)} indices for {len(values)} prompts")
        if bool((index >= MAX_INDEX).any()):
            raise ValueError(f"a data set for evaluation may have at most {MAX_INDEX} rows")
        self.index.append(index.float())
        self.values.append(values.float().flatten())

    def rows(self, num_values: int) -> list[list[float]]:
        """Return [B, K] numbers of every prompt, each prompt once, in the order of the data set."""
        self.indices = []
        if not len(self.index):
            return []
        index = dim_zero_cat(self.index).tolist()
        values = dim_zero_cat(self.values).view(-1, num_values).tolist()
        # Reversed, so that the first of several rows of a prompt stays.
        first = dict(zip(reversed(index), reversed(values), strict=True))
        self.indices = [int(place) for place in sorted(first)]
        return [first[place] for place in self.indices]


class SampledAccuracy(PromptMetric):
    """Accuracy of sampled completions: avg@k with its interval, and pass@j.

    Args:
        num_samples: k, completions per prompt.
        ks: the js of pass@j, each at most k.
        confidence: coverage of the interval, which is clustered by prompt.
    """

    def __init__(
        self, num_samples: int, ks: Sequence[int] = (1,), confidence: float = 0.95
    ) -> None:
        super().__init__()
        too_large = [k for k in ks if not 1 <= k <= num_samples]
        if num_samples < 1 or too_large:
            raise ValueError(
                f"pass@{too_large or ks} cannot be estimated from {num_samples} samples; "
                "choose k from 1 to the number of samples"
            )
        self.num_samples = num_samples
        self.ks = tuple(ks)
        self.confidence = confidence

    def update(self, index: Tensor, correct: Tensor) -> None:
        """Add a batch.

        Args:
            index: [B] position of each prompt in its data set.
            correct: [B, k] 1 for correct completions, 0 for others, NaN for unscored ones.
        """
        if tuple(correct.shape[1:]) != (self.num_samples,):
            given = tuple(correct.shape)
            raise ValueError(f"expected {self.num_samples} samples per prompt, got shape {given}")
        correct = correct.float()
        self.collect(index, torch.stack([correct.nansum(1), (~correct.isnan()).sum(1)], dim=1))

    def compute(self) -> dict[str, Tensor]:
        """Return {avg@k, avg@k_low, avg@k_high, unscored_frac, pass@j for every j}.

        A prompt counts in avg@k by the fraction of its scored samples that are correct, and in
        pass@j if at least j are scored. NaN without such a prompt.
        """
        rows = [(int(correct), int(scored)) for correct, scored in self.rows(2)]
        name, known = f"avg@{self.num_samples}", [row for row in rows if row[1]]
        self.per_prompt = {name: [correct / n if n else nan for correct, n in rows]}
        successes, counts = [[row[place] for row in known] for place in (0, 1)]
        low, high = proportion_interval(successes, counts, self.confidence)
        report = {name: _mean([correct / n for correct, n in known])}
        report |= {f"{name}_low": low, f"{name}_high": high}
        report["unscored_frac"] = _mean([1 - scored / self.num_samples for _, scored in rows])
        for k in self.ks:
            report[f"pass@{k}"] = _mean([pass_at_k(n, correct, k) for correct, n in rows if n >= k])
        return _tensors(report, self.device)


class GreedyAccuracy(PromptMetric):
    """Accuracy of one greedy completion per prompt, with Wilson's interval.

    Args:
        confidence: coverage of the interval.
    """

    def __init__(self, confidence: float = 0.95) -> None:
        super().__init__()
        self.confidence = confidence

    def update(self, index: Tensor, correct: Tensor) -> None:
        """Add a batch.

        Args:
            index: [B] position of each prompt in its data set.
            correct: [B] 1 for correct completions, 0 for others, NaN for unscored ones.
        """
        if correct.shape != index.shape:
            raise ValueError(f"expected shape {tuple(index.shape)}, got {tuple(correct.shape)}")
        self.collect(index, correct[:, None])

    def compute(self) -> dict[str, Tensor]:
        """Return {greedy, greedy_low, greedy_high, greedy_unscored_frac}; NaN if none is scored."""
        correct = [row[0] for row in self.rows(1)]
        self.per_prompt = {"greedy": correct}
        known = [each for each in correct if not math.isnan(each)]
        low, high = wilson_interval(sum(known), len(known), self.confidence)
        report = {"greedy": _mean(known), "greedy_low": low, "greedy_high": high}
        report["greedy_unscored_frac"] = _mean([float(math.isnan(each)) for each in correct])
        return _tensors(report, self.device)


class RewardMeans(PromptMetric):
    """Mean total reward of valid completions, and mean of every component over those it scored.

    Args:
        names: names of the components.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)

    def update(self, index: Tensor, rewards: RewardTable) -> None:
        """Add a batch.

        Args:
            index: [B] position of each prompt in its data set.
            rewards: the rewards of its completions, [B, G].
        """
        columns = [rewards.scored]
        columns += [rewards.components[name] for name in self.names]
        sums = [column.nansum(1) for column in columns]
        counts = [(~column.isnan()).sum(1) for column in columns]
        # [B, 2 (1 + components)]
        self.collect(index, torch.stack([*sums, *counts], dim=1).to(index.device))

    def compute(self) -> dict[str, Tensor]:
        """Return {reward, reward_low, reward_high, one entry per component}; NaN if unscored.

        The interval is a bootstrap over prompts and is omitted for fewer than two of them.
        """
        names = ("reward", *self.names)
        rows = self.rows(2 * len(names))
        table = torch.tensor(rows, dtype=torch.float64).view(-1, 2, len(names))
        sums, counts = table.unbind(1)  # [B, 1 + components] each
        self.per_prompt = dict(zip(names, (sums / counts).T.tolist(), strict=True))
        means = dict(zip(names, (sums.sum(0) / counts.sum(0)).tolist(), strict=True))
        bounds = bootstrap_ratio(sums[:, 0].tolist(), counts[:, 0].tolist())
        interval = zip(("reward_low", "reward_high"), bounds, strict=True)
        known = {name: bound for name, bound in interval if math.isfinite(bound)}
        return _tensors({"reward": means["reward"]} | known | means, self.device)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else torch.nan


def _tensors(report: dict[str, float], device: torch.device) -> dict[str, Tensor]:
    return {name: torch.tensor(value, device=device) for name, value in report.items()}


# --- episodes ---


EPISODE_NAMES = ("turns", "tool_call_frac")


class EpisodeMeans(PromptMetric):
    """Turns of an episode, and fraction of episodes with a tool call.

    Args:
        prefix: prefix of the metrics' names.
    """

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix

    def update(self, index: Tensor, rollout: Rollout) -> None:
        """Add a batch; completions without an environment count as unknown.

        Args:
            index: [B] position of each prompt in its data set.
            rollout: G samples of each prompt.
        """
        # Every process must contribute the same shapes, so that counts can be gathered.
        seen = torch.full((len(EPISODE_NAMES), len(rollout.completion_ids)), torch.nan)
        for row, episode in enumerate(rollout.episodes):
            seen[:, row] = torch.tensor(
                [float(len(episode.assistant_texts)), float(bool(episode.calls))]
            )
        means = seen.view(len(EPISODE_NAMES), -1, rollout.group_size).mean(2)
        self.collect(index, means.T.contiguous().to(index.device))

    def compute(self) -> dict[str, Tensor]:
        """Return {turns, tool_call_frac}, means over prompts with episodes; {} without one."""
        rows = torch.tensor(self.rows(len(EPISODE_NAMES)), dtype=torch.float64)
        means = rows.view(-1, len(EPISODE_NAMES)).nanmean(0).float().to(self.device)
        names = [f"{self.prefix}{name}" for name in EPISODE_NAMES]
        return {} if means.isnan().any() else dict(zip(names, means, strict=True))


# --- text quality ---


NGRAM_SIZES = (1, 2)


class TextQuality(PromptMetric):
    """Length, fraction that terminated, and distinct-n of the samples of each prompt.

    These do not use the reward, so they show what a policy that exploits it gives up. distinct-n is
    the number of different n-grams of tokens over the number of all, in the samples of one prompt
    together, averaged over prompts: it falls if texts loop, and if the samples of a prompt become
    the same.

    Source: distinct-n: Li et al. 2016, arXiv:1510.03055; per input: Kirk et al. 2024,
    arXiv:2310.06452.
    """

    def update(self, index: Tensor, rollout: Rollout) -> None:
        """Add a batch.

        Args:
            index: [B] position of each prompt in its data set.
            rollout: G samples of each prompt.
        """
        texts = rollout.token_lists()
        lengths = rollout.lengths.float().view(-1, rollout.group_size)
        terminated = 1 - rollout.truncated.float().view_as(lengths)
        shares = [
            distinct_ngrams(texts[first : first + rollout.group_size])
            for first in range(0, len(texts), rollout.group_size)
        ]
        measured = torch.stack([terminated.mean(1), lengths.mean(1)], dim=1)
        both = torch.hstack([measured.cpu(), torch.tensor(shares)])
        self.collect(index, both.to(index.device))

    def compute(self) -> dict[str, Tensor]:
        """Return {terminated_frac, len_mean, distinct_1, distinct_2}, means over prompts.

        Prompts without an n-gram in their samples are left out of distinct-n; NaN without others.
        """
        names = ("terminated_frac", "len_mean", *(f"distinct_{n}" for n in NGRAM_SIZES))
        rows = torch.tensor(self.rows(len(names)), dtype=torch.float64)
        means = rows.view(-1, len(names)).nanmean(0).float().to(self.device)
        return dict(zip(names, means, strict=True))


class InitialPolicyDistance(PromptMetric):
    """Perplexity of the samples under the initial policy, and the KL divergence from it.

    Perplexity is exp of the mean negative log-probability of a sampled token under the initial
    policy; the KL is the mean over sampled tokens of log p_now - log p_initial (k1, nats).
    Both are at the temperature of the evaluation. A perplexity above that of the initial policy's
    own samples means text that the initial policy would hardly generate; below it, text that became
    repetitive or generic.
    """

    def update(self, index: Tensor, rollout: Rollout, initial_logprobs: Tensor) -> None:
        """Add a batch.

        Args:
            index: [B] position of each prompt in its data set.
            rollout: G samples of each prompt.
            initial_logprobs: [N, C] log-probability of each token under the initial policy.
        """
        mask = rollout.loss_mask
        initial = torch.where(mask, initial_logprobs.to(mask.device), 0.0)
        now = torch.where(mask, rollout.sampler_logprobs, 0.0)
        sums = torch.stack([-initial.sum(1), (now - initial).sum(1), mask.sum(1).float()], dim=1)
        per_prompt = sums.view(len(rollout.prompts), rollout.group_size, 3).sum(1)
        self.collect(index, per_prompt.to(index.device))

    def compute(self) -> dict[str, Tensor]:
        """Return {initial_perplexity, initial_kl}; NaN without a sampled token."""
        columns = zip(*self.rows(3), strict=True)
        surprise, distance, tokens = [math.fsum(column) for column in columns] or [nan] * 3
        tokens = tokens or nan
        numbers = {
            "initial_perplexity": math.exp(min(surprise / tokens, 700.0)),
            "initial_kl": distance / tokens,
        }
        return {name: torch.tensor(each, device=self.device) for name, each in numbers.items()}


def distinct_ngrams(texts: Sequence[Sequence[int]]) -> list[float]:
    """Return different n-grams / all n-grams, for n = 1 and 2; NaN if there are none.

    Args:
        texts: token ids of each text; n-grams do not cross from one to the next.

    Example:
        >>> distinct_ngrams([[7, 7, 7], [7, 8]])
        [0.4, 0.6666666666666666]
    """
    shares = []
    for n in NGRAM_SIZES:
        grams = [tuple(ids[k : k + n]) for ids in texts for k in range(len(ids) - n + 1)]
        shares.append(len(set(grams)) / len(grams) if grams else nan)
    return shares


# --- corpus metrics ---


ROUGES = ("rouge1", "rouge2", "rougeL")
BLEU_COUNTS = 10


class CorpusMetrics(PromptMetric):
    """Metrics of one reply to every held-out prompt, computed over all of them together."""

    @abstractmethod
    def update(self, index: Tensor, replies: Sequence[str], columns: dict[str, list[Any]]) -> None:
        """Add a batch.

        Args:
            index: [B] position of each prompt in its data set.
            replies: B texts, the greedy ones if the evaluation has them.
            columns: {name: list of B} of the data set.
        """

    @abstractmethod
    def compute(self) -> dict[str, Tensor]:
        """Return {name: number}; `_low` and `_high` are the ends of its interval."""


class DialogueScores(CorpusMetrics):
    """F1, ROUGE-1, ROUGE-2, ROUGE-L and corpus BLEU of replies, all times 100, as in LAPDOG.

    F1 after SQuAD's normalization (lower case, no punctuation, no articles), ROUGE F-measures of
    the package rouge-score, BLEU of the package sacrebleu; means over prompts with their
    intervals.

    Args:
        answers: column of the reference replies, texts or lists of texts; the nearest counts.
        strip: prefix to remove from a reply.
        confidence: coverage of the intervals.

    Example:
        >>> DialogueScores(answers="replies", confidence=0.9).answers
        'replies'
    """

    @check_argument_types()
    def __init__(
        self, answers: str = "answers", strip: str = "R:", confidence: float = 0.95
    ) -> None:
        super().__init__()
        self.answers = answers
        self.strip = strip
        self.confidence = confidence

    def update(self, index: Tensor, replies: Sequence[str], columns: dict[str, list[Any]]) -> None:
        """Add a batch; see `CorpusMetrics.update`."""
        if self.answers not in columns:
            raise ValueError(
                f"model.evaluation.corpus_metrics.answers is {self.answers!r}; expected the column "
                f"of reference replies, one of {sorted(columns)}."
            )
        pairs = zip(replies, columns[self.answers], strict=True)
        counts = [reply_counts(reply, answer, self.strip) for reply, answer in pairs]
        self.collect(index, torch.tensor(counts, device=index.device))

    def compute(self) -> dict[str, Tensor]:
        """Return {corpus_bleu, corpus_f1, corpus_rouge1, _rouge2, _rougeL}; NaN without prompts.

        All but BLEU have intervals, `_low` and `_high`.
        """
        names = ("f1", *ROUGES)
        rows = self.rows(BLEU_COUNTS + len(names))
        if not rows:
            unknown = torch.tensor(nan, device=self.device)
            return {f"corpus_{name}": unknown for name in ("bleu", *names)}
        sums = [sum(column) for column in zip(*rows, strict=True)]
        report = {"corpus_bleu": bleu(sums[:BLEU_COUNTS], effective_order=False)}
        for place, name in enumerate(names, start=BLEU_COUNTS):
            values = [100 * row[place] for row in rows]
            low, high = mean_interval(values, self.confidence)
            report[f"corpus_{name}"] = sum(values) / len(values)
            report |= {f"corpus_{name}_low": low, f"corpus_{name}_high": high}
        return {name: torch.tensor(value, device=self.device) for name, value in report.items()}


def reply_counts(reply: str, answer: str | Sequence[str], strip: str = "R:") -> list[float]:
    """Compute the counts that one reply adds to the metrics of a corpus.

    Args:
        reply: the text.
        answer: its reference, or several.
        strip: prefix to remove from it.

    Returns:
        The counts of BLEU, then F1, ROUGE-1, ROUGE-2 and ROUGE-L from 0 to 1.
    """
    reply = reply.strip().removeprefix(strip).strip()
    references = [answer] if isinstance(answer, str) else list(answer)
    bare = [without_articles(reference) for reference in references]
    f1 = max(token_f1(without_articles(reply), reference) for reference in bare)
    rouges = [rouge_f(reply, references, kind) for kind in ROUGES]
    return [*map(float, bleu_counts(reply, references)), f1, *rouges]
