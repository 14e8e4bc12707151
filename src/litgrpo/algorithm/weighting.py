"""Weightings: how much one token counts. Published normalizations differ in nothing else."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


class Weighting(ABC):
    """How much each token counts in the loss of one optimizer step, which is then a plain sum."""

    @abstractmethod
    def __call__(self, mask: Tensor, rows: Tensor, tokens: Tensor, limit: int) -> Tensor:
        """[N, C] weights, 0 off `mask`; the step has `rows` and `tokens` over all processes."""

    def within(self, weights: Tensor, mask: Tensor) -> Tensor:
        """[M, C] weights inside one micro-batch: the same, or they would depend on the split."""
        return weights


@dataclass(frozen=True)
class PerSequence(Weighting):
    """GRPO: every completion counts the same, m / length / N. Source: arXiv:2402.03300."""

    def __call__(self, mask: Tensor, rows: Tensor, tokens: Tensor, limit: int) -> Tensor:
        """[N, C] m / length / N."""
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / rows


@dataclass(frozen=True)
class PerToken(Weighting):
    """DAPO: every token counts the same, m / tokens. Source: arXiv:2503.14476, section 3.3."""

    def __call__(self, mask: Tensor, rows: Tensor, tokens: Tensor, limit: int) -> Tensor:
        """[N, C] m / tokens."""
        return mask / tokens


@dataclass(frozen=True)
class Constant(Weighting):
    """Every token counts the same, always: Dr. GRPO, m / (N * max_completion_len), or m / N.

    Source: arXiv:2503.20783. A completion's sum, m / N: LUSPO, arXiv:2602.05261; RLOO; REINFORCE.

    Args:
        by_limit: divide by the length limit, too.
    """

    by_limit: bool = True

    def __call__(self, mask: Tensor, rows: Tensor, tokens: Tensor, limit: int) -> Tensor:
        """[N, C] m / (N * limit), or m / N."""
        return mask / (rows * (limit if self.by_limit else 1))


@dataclass(frozen=True)
class PerTokenOfMicroBatch(Weighting):
    """BNPO, discouraged: a mean over each micro-batch's tokens; the gradient depends on the split.

    A micro-batch of M rows counts M / N. For comparison with TRL's `bnpo`; prefer `PerToken`.
    """

    def __call__(self, mask: Tensor, rows: Tensor, tokens: Tensor, limit: int) -> Tensor:
        """[N, C] m / N, shared out in `within`."""
        return mask / rows

    def within(self, weights: Tensor, mask: Tensor) -> Tensor:
        """[M, C] weights times rows over tokens of the micro-batch."""
        return weights * mask.shape[0] / mask.sum().clamp(min=1)
