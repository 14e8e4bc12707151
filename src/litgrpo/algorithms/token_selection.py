"""Selections of tokens by a statistic over all tokens of an optimizer step.

They are computed once per step, from the tokens of all ranks, and carried as a mask
(`TrainingBatch.selected`). So they do not depend on micro-batches, padding or the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from litgrpo.distributed.collectives import Comm
from litgrpo.types import TokenRows

HASH_BASE, HASH_MIX = 6364136223846793005, -4417276706812531889  # odd, of 64 bits
KEY_BITS = 24  # a float32 holds them exactly


def token_keys(tokens: TokenRows) -> Tensor:
    """[M, C] float32 pseudorandom number in [0, 1) of each token, a hash of the text up to it."""
    # A hash is the same for any order of rows, any padding and any number of ranks, unlike the
    # numbers of a random generator. It is the sum of (id + 1) * base^position modulo 2^64, over the
    # real tokens of prompt and completion.
    rows, prompt_length = tokens.prompt_of, tokens.prompt_mask.sum(1, keepdim=True)
    prompts = _prefix_hashes(tokens.prompt_ids, tokens.prompt_mask)[:, -1:]
    completions = _prefix_hashes(tokens.completion_ids, tokens.completion_mask, prompt_length[rows])
    mixed = prompts[rows] + completions
    # The high bits depend on all others, the low ones do not: fold and multiply twice.
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 32)) * HASH_MIX
    high: Tensor = (mixed >> 32) & (2**KEY_BITS - 1)
    return high.float().div(2**KEY_BITS)


def _prefix_hashes(ids: Tensor, mask: Tensor, start: Tensor | int = 0) -> Tensor:
    """[R, T] int64 hash of the real tokens up to each one; the first has the position start + 1."""
    position = start + mask.long().cumsum(1)
    powers = torch.full((int(position.max()) + 1,), HASH_BASE, device=ids.device).cumprod(0)
    terms = (ids.long() + 1) * powers[position]
    return terms.masked_fill(~mask.bool(), 0).cumsum(1)


def covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor, comm: Comm) -> Tensor:
    """[M, C] (l - mean of l) (A - mean of A), with the means over all tokens of the step."""
    # The mean over the tokens is the covariance, which is about the decrease of entropy per step.
    # Source: arXiv:2505.22617, eq. 10.
    masked = [torch.where(mask, value.detach().double(), 0.0) for value in (logprobs, advantages)]
    sums = comm.sum(torch.stack([mask.sum().double(), *(value.sum() for value in masked)]))
    l_mean, a_mean = sums[1:] / sums[0].clamp(min=1)
    terms: Tensor = (masked[0] - l_mean) * (masked[1] - a_mean)
    return terms.float()


def smallest(values: Tensor, number: int, keys: Tensor, comm: Comm) -> Tensor:
    """[M, C] True for the `number` smallest values of all ranks; all, if there are fewer.

    Args:
        values: [M, C] numbers to compare; NaN for tokens that cannot be chosen.
        number: of tokens to choose, over all ranks; at least 1.
        keys: [M, C] decide between equal values, see `token_keys`; tokens of equal values and keys
            (the same text twice) are chosen together.
        comm: of the ranks that share the step.
    """
    limit = _nth_smallest(values, number, comm)
    below = values < limit
    tied = keys.where(values == limit, torch.nan)
    missing = number - int(comm.sum(below.sum()))
    return below | (tied <= _nth_smallest(tied, missing, comm))


def _nth_smallest(values: Tensor, number: int, comm: Comm) -> Tensor:
    """[] the `number`-th smallest value of all ranks that is not NaN; NaN if there is none."""
    ascending = _gather_sorted(values, comm)
    if not len(ascending):
        return values.new_tensor(torch.nan)
    return ascending[min(number, len(ascending)) - 1]


def _gather_sorted(values: Tensor, comm: Comm) -> Tensor:
    """[K] the values of all ranks that are not NaN, in ascending order."""
    gathered = comm.gather(values.flatten())
    return gathered[~gathered.isnan()].sort().values


def largest_second_moments(
    log_ratio: Tensor, candidates: Tensor, limit: float, comm: Comm
) -> Tensor:
    """[M, C] the candidates [M, C] to drop: without them, the mean of s^2 is at most `limit`."""
    # M2PO, arXiv:2510.01161, algorithm 1: the largest s^2 are dropped first, equal ones together.
    moments = log_ratio.detach().square().where(candidates, torch.nan)
    ascending = _gather_sorted(moments, comm)
    # The mean of the n smallest rises with n, so the means up to the limit are the first ones.
    count = torch.arange(1, len(ascending) + 1, device=ascending.device)
    num_kept = int((ascending.double().cumsum(0) / count <= limit).sum())
    if num_kept == len(ascending):
        return torch.zeros_like(candidates)
    return moments >= ascending[num_kept]
