"""Loss aggregation: the weight of each token in the loss of one optimizer step."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from litgrpo.argument_types import check_field_types


class LossAggregation(ABC):
    """Weight of each token in the loss of one optimizer step, which is the weighted sum.

    In the formulas m is the mask, and K the number of completions of the step on all ranks.
    """

    @abstractmethod
    def __call__(
        self, mask: Tensor, num_completions: Tensor, num_tokens: Tensor, max_completion_length: int
    ) -> Tensor:
        """[M, C] weights of a step's rows on this rank, 0 off `mask`.

        Args:
            mask: [M, C] 1 marks a token that contributes to the loss; of the weights' dtype.
            num_completions: [] of the optimizer step, over all ranks.
            num_tokens: [] that contribute, over all ranks.
            max_completion_length: in tokens.
        """

    def rescale_micro_batch(self, weights: Tensor, mask: Tensor) -> Tensor:
        """[M, C] weights in one micro-batch; unchanged, or they would depend on the split."""
        return weights


@check_field_types
@dataclass(frozen=True)
class TokenMean(LossAggregation):
    """DAPO (`token_mean`): every token counts the same, m / tokens of the step.

    Source: arXiv:2503.14476, section 3.3. TRL: `dapo`; verl: `token-mean`.
    """

    def __call__(
        self, mask: Tensor, num_completions: Tensor, num_tokens: Tensor, max_completion_length: int
    ) -> Tensor:
        return mask / num_tokens


@check_field_types
@dataclass(frozen=True)
class SequenceMean(LossAggregation):
    """GRPO's paper (`sequence_mean`): every completion counts the same, m / length / K.

    Source: arXiv:2402.03300. TRL: `grpo`; verl: `seq-mean-token-mean`.
    """

    def __call__(
        self, mask: Tensor, num_completions: Tensor, num_tokens: Tensor, max_completion_length: int
    ) -> Tensor:
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / num_completions


@check_field_types
@dataclass(frozen=True)
class ConstantLength(LossAggregation):
    """Dr. GRPO (`constant_length`): m / (K * max_completion_length).

    Source: arXiv:2503.20783. TRL: `dr_grpo`; verl: `seq-mean-token-sum-norm`.
    """

    def __call__(
        self, mask: Tensor, num_completions: Tensor, num_tokens: Tensor, max_completion_length: int
    ) -> Tensor:
        return mask / (num_completions * max_completion_length)


@check_field_types
@dataclass(frozen=True)
class SequenceSum(LossAggregation):
    """LUSPO, RLOO, REINFORCE (`sequence_sum`): the sum over a completion's tokens, m / K.

    Source: arXiv:2602.05261. TRL: `luspo`; verl: `seq-mean-token-sum`.
    """

    def __call__(
        self, mask: Tensor, num_completions: Tensor, num_tokens: Tensor, max_completion_length: int
    ) -> Tensor:
        return mask / num_completions


@check_field_types
@dataclass(frozen=True)
class MicroBatchTokenMean(LossAggregation):
    """BNPO (`micro_batch_token_mean`), discouraged: the mean over each micro-batch's tokens.

    The gradient depends on the split; a micro-batch counts by its share of the step's rows. It
    exists for comparison with TRL's `bnpo`; prefer `token_mean`.
    """

    def __call__(
        self, mask: Tensor, num_completions: Tensor, num_tokens: Tensor, max_completion_length: int
    ) -> Tensor:
        return mask / num_completions

    def rescale_micro_batch(self, weights: Tensor, mask: Tensor) -> Tensor:
        return weights * mask.shape[0] / mask.sum().clamp(min=1)


LossAggregationName: TypeAlias = Literal[
    "token_mean", "sequence_mean", "constant_length", "sequence_sum", "micro_batch_token_mean"
]


LOSS_AGGREGATIONS: dict[str, LossAggregation] = {
    "token_mean": TokenMean(),
    "sequence_mean": SequenceMean(),
    "constant_length": ConstantLength(),
    "sequence_sum": SequenceSum(),
    "micro_batch_token_mean": MicroBatchTokenMean(),
}
