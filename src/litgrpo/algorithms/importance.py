"""Ratios of probabilities, and a sampler that disagrees with the trainer."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from litgrpo.tensors import bounded_exp


@dataclass(frozen=True)
class ImportanceCorrection:
    """Weights p_trainer / p_sampler, before the update, for a sampler that is not the trainer.

    Source: Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training.

    Args:
        level: one weight per `token`; per `sequence`, the product over the completion; or `mean`,
            the geometric mean over it, which does not depend on its length.
        outside: `truncate` a weight to [low, high], or `mask` its token or sequence.
        low: least weight.
        high: largest weight; not given: no limit.
        veto: a completion with a token of a weight below this is masked as a whole; 0: none is.
    """

    level: Literal["token", "sequence", "mean"] = "token"
    outside: Literal["truncate", "mask"] = "truncate"
    low: float = 0.0
    high: float | None = 3.0
    veto: float = 0.0

    def __post_init__(self) -> None:
        """Check the bounds."""
        if not 0 <= self.low <= (torch.inf if self.high is None else self.high):
            raise ValueError(f"low {self.low}, high {self.high}: must be 0 <= low <= high")
        if not 0 <= self.veto < 1:
            raise ValueError(f"veto {self.veto}: must be at least 0 (off) and below 1")

    def __call__(self, old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        """[M, C] weights, 1 on padding, or [M, 1]; an unknown (NaN) sampler log-prob agrees."""
        gap = (old_logprobs - sampler_logprobs).masked_fill(~mask, 0.0).nan_to_num(0.0)
        impossible = bounded_exp(gap.amin(1, keepdim=True)) < self.veto
        if self.level != "token":
            tokens = mask.sum(1, keepdim=True).clamp(min=1) if self.level == "mean" else 1
            gap, mask = gap.sum(1, keepdim=True) / tokens, mask.any(1, keepdim=True)
        weight = bounded_exp(gap)
        bounded = weight.clamp(self.low, self.high)
        if self.outside == "mask":
            bounded = torch.where(weight == bounded, weight, 0.0)
        return bounded.masked_fill(impossible, 0.0).masked_fill(~mask, 1.0)
