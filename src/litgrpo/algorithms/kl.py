"""Estimates of the KL to the reference from the sampled token, and the KL in the reward.

In the formulas d is the log-probability under the reference minus that under the policy, [M, C], in
nats. Source: Schulman 2020, Approximating KL divergence.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from litgrpo.algorithms.inputs import Need
from litgrpo.argument_types import check_field_types
from litgrpo.tensors import safe_exp

KLEstimator: TypeAlias = Callable[..., Tensor]


def k1(d: Tensor) -> Tensor:
    """Estimate the KL as -d: unbiased.

    Its gradient without `kl_bias_correction` is that of the log-probability, whose mean is 0: the
    reference has no influence.
    """
    return -d


def k2(d: Tensor) -> Tensor:
    """Estimate the KL as d^2 / 2: biased.

    On-policy its gradient without `kl_bias_correction` is that of the KL.
    """
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """Estimate the KL as e^d - d - 1: unbiased, never negative. Cannot overflow.

    Source: GRPO, arXiv:2402.03300, equation 4.
    """
    return safe_exp(d) - d - 1


def absolute(d: Tensor) -> Tensor:
    """Penalize |d|: not a divergence, but used in practice."""
    return d.abs()


KLName: TypeAlias = Literal["k1", "k2", "k3", "abs"]


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}


@check_field_types
@dataclass(frozen=True)
class KLInReward:
    """Subtracts coef * (sum of KL estimates over a completion's tokens) from its reward.

    The advantages are then those of the lower rewards, and no gradient flows through the KL. The
    log-probabilities are those at sampling; with an importance correction or `old_policy: sampler`
    those before the update. With turn-level advantages it belongs to the last turn.
    Source: Ziegler et al. 2019, arXiv:1909.08593; verl: `use_kl_in_reward`.

    Args:
        coef: coefficient of the KL (verl: kl_ctrl.kl_coef).
        estimator: k1, k2, k3 or abs, per token (verl: kl_penalty); k1 sums to log p / p_ref of the
            completion.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"ref_logprobs"})
    coef: float = 1e-3
    estimator: KLName = "k1"

    def __post_init__(self) -> None:
        if not 0 < self.coef < math.inf:
            setting = f"kl_in_reward.coef is {self.coef}"
            raise ValueError(f"{setting}; it must be above 0, or kl_in_reward null")
        if self.estimator not in KL_ESTIMATORS:
            allowed = ", ".join(KL_ESTIMATORS)
            setting = f"kl_in_reward.estimator is {self.estimator!r}"
            raise ValueError(f"{setting}; it must be one of {allowed}")

    def token_kl(self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        """[N, C] KL estimate of each token, 0 off `mask`, from log-probabilities [N, C]."""
        # An unknown (NaN) log-probability counts as a KL of 0.
        d = torch.where(mask, ref_logprobs - logprobs, 0.0).nan_to_num(0.0)
        return KL_ESTIMATORS[self.estimator](d)
