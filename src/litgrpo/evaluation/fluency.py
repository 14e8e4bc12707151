"""Whether samples are still good text: what a reward that is gamed pays with.

Every number here is judged without the reward: how likely the text was under the weights that
training started from, how much of it repeats itself, whether it ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from litgrpo.evaluation.accuracy import PerPrompt
from litgrpo.types import Rollout

ORDERS = (1, 2)  # of the n-grams that are counted


class Fluency(PerPrompt):
    """Length, share that ended, and distinct-n of the samples of each prompt.

    distinct-n is the number of different n-grams of tokens over the number of all, in the samples
    of one prompt together, averaged over prompts: it falls when texts loop, and when the samples
    of a prompt become the same.

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
        ended = 1 - rollout.truncated.float().view_as(lengths)
        shares = [
            distinct_ngrams(texts[first : first + rollout.group_size])
            for first in range(0, len(texts), rollout.group_size)
        ]
        measured = torch.stack([ended.mean(1), lengths.mean(1)], dim=1)
        both = torch.hstack([measured.cpu(), torch.tensor(shares)])
        self.collect(index, both.to(index.device))

    def compute(self) -> dict[str, Tensor]:
        """{ended_frac, len_mean, distinct_1, distinct_2}, means over prompts."""
        names = ("ended_frac", "len_mean", *(f"distinct_{n}" for n in ORDERS))
        rows = torch.tensor(self.rows(len(names)), dtype=torch.float64)
        means = rows.view(-1, len(names)).mean(0).float().to(self.device)
        return dict(zip(names, means, strict=True))


class StartFluency(PerPrompt):
    """How the samples look to the weights that training started from.

    Perplexity is exp of the mean negative log-probability of a sampled token under the start; the
    KL is the mean over sampled tokens of log p_now - log p_start (nats, estimator k1). Both are at
    the temperature of the evaluation. A perplexity above that of the start's own samples means
    text that the start would hardly have written; below it, text that became plain.
    """

    def update(self, index: Tensor, rollout: Rollout, start_logprobs: Tensor) -> None:
        """Add a batch.

        Args:
            index: [B] position of each prompt in its data set.
            rollout: G samples of each prompt.
            start_logprobs: [N, C] log-probability of each token under the start.
        """
        mask = rollout.loss_mask
        start = torch.where(mask, start_logprobs.to(mask.device), 0.0)
        now = torch.where(mask, rollout.sampler_logprobs, 0.0)
        sums = torch.stack([-start.sum(1), (now - start).sum(1), mask.sum(1).float()], dim=1)
        of_prompts = sums.view(len(rollout.prompts), rollout.group_size, 3).sum(1)
        self.collect(index, of_prompts.to(index.device))

    def compute(self) -> dict[str, Tensor]:
        """{start_perplexity, start_kl}."""
        surprise, distance, tokens = (math.fsum(c) for c in zip(*self.rows(3), strict=True))
        numbers = {
            "start_perplexity": math.exp(min(surprise / tokens, 700.0)),
            "start_kl": distance / tokens,
        }
        return {name: torch.tensor(each, device=self.device) for name, each in numbers.items()}


def distinct_ngrams(texts: Sequence[Sequence[int]]) -> list[float]:
    """Different n-grams over all n-grams, for n = 1 and 2; 1 where there are none.

    Args:
        texts: token ids of each text; no n-gram reaches from one to the next.

    Example:
        >>> distinct_ngrams([[7, 7, 7], [7, 8]])
        [0.4, 0.6666666666666666]
    """
    shares = []
    for n in ORDERS:
        grams = [tuple(ids[k : k + n]) for ids in texts for k in range(len(ids) - n + 1)]
        shares.append(len(set(grams)) / len(grams) if grams else 1.0)
    return shares
