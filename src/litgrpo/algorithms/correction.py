"""Importance correction: weights for a sampler whose probabilities differ from the trainer's."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from litgrpo.argument_types import check_field_types
from litgrpo.tensors import safe_exp


@check_field_types
@dataclass(frozen=True)
class ImportanceCorrection:
    """Weights p_trainer / p_sampler for a sampler whose probabilities differ from the trainer's.

    p_trainer is the probability before the update. TRL: `vllm_importance_sampling_correction`;
    verl: rollout correction. Source: Yao et al. 2025, Your efficient RL framework secretly brings
    you off-policy RL training.

    Args:
        level: one weight per `token`; per `sequence`, the product over the completion; or
            `geometric_mean` over the completion, which does not depend on its length.
        mode: `truncate` a weight to [min, max], or `mask` its token or sequence if it is outside.
        min: smallest weight.
        max: largest weight; null: no limit.
        token_min: mask a completion if the weight of one of its tokens is below this; 0: never.

    Example:
        IcePop: drop tokens whose probabilities differ by more than these factors::

            ImportanceCorrection(level="token", mode="mask", min=0.5, max=5.0)
    """

    level: Literal["token", "sequence", "geometric_mean"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    min: float = 0.0
    max: float | None = 3.0
    token_min: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.min <= (torch.inf if self.max is None else self.max):
            raise ValueError(f"min {self.min}, max {self.max}: must be 0 <= min <= max")
        if not 0 <= self.token_min < 1:
            raise ValueError(f"token_min {self.token_min}: must be at least 0 (off) and below 1")

    def __call__(self, old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        """[M, C] weights, 1 on padding, or [M, 1].

        An unknown (NaN) sampler log-probability gets the weight 1 here; the learner skips the step.
        """
        # rho = p_old / p_sampler corrects for tokens sampled from another distribution:
        # E_sampler[rho f] = E_old[f]. Truncation trades a little bias for bounded variance.
        gap = (old_logprobs - sampler_logprobs).masked_fill(~mask, 0.0).nan_to_num(0.0)
        impossible = safe_exp(gap.amin(1, keepdim=True)) < self.token_min
        if self.level != "token":
            num_tokens = mask.sum(1, keepdim=True).clamp(min=1)
            gap, mask = gap.sum(1, keepdim=True), mask.any(1, keepdim=True)
            if self.level == "geometric_mean":
                gap = gap / num_tokens
        weight = safe_exp(gap)
        bounded = weight.clamp(self.min, self.max)
        if self.mode == "mask":
            bounded = torch.where(weight == bounded, weight, 0.0)
        # The last fill is for padding, which has a weight of 1 and no loss.
        return bounded.masked_fill(impossible, 0.0).masked_fill(~mask, 1.0)

    def completion_weight(
        self, old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor
    ) -> Tensor:
        """[M, 1] weights of terms that do not depend on the token sampled at their position.

        Such terms are sums over the vocabulary, or about observations. With a weight per completion
        they have the same one. With a weight per token they have 1, or 0 if `token_min` drops the
        completion: after any prefix the mean of that weight is 1, so it would not change their
        mean. Arguments as of a call.
        """
        weights = self
        if self.level == "token":
            # Weights of completions, all truncated to 1, or 0 where `token_min` drops one.
            weights = replace(self, level="geometric_mean", mode="truncate", min=1.0, max=1.0)
        return weights(old_logprobs, sampler_logprobs, mask)


CorrectionName: TypeAlias = Literal["tis", "icepop", "mis"]
CORRECTIONS: dict[str, ImportanceCorrection] = {
    # Truncated importance sampling, Yao et al. 2025.
    "tis": ImportanceCorrection(max=2.0),
    # IcePop, Ring team 2025: tokens outside of the range are masked.
    "icepop": ImportanceCorrection(mode="mask", min=0.5, max=5.0),
    # Masked importance sampling of completions, after Yao et al. 2025.
    "mis": ImportanceCorrection("sequence", "mask", max=2.0, token_min=1e-4),
}
