"""Metrics of held-out prompts: what a batch measures of each prompt, and numbers of all prompts."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import comb, fsum, inf, isnan, nan
from typing import Any

import torch
from torch import Tensor

from litgrpo.argument_types import check_argument_types
from litgrpo.evaluation.intervals import (
    bootstrap_ratio,
    mean_interval,
    proportion_interval,
    wilson_interval,
)
from litgrpo.text.overlap import bleu, bleu_counts, rouge_f, token_f1, without_articles
from litgrpo.types import RewardTable, Rollout

Numbers = tuple[float, ...]


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


def ratio(total: float, count: float) -> float:
    """Return total / count; NaN of nothing."""
    return total / count if count else nan


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if there is none."""
    numbers = [value for value in values if not isnan(value)]
    return ratio(fsum(numbers), len(numbers))


# --- accuracy ---


def count_correct(correct: Tensor) -> list[tuple[int, int]]:
    """Return the number of correct and of scored samples of each prompt.

    `correct` is [B, G]: 1 for correct completions, 0 for others, NaN for unscored ones.
    """
    counts = zip(correct.nansum(1).tolist(), (~correct.isnan()).sum(1).tolist(), strict=True)
    return [(int(successes), int(scored)) for successes, scored in counts]


def sampled_accuracy(
    rows: Sequence[tuple[int, int]], num_samples: int, ks: Sequence[int]
) -> dict[str, float]:
    """Return {avg@k, avg@k_low, avg@k_high, unscored_frac, pass@j for every j}.

    A prompt counts in avg@k by the fraction of its scored samples that are correct, and in pass@j
    if at least j are scored. The rows are those of `count_correct`, k is `num_samples`.
    """
    name, scored_rows = f"avg@{num_samples}", [row for row in rows if row[1]]
    successes, counts = ([row[place] for row in scored_rows] for place in (0, 1))
    low, high = proportion_interval(successes, counts)
    report = {name: mean([ratio(*row) for row in rows]), f"{name}_low": low, f"{name}_high": high}
    report["unscored_frac"] = mean([1 - scored / num_samples for _, scored in rows])
    for k in ks:
        report[f"pass@{k}"] = mean([pass_at_k(n, correct, k) for correct, n in rows if n >= k])
    return report


def greedy_accuracy(correct: Sequence[float]) -> dict[str, float]:
    """Return {greedy, greedy_low, greedy_high, greedy_unscored_frac}, with Wilson's interval.

    `correct` is 1 for correct greedy completions, 0 for others, NaN for unscored ones.
    """
    scored = [value for value in correct if not isnan(value)]
    low, high = wilson_interval(sum(scored), len(scored))
    report = {"greedy": mean(correct), "greedy_low": low, "greedy_high": high}
    return report | {"greedy_unscored_frac": 1 - len(scored) / len(correct)}


# --- rewards ---


def sum_rewards(rewards: RewardTable) -> list[dict[str, tuple[float, int]]]:
    """Return {`reward` or a component: (sum, number of scored samples)} of each prompt."""
    columns = {"reward": rewards.scored} | rewards.components
    sums = {
        name: zip(column.nansum(1).tolist(), (~column.isnan()).sum(1).tolist(), strict=True)
        for name, column in columns.items()
    }
    return [dict(zip(sums, row, strict=True)) for row in zip(*sums.values(), strict=True)]


