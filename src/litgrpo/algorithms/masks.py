"""Masks: completions and tokens that the surrogate loss leaves out."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from litgrpo.algorithms.inputs import LossInputs, Need
from litgrpo.argument_types import check_field_types
from litgrpo.distributed.collectives import Comm
from litgrpo.tensors import row_mean


class Mask:
    """A mask of the surrogate loss: a `CompletionMask`, a `TokenMask` or a `StepMask`."""

    needs: ClassVar[frozenset[Need]] = frozenset()


# --- completions, before the loss weights are computed ---


@dataclass(frozen=True)
class Completions:
    """Inputs of a `CompletionMask`.

    Args:
        truncated: [M] True if the length limit stopped the completion.
        informative: [M] True for completions of a group with an advantage.
    """

    truncated: Tensor
    informative: Tensor


class CompletionMask(Mask, ABC):
    """Completions without any term of the loss that has the loss weights.

    They have no tokens in the denominators; `is_counted` says if they are in the number of
    completions, by which `sequence_mean` and others divide.
    """

    is_counted: ClassVar[bool]

    @abstractmethod
    def __call__(self, completions: Completions) -> Tensor:
        """[M] True for completions in the loss."""


@dataclass(frozen=True)
class MaskTruncated(CompletionMask):
    """Leaves out completions cut off by the length limit. Source: DAPO, arXiv:2503.14476."""

    is_counted: ClassVar[bool] = True  # otherwise the few others would get large weights

    def __call__(self, completions: Completions) -> Tensor:
        return ~completions.truncated


@dataclass(frozen=True)
class MaskZeroVariance(CompletionMask):
    """Leaves out groups without any advantage. Source: GPG, arXiv:2504.02546."""

    is_counted: ClassVar[bool] = False

    def __call__(self, completions: Completions) -> Tensor:
        return completions.informative


# --- tokens, by the current policy ---


class TokenMask(Mask, ABC):
    """Tokens without a surrogate loss; their weight stays in the denominators.

    Example:
        Leave out tokens that the sampler found unlikely::

            @dataclass(frozen=True)
            class MaskUnlikely(TokenMask):
                min_logprob: float = -10.0

                def __call__(self, inputs):
                    return inputs.batch.sampler_logprobs >= self.min_logprob
    """

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> Tensor:
        """[M, C] True for tokens with a surrogate loss."""


@check_field_types
@dataclass(frozen=True)
class MaskOffPolicy(TokenMask):
    """Leaves out completions of negative advantage that have been pushed far enough.

    That is, whose mean log-probability fell by more than `threshold` nats since sampling.
    Source: DeepSeek-V3.2, arXiv:2512.02556.
    """

    threshold: float

    def __call__(self, inputs: LossInputs) -> Tensor:
        # Mean of log p_sampler - log p over a completion.
        drift = inputs.batch.sampler_logprobs - inputs.logprobs.detach()
        drift = torch.where(inputs.mask, drift, 0.0).nan_to_num(0.0)
        return (inputs.advantages >= 0) | (row_mean(drift, inputs.mask) <= self.threshold)


@check_field_types
@dataclass(frozen=True)
class MaskLargeKL(TokenMask):
    """Leaves out tokens whose s^2 / 2 exceeds `threshold`, in nats. Source: torchrl."""

    threshold: float

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ValueError(f"kl_mask_threshold is {self.threshold}; it must be >= 0")

    def __call__(self, inputs: LossInputs) -> Tensor:
        return inputs.log_ratio.detach().square() / 2 <= self.threshold


# --- tokens, selected among all of an optimizer step ---


class StepMask(Mask, ABC):
    """Tokens without a surrogate loss, selected among all tokens of an optimizer step.

    `Objective.prepare_step` calls it once per step. The entropy bonus is a mean over the tokens
    that are left, too.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"before_step"})

    @abstractmethod
    def __call__(self, inputs: LossInputs, comm: Comm) -> Tensor:
        """[M, C] True for tokens with a surrogate loss.

        Args:
            inputs: all tokens of the step on this rank.
            comm: of the ranks that share the step.
        """


@check_field_types
@dataclass(frozen=True)
class KeepTopEntropy(StepMask):
    """Keeps the fraction of tokens of highest entropy. Source: arXiv:2506.01939."""

    quantile: float

    def __call__(self, inputs: LossInputs, comm: Comm) -> Tensor:
        # float32: a quantile that falls on a token must not miss it by rounding in 1 - share.
        entropy = inputs.entropy.detach().float()
        flat = entropy.masked_fill(~inputs.mask, torch.nan).flatten()
        return entropy >= comm.gather(flat).nanquantile(1 - self.quantile)
