"""Forward pass of transformers over a rollout: the baseline of all other log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from litgrpo.models.policy import Policy
from litgrpo.rollout.sampling import Sampling
from litgrpo.tensors import row_mean, widen
from litgrpo.types import Rollout


@dataclass(frozen=True)
class ReferenceForward:
    """Log-probabilities of a rollout from a plain forward pass, row by row and without padding."""

    logprobs: Tensor  # [N, C] among all tokens, after temperature
    least: Tensor  # [N, C] smallest that the sampler can have, given its filters
    most: Tensor  # [N, C] largest; differs from `least` at the edge of a filter
    out_of_support: Tensor  # [N, C] distance (nats) below the candidate set; 0 inside

    def sampler_error(self, rollout: Rollout) -> float:
        """Largest distance of the sampler's log-probabilities from the possible ones."""
        return float(self.sampler_gaps(rollout).max())

    def sampler_gaps(self, rollout: Rollout) -> Tensor:
        """[N] distance of each row, mean over its tokens."""
        logprobs = rollout.sampler_logprobs
        off = torch.maximum(self.least - logprobs, logprobs - self.most).clamp(min=0)
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
    """Score each completion after its prompt (`prompt_of` [N], or n // G) in a separate pass.

    `slack` is the tolerance of a probability at the edge of a filter.
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
        scores = (widen(logits[0, :-1]) / sampling.policy_temperature).log_softmax(-1)
        logprobs = scores.gather(-1, tokens[:, None]).squeeze(-1)
        (wide, edge), (narrow, _) = (kept_mass(scores, sampling, by) for by in (slack, -slack))
        off = (edge - logprobs - slack).clamp(min=0)
        parts[:, row, :length] = torch.stack([logprobs, logprobs - wide, logprobs - narrow, off])
    return ReferenceForward(*parts)


def kept_mass(scores: Tensor, sampling: Sampling, slack: float) -> tuple[Tensor, Tensor]:
    """Apply the sampling filters to log-probabilities [n, V], independently of the sampler.

    Return the log-probability [n] of the candidate set, and [n] of its least likely token.
    """
    if not (sampling.has_filters or sampling.greedy):
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
