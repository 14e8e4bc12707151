"""The library's own forward pass over a rollout: what all other log-probabilities must equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from litgrpo.models.policy import Policy
from litgrpo.rollout.sampling import Sampling
from litgrpo.tensors import row_mean, widened
from litgrpo.types import Rollout


@dataclass(frozen=True)
class ReferenceForward:
    """What the library's own forward pass says of a rollout, row by row and without padding.

    Args:
        logprobs: [N, C] log-probability among all tokens, after temperature.
        least: [N, C] least log-probability that a sampler can have had, given its filters.
        most: [N, C] the largest; it differs from the least where a token is at a filter's edge.
        out_of_support: [N, C] how far (nats) a token is below those that may be drawn; 0: not
            at all.
    """

    logprobs: Tensor
    least: Tensor
    most: Tensor
    out_of_support: Tensor

    def sampler_error(self, rollout: Rollout) -> float:
        """Distance of the sampler's log-probabilities from the possible ones."""
        return float(self.sampler_gaps(rollout).max())

    def sampler_gaps(self, rollout: Rollout) -> Tensor:
        """[N] the same for each row."""
        given = rollout.sampler_logprobs
        off = torch.maximum(self.least - given, given - self.most).clamp(min=0)
        off = off + self.out_of_support
        return row_gaps(off, rollout.loss_mask)


@torch.no_grad()
def reference_forward(
    policy: Policy,
    rollout: Rollout,
    sampling: Sampling,
    slack: float,
    prompt_of: Tensor | None = None,
) -> ReferenceForward:
    """Score each completion after its prompt by a forward pass of its own.

    Args:
        policy: whose library model is asked.
        rollout: N completions.
        sampling: what they were drawn by.
        slack: how much a probability may be off at the edge of a filter.
        prompt_of: [N] the prompts to score them after; not given: n // G.
    """
    policy.train(False)
    prompts, rows = rollout.prompts, torch.arange(len(rollout.completion_ids))
    prompt_of = rows // rollout.group_size if prompt_of is None else prompt_of
    parts = rollout.sampler_logprobs.new_zeros(4, *rollout.completion_ids.shape)
    lengths = rollout.completion_mask.sum(1).tolist()
    for row, prompt, length in zip(rows, prompt_of, lengths, strict=True):
        ids = prompts.prompt_ids[prompt][prompts.prompt_mask[prompt]][None]
        tokens = rollout.completion_ids[row, :length]
        logits = policy.dense_logits(ids, torch.ones_like(ids, dtype=torch.bool), tokens[None])
        scores = (widened(logits[0, :-1]) / sampling.policy_temperature).log_softmax(-1)
        logprobs = scores.gather(-1, tokens[:, None]).squeeze(-1)
        (wide, edge), (narrow, _) = (kept(scores, sampling, by) for by in (slack, -slack))
        off = (edge - logprobs - slack).clamp(min=0)
        parts[:, row, :length] = torch.stack([logprobs, logprobs - wide, logprobs - narrow, off])
    return ReferenceForward(*parts)


def kept(scores: Tensor, sampling: Sampling, slack: float) -> tuple[Tensor, Tensor]:
    """Which tokens the filters leave, written down a second time and independently.

    Args:
        scores: [n, V] log-probabilities.
        sampling: the filters.
        slack: keep a little more, or less where it is negative.

    Returns:
        [n] log-probability of all tokens that are left, and [n] of the least likely of them.
    """
    if not (sampling.truncated or sampling.greedy):
        return scores.new_zeros(len(scores)), scores.new_full((len(scores),), -torch.inf)
    probs = scores.double().exp().sort(-1, descending=True).values
    keep = torch.arange(probs.shape[-1], device=probs.device) < (sampling.top_k or probs.shape[-1])
    share = probs * keep / (probs * keep).sum(-1, keepdim=True)
    keep = keep & (share > 0)
    if sampling.top_p < 1:
        keep = keep & (share.cumsum(-1) - share < sampling.top_p + slack)
    keep = keep & (probs >= sampling.min_p * (1 - slack) * probs[:, :1])
    keep[:, 0] = True
    edge = probs[:, 0] if sampling.greedy else probs.masked_fill(~keep, 1.0).amin(-1)
    return (probs * keep).sum(-1).log().to(scores.dtype), edge.log().to(scores.dtype)


def row_gaps(gaps: Tensor, mask: Tensor) -> Tensor:
    """[N] mean absolute gap of each row of [N, C] over its real tokens."""
    return row_mean(gaps.masked_fill(~mask, 0.0).abs(), mask).squeeze(1)