def reward_means(rows: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """Return {reward, reward_low, reward_high, one entry per component}.

    Means over prompts of the mean over a prompt's scored samples; prompts without one are left out.
    The rows are those of `sum_rewards`; the interval is a bootstrap over prompts.
    """
    values = {name: [ratio(*row[name]) for row in rows] for name in rows[0]}
    rewards = [value for value in values["reward"] if not isnan(value)]
    low, high = bootstrap_ratio(rewards, [1.0] * len(rewards))
    means = {name: mean(column) for name, column in values.items()}
    return {"reward": means["reward"], "reward_low": low, "reward_high": high} | means


# --- episodes ---


def count_turns(rollout: Rollout) -> list[Numbers]:
    """Return turns and fraction with a tool call of each prompt, means over its episodes."""
    turns = [
        (len(episode.assistant_texts), float(bool(episode.calls))) for episode in rollout.episodes
    ]
    table = torch.tensor(turns, dtype=torch.float64).view(-1, rollout.group_size, 2)
    return [(number, calls) for number, calls in table.mean(1).tolist()]


def episode_means(rows: Sequence[Numbers], prefix: str = "") -> dict[str, float]:
    """Return {turns, tool_call_frac}, means over prompts."""
    turns, calls = zip(*rows, strict=True)
    return {f"{prefix}turns": mean(turns), f"{prefix}tool_call_frac": mean(calls)}


# --- text quality ---


NGRAM_SIZES = (1, 2)


def measure_text(rollout: Rollout) -> list[Numbers]:
    """Return fraction that terminated, length, distinct-1 and distinct-2 of each prompt's samples.

    Source: distinct-n: Li et al. 2016, arXiv:1510.03055; per input: Kirk et al. 2024,
    arXiv:2310.06452.
    """
    # These do not use the reward, so they show what a policy that exploits it gives up. distinct-n
    # is the number of different n-grams of tokens over the number of all, in the samples of one
    # prompt together, averaged over prompts: it falls if texts loop, and if the samples of a prompt
    # become the same.
    size, texts = rollout.group_size, rollout.token_lists()
    terminated = (~rollout.truncated).double().view(-1, size).mean(1).tolist()
    lengths = rollout.lengths.double().view(-1, size).mean(1).tolist()
    groups = [texts[first : first + size] for first in range(0, len(texts), size)]
    measured = zip(terminated, lengths, map(distinct_ngrams, groups), strict=True)
    return [(ended, length, *shares) for ended, length, shares in measured]


def text_quality(rows: Sequence[Numbers]) -> dict[str, float]:
    """Return {terminated_frac, len_mean, distinct_1, distinct_2}, means over prompts.

    Prompts without an n-gram in their samples are left out of distinct-n.
    """
    names = ("terminated_frac", "len_mean", *(f"distinct_{n}" for n in NGRAM_SIZES))
    return {name: mean(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def distinct_ngrams(texts: Sequence[Sequence[int]]) -> list[float]:
    """Return different n-grams / all n-grams, for n = 1 and 2; NaN if there are none.

    N-grams do not cross from one text to the next.
    """
    shares = []
    for n in NGRAM_SIZES:
        grams = [tuple(ids[k : k + n]) for ids in texts for k in range(len(ids) - n + 1)]
        shares.append(ratio(len(set(grams)), len(grams)))
    return shares


# --- distance from the initial policy ---


LARGEST_EXPONENT = math.log(sys.float_info.max)


def sum_logprobs(rollout: Rollout, initial_logprobs: Tensor) -> list[Numbers]:
    """Return sums of -log p_initial and log p_now - log p_initial, and tokens, of each prompt.

    `initial_logprobs` are [N, C], of each token under the initial policy.
    """
    mask = rollout.loss_mask
    initial = torch.where(mask, initial_logprobs.to(mask.device), 0.0).double()
    now = torch.where(mask, rollout.sampler_logprobs, 0.0).double()
    sums = torch.stack([-initial.sum(1), (now - initial).sum(1), mask.sum(1).double()], dim=1)
    per_prompt = sums.view(-1, rollout.group_size, 3).sum(1).tolist()
    return [(surprise, distance, tokens) for surprise, distance, tokens in per_prompt]


def initial_distance(rows: Sequence[Numbers]) -> dict[str, float]:
    """Return {initial_perplexity, initial_kl}: perplexity under the initial policy, KL from it."""
    # Perplexity is exp of the mean negative log-probability of a sampled token under the initial
    # policy; the KL is the mean over sampled tokens of log p_now - log p_initial (k1, nats). Both
    # are at the temperature of the evaluation. A perplexity above that of the initial policy's own
    # samples means text that the initial policy would hardly generate; below it, text that became
    # repetitive or generic.
    surprise, distance, tokens = map(fsum, zip(*rows, strict=True))
    nats = ratio(surprise, tokens)
    perplexity = inf if nats > LARGEST_EXPONENT else math.exp(nats)
    return {"initial_perplexity": perplexity, "initial_kl": ratio(distance, tokens)}


# --- corpus metrics ---


ROUGES = ("rouge1", "rouge2", "rougeL")
BLEU_COUNTS = 10


class CorpusMetrics(ABC):
    """Metrics of one reply to every held-out prompt, computed over all of them together."""

    @abstractmethod
    def count(self, reply: str, columns: Mapping[str, Any]) -> Sequence[float]:
        """Compute the numbers that a reply adds.

        Args:
            reply: the text; the greedy one if the evaluation has it.
            columns: {name: value} of the prompt's row in the data.
        """

    @abstractmethod
    def summarize(self, rows: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return {name: number}; `_low` and `_high` are the ends of its interval.

        Args:
            rows: the numbers of every reply, at least one.
        """


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
        self.answers = answers
        self.strip = strip
        self.confidence = confidence

    def count(self, reply: str, columns: Mapping[str, Any]) -> list[float]:
        if self.answers not in columns:
            raise ValueError(
                f"model.evaluation.corpus_metrics.answers is {self.answers!r}; expected the column "
                f"of reference replies, one of {sorted(columns)}."
            )
        return reply_counts(reply, columns[self.answers], self.strip)

    def summarize(self, rows: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return {corpus_bleu, corpus_f1, corpus_rouge1, ...}; all but BLEU have intervals."""
        columns = list(zip(*rows, strict=True))
        sums = [sum(column) for column in columns[:BLEU_COUNTS]]
        report = {"corpus_bleu": bleu(sums, effective_order=False)}
        for name, column in zip(("f1", *ROUGES), columns[BLEU_COUNTS:], strict=True):
            values = [100 * value for value in column]
            low, high = mean_interval(values, self.confidence)
            report |= {f"corpus_{name}": mean(values)}
            report |= {f"corpus_{name}_low": low, f"corpus_{name}_high": high}
        return report


def reply_counts(reply: str, answer: str | Sequence[str], strip: str = "R:") -> list[float]:
    """Return the counts of BLEU, then F1, ROUGE-1, -2 and -L from 0 to 1, of one reply."""
    reply = reply.strip().removeprefix(strip).strip()
    references = [answer] if isinstance(answer, str) else list(answer)
    bare = [without_articles(reference) for reference in references]
    f1 = max(token_f1(without_articles(reply), reference) for reference in bare)
    rouges = [rouge_f(reply, references, kind) for kind in ROUGES]
    return [*map(float, bleu_counts(reply, references)), f1, *rouges]
