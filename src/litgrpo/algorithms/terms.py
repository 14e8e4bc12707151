"""Terms of the loss beside the surrogate: coef times a weighted sum of a value of each token.

A term is one class. It says what it needs, the learner computes the union of what all parts of the
objective need, and `Objective.loss` weights, corrects, adds and logs the value.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from litgrpo.algorithms.divergences import Divergence
from litgrpo.algorithms.inputs import LossInputs, Need
from litgrpo.argument_types import check_field_types


class Term(ABC):
    """A term of the loss, over the tokens and with the weights of the surrogate loss.

    A subclass sets `needs` to what it is computed from (see `inputs.Need`) and `metric` to the name
    under which it is logged. It sets `ignores_token` if its value does not depend on the token
    sampled at its position: the importance correction then uses the weight of the completion
    instead of that of the token.

    Example:
        Pull the log-probability of every token towards a constant::

            @dataclass(frozen=True)
            class TowardsConstant(Term):
                needs = frozenset({"all_rows"})
                metric = "distance"
                coef: float = 0.1
                constant: float = -1.0

                def __call__(self, inputs):
                    return (inputs.logprobs - self.constant).square()

        In a recipe: `objective.terms: [{class_path: my_terms.TowardsConstant}]`. It is logged as
        `policy/distance`.
    """

    coef: float
    needs: ClassVar[frozenset[Need]] = frozenset()
    metric: ClassVar[str] = ""
    setting: ClassVar[str] = ""  # option that it comes from, if it has one
    ignores_token: ClassVar[bool] = False

    @property
    def uses_ratio(self) -> bool:
        """True if it has the importance ratio, which `old_policy: sampler` makes its correction."""
        return False

    @property
    def of_vocabulary(self) -> Divergence | None:
        """Divergence that it needs as `TokenLogprobs.divergence`; only one term can have one."""
        return None

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> Tensor:
        """[M, C] value of each token, without `coef` and correction; anything off its tokens."""


@dataclass(frozen=True)
class StepTokens:
    """The tokens of an optimizer step on this rank, of which a `MeanTerm` selects its own.

    Args:
        generated: [M, C] True marks a token that the policy sampled.
        observed: [M, C] True marks a token of the environment.
        in_loss: [M, C] True marks a token with a loss weight.
        rewards: [M] total reward, NaN where it is not valid; None if it is not known any more.
    """

    generated: Tensor
    observed: Tensor
    in_loss: Tensor
    rewards: Tensor | None = None


class MeanTerm(Term):
    """A term that is a mean over tokens of its own, over all of an optimizer step."""

    follows_masks: ClassVar[bool] = False  # a StepMask leaves its tokens out of this mean as well

    @abstractmethod
    def select(self, tokens: StepTokens) -> Tensor:
        """[M, C] True for the tokens that it is a mean over."""


# --- distance from other policies ---


@dataclass(frozen=True)
class LogRatioPenalty(Term):
    """s^2, the squared log-ratio of the policy to the old one. Source: Kimi K2.5; prime-rl."""

    needs: ClassVar[frozenset[Need]] = frozenset({"all_rows"})
    setting: ClassVar[str] = "log_ratio_coef"
    coef: float

    def __call__(self, inputs: LossInputs) -> Tensor:
        return inputs.log_ratio.square()


@dataclass(frozen=True)
class KLEstimate(Term):
    """KL to the reference, estimated from the sampled token."""

    needs: ClassVar[frozenset[Need]] = frozenset({"ref_logprobs", "all_rows"})
    setting: ClassVar[str] = "kl_coef"
    metric: ClassVar[str] = "kl"
    coef: float
    estimator: Callable  # type: ignore[type-arg]  # of d = log p_ref - log p, see `kl`
    bias_correction: bool = True  # multiply by the importance ratio, see `Objective`

    @property
    def uses_ratio(self) -> bool:
        return self.bias_correction

    def __call__(self, inputs: LossInputs) -> Tensor:
        ref_logprobs = inputs.batch.ref_logprobs
        assert ref_logprobs is not None, "kl_coef > 0 needs reference log-probs"
        # d = l_ref - l; k3 = e^d - d - 1 >= 0 (DeepSeekMath, eq. 4). Its gradient on-policy is
        # that of KL(reference || policy); times the ratio w, of KL(policy || reference).
        d = torch.where(inputs.mask, ref_logprobs, 0.0) - inputs.logprobs
        kl: Tensor = self.estimator(d)
        return kl * inputs.ratio if self.bias_correction else kl


@dataclass(frozen=True)
class KLDivergence(Term):
    """Divergence from the reference over the vocabulary, exact at each position."""

    needs: ClassVar[frozenset[Need]] = frozenset({"ref_hidden", "all_rows"})
    setting: ClassVar[str] = "kl_coef"
    metric: ClassVar[str] = "kl"
    ignores_token: ClassVar[bool] = True
    coef: float
    divergence: Divergence

    @property
    def of_vocabulary(self) -> Divergence:
        return self.divergence

    def __call__(self, inputs: LossInputs) -> Tensor:
        assert inputs.new.divergence is not None
        return torch.where(inputs.mask, inputs.new.divergence, 0.0)


# --- means over tokens of their own ---


@dataclass(frozen=True)
class EntropyBonus(MeanTerm):
    """Minus the entropy of the policy, a mean over the tokens in the loss."""

    needs: ClassVar[frozenset[Need]] = frozenset({"entropy_gradient", "all_rows"})
    setting: ClassVar[str] = "entropy_coef"
    ignores_token: ClassVar[bool] = True
    follows_masks: ClassVar[bool] = True
    coef: float

    def select(self, tokens: StepTokens) -> Tensor:
        return tokens.in_loss

    def __call__(self, inputs: LossInputs) -> Tensor:
        return -inputs.entropy


@check_field_types
@dataclass(frozen=True)
class PositiveNLL(MeanTerm):
    """VAPO's imitation of correct completions: the mean of -log p over their tokens, times `coef`.

    The mean is over all tokens of correct completions in the optimizer step. Source: VAPO,
    arXiv:2504.05118; NeMo-RL: `positive_example_nll_weight`.

    Args:
        coef: coefficient of the mean.
        min_reward: smallest total reward of a correct completion (NeMo-RL: above 0).
    """

    setting: ClassVar[str] = "positive_nll"
    metric: ClassVar[str] = "positive_nll"
    coef: float = 0.1
    min_reward: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.coef < math.inf:
            setting = f"positive_nll.coef is {self.coef}"
            raise ValueError(f"{setting}; it must be above 0, or positive_nll null")
        if not math.isfinite(self.min_reward):
            raise ValueError(f"positive_nll.min_reward is {self.min_reward}; it must be finite")

    def select(self, tokens: StepTokens) -> Tensor:
        assert tokens.rewards is not None, "positive_nll needs rewards"
        correct = (tokens.rewards >= self.min_reward).to(tokens.generated.device)
        return tokens.generated & correct[:, None]

    def __call__(self, inputs: LossInputs) -> Tensor:
        return -inputs.new.logprobs


@dataclass(frozen=True)
class ObservationNLL(MeanTerm):
    """The mean of -log p over the tokens of an environment. Source: ECHO, arXiv:2605.24517."""

    setting: ClassVar[str] = "observation_nll_coef"
    metric: ClassVar[str] = "observation_nll"
    ignores_token: ClassVar[bool] = True
    coef: float

    def select(self, tokens: StepTokens) -> Tensor:
        return tokens.observed

    def __call__(self, inputs: LossInputs) -> Tensor:
        return -inputs.new.logprobs
