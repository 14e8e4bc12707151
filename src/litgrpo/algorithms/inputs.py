"""Inputs of surrogates, masks and terms, and the names of what has to be computed for them."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from litgrpo.types import TokenLogprobs, TrainingBatch

# What a part of the objective needs beside log-probabilities and entropies of the current policy:
#   ref_logprobs      log-probabilities of the sampled tokens under the reference
#   ref_hidden        hidden states of the reference, for `TokenLogprobs.divergence`
#   policy_logprobs   log-probabilities before the update, whatever the number of optimizer steps
#   before_step       log-probabilities and entropies of all rows before each optimizer step
#   entropy_gradient  entropies with a gradient
#   all_rows          a pass of rows without an advantage as well: they have a gradient
Need: TypeAlias = Literal[
    "ref_logprobs", "ref_hidden", "policy_logprobs", "before_step", "entropy_gradient", "all_rows"
]


@dataclass(frozen=True)
class SurrogateInputs:
    """Inputs of a surrogate loss; every field is finite, 0 or 1 on padding.

    Args:
        logprobs: [M, C] l, log-probabilities under the current policy, with gradient.
        log_ratio: [M, C] s = l - l_old, l_old of `Objective.old_policy`, with gradient.
        ratio: [M, C] or [M, 1] w, importance ratio of the update, with gradient.
        advantages: [M, C] A.
        mask: [M, C] tokens that contribute to the loss.
        sampler_weight: [M, C] or [M, 1] importance weight of the trainer over the sampler; 1
            without `importance_correction`.
        selected: [M, C] tokens that a `StepSurrogate` selected; None for other surrogates.

    Example:
        One completion of two tokens, the second one became twice as likely::

            SurrogateInputs(
                logprobs=tensor([[-1.0, -0.69]]),
                log_ratio=tensor([[0.0, 0.69]]),
                ratio=tensor([[1.0, 2.0]]),
                advantages=tensor([[0.7, 0.7]]),
                mask=tensor([[True, True]]),
                sampler_weight=tensor([[1.0, 1.0]]),
            )
    """

    logprobs: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    mask: Tensor
    sampler_weight: Tensor
    selected: Tensor | None = None

    @property
    def old_logprobs(self) -> Tensor:
        """[M, C] l_old, without gradient."""
        return (self.logprobs - self.log_ratio).detach()


@dataclass(frozen=True, kw_only=True)
class LossInputs(SurrogateInputs):
    """Inputs of masks and terms: those of the surrogate, and the rows that they are from.

    Args:
        entropy: [M, C] of the current policy; 0 on padding.
        completion_weight: [M, 1] importance weight in place of `sampler_weight` for a value that
            does not depend on the token sampled at its position, see
            `ImportanceCorrection.completion_weight`.
        new: what the current policy computes of the rows; anything on padding.
        batch: M completions.
    """

    entropy: Tensor
    completion_weight: Tensor
    new: TokenLogprobs
    batch: TrainingBatch
