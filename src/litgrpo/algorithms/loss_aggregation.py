"""Published weightings beside those by sequence and by token, which are in `objective`."""

from dataclasses import dataclass

from torch import Tensor

from litgrpo.algorithms.losses import LossAggregation


@dataclass(frozen=True)
class Constant(LossAggregation):
    """Every token counts the same, always: Dr. GRPO, m / (N * max_completion_length), or m / N.

    Source: arXiv:2503.20783. A completion's sum, m / N: LUSPO, arXiv:2602.05261; RLOO; REINFORCE.

    Args:
        by_limit: divide by the length limit, too.
    """

    by_limit: bool = True

    def __call__(self, mask: Tensor, rows: Tensor, tokens: Tensor, limit: int) -> Tensor:
        """[N, C] m / (N * limit), or m / N."""
        return mask / (rows * (limit if self.by_limit else 1))


@dataclass(frozen=True)
class MicroBatchTokenMean(LossAggregation):
    """BNPO, discouraged: a mean over each micro-batch's tokens; the gradient depends on the split.

    A micro-batch of M rows counts M / N. For comparison with TRL's `bnpo`; prefer `TokenMean`.
    """

    def __call__(self, mask: Tensor, rows: Tensor, tokens: Tensor, limit: int) -> Tensor:
        """[N, C] m / N, shared out in `within`."""
        return mask / rows

    def within(self, weights: Tensor, mask: Tensor) -> Tensor:
        """[M, C] weights times rows over tokens of the micro-batch."""
        return weights * mask.shape[0] / mask.sum().clamp(min=1)
