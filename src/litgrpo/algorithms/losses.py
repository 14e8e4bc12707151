"""The training objective: surrogate loss, loss aggregation, KL penalty, importance correction.

An algorithm is a combination of these choices, not a class: `configs/algorithms` has one config
override for each published algorithm, and docs/explanation/algorithm.md a table of them.

A loss is never a mean over a micro-batch. Each token gets a weight that is computed once for all
rows of an optimizer step (`Objective.loss_weights`), and the loss is the weighted sum over tokens.
So the gradient does not depend on how the step is split into micro-batches and processes.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from litgrpo.algorithms.advantages import Advantages, Normalized, OptimalTokenBaseline
from litgrpo.algorithms.divergences import DIVERGENCES, Divergence, DivergenceName
from litgrpo.algorithms.token_selection import (
    covariance,
    largest_second_moments,
    smallest,
    token_keys,
)
from litgrpo.algorithms.turn_credit import TurnAdvantages, Turns
from litgrpo.argument_types import check_field_types
from litgrpo.distributed.collectives import Comm, SingleProcess
from litgrpo.tensors import row_mean, safe_exp
from litgrpo.types import LossOutput, RewardTable, TokenLogprobs, TrainingBatch

ALONE = SingleProcess()
RATIO_MAX = "policy/ratio_max"
LOG_RATIO_ROUNDING = 1e-4  # two forward passes in float32 differ by less, in nats


# --- surrogate losses ---


@dataclass(frozen=True)
class SurrogateInputs:
    """Inputs of a surrogate loss; every field is finite, 0 or 1 on padding.

    Args:
        logprobs: [M, C] l, log-probabilities under the current policy, with gradient.
        log_ratio: [M, C] s = l - l_old, l_old of `Objective.old_policy`, with gradient.
        ratio: [M, C] or [M, 1] w, importance ratio of the update, with gradient.
        advantages: [M, C] A.
        mask: [M, C] tokens that contribute to the loss.
        correction: [M, C] or [M, 1] importance weight of the trainer over the sampler.
        selected: [M, C] tokens that a `StepSurrogate` selected; None for other surrogates.

    Example:
        One completion of two tokens, the second one became twice as likely::

            SurrogateInputs(
                logprobs=tensor([[-1.0, -0.69]]),
                log_ratio=tensor([[0.0, 0.69]]),
                ratio=tensor([[1.0, 2.0]]),
                advantages=tensor([[0.7, 0.7]]),
                mask=tensor([[True, True]]),
                correction=tensor([[1.0, 1.0]]),
            )
    """

    logprobs: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    mask: Tensor
    correction: Tensor
    selected: Tensor | None = None

    @property
    def old_logprobs(self) -> Tensor:
        """[M, C] l_old, without gradient."""
        return (self.logprobs - self.log_ratio).detach()


class Surrogate(ABC):
    """The loss of one token.

    Example:
        A surrogate is a frozen dataclass; its fields are the options of the config::

            @dataclass(frozen=True)
            class MyLoss(Surrogate):
                max_ratio: float = 2.0

                def __call__(self, inputs):
                    ratio = inputs.ratio.clamp(max=self.max_ratio)
                    return -ratio * inputs.advantages * inputs.correction
    """

    @abstractmethod
    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        """[M, C] loss of each token, times `inputs.correction`."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """Ratios at which a token loses its gradient; used by `find_clipped`."""
        return 0.0, torch.inf

    def find_clipped(self, inputs: SurrogateInputs) -> tuple[Tensor, Tensor]:
        """[M, C] tokens beyond the lower limit with A < 0, and beyond the upper one with A > 0."""
        low, high = self.clip_range
        below, above = inputs.ratio < low, inputs.ratio > high
        return below & (inputs.advantages < 0), above & (inputs.advantages > 0)


@check_field_types
@dataclass(frozen=True)
class Clipped(Surrogate):
    """GRPO, DAPO, GSPO: -min(min(w, max_ratio) A, clip(w, 1 - clip_low, 1 + clip_high) A).

    Source: PPO, arXiv:1707.06347; clip-higher: DAPO, arXiv:2503.14476 (0.2, 0.28); GSPO,
    arXiv:2507.18071 (3e-4, 4e-4 with `importance_sampling_level: sequence`); two-sided clip:
    INTELLECT-2, arXiv:2505.07291.

    Args:
        clip_low: the ratio is clipped at 1 - clip_low (TRL: epsilon).
        clip_high: the ratio is clipped at 1 + clip_high (TRL: epsilon_high).
        max_ratio: two-sided clip (TRL: delta): largest ratio of a token of negative advantage,
            whose loss is otherwise unbounded; null: no limit.

    Example:
        >>> Clipped(clip_low=0.2, clip_high=0.28)  # clip-higher, as in DAPO
        Clipped(clip_low=0.2, clip_high=0.28, max_ratio=None)
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    max_ratio: float | None = None

    def __post_init__(self) -> None:
        """Check the range."""
        if not 0 <= self.clip_low <= 1:  # a ratio is at least 0
            raise ValueError(f"clip_low is {self.clip_low}; it must be from 0 to 1 (never clips)")
        if not self.clip_high >= 0:
            raise ValueError(f"clip_high is {self.clip_high}; it must be at least 0")
        if self.max_ratio is not None and self.max_ratio <= 0:
            raise ValueError(f"max_ratio is {self.max_ratio}; it must be above 0")

    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        """[M, C] clipped loss."""
        # DeepSeekMath, eq. 3: the gain is min(w A, clip(w, 1 - eps, 1 + eps) A). The minimum is
        # pessimistic: it removes the gradient only if the ratio has already moved in the direction
        # of the advantage. For A < 0 and w > 1 + eps the gain w A is unbounded below; `max_ratio`
        # bounds it.
        unclipped = inputs.ratio
        if self.max_ratio is not None:
            unclipped = unclipped.clamp(max=self.max_ratio)
        clipped = inputs.ratio.clamp(*self.clip_range)
        gain = torch.minimum(unclipped * inputs.advantages, clipped * inputs.advantages)
        return -gain * inputs.correction

    @property
    def clip_range(self) -> tuple[float, float]:
        """The clip range."""
        return 1 - self.clip_low, 1 + self.clip_high


@check_field_types
@dataclass(frozen=True)
class CISPO(Surrogate):
    """CISPO: -sg[min(w, max_ratio)] A l; every token keeps its gradient. Source: arXiv:2506.13585.

    Args:
        max_ratio: largest ratio (TRL: epsilon_high), not its distance from 1; values up to 1 shrink
            the gradient of every token and give a warning.
    """

    max_ratio: float = 5.0

    def __post_init__(self) -> None:
        """Warn about a limit that was meant as a distance from 1."""
        if self.max_ratio <= 1:
            warnings.warn(f"CISPO: max_ratio {self.max_ratio} <= 1 shrinks gradients", stacklevel=3)

    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        """[M, C] loss."""
        # REINFORCE with a truncated importance weight: the clip changes the weight of a token but
        # never removes its gradient, because the ratio is detached.
        weight = inputs.ratio.detach().clamp(max=self.max_ratio) * inputs.correction
        return -weight * inputs.advantages * inputs.logprobs

    @property
    def clip_range(self) -> tuple[float, float]:
        """The largest ratio; tokens above it keep their gradient."""
        return 0.0, self.max_ratio


@check_field_types
@dataclass(frozen=True)
class SAPO(Surrogate):
    """SAPO: -4 / tau sigmoid(tau (w - 1)) A, a soft gate for the clip. Source: arXiv:2511.20347.

    Args:
        tau_positive: sharpness of the gate if A > 0.
        tau_negative: sharpness of the gate otherwise; larger, for stability.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        """Check the range."""
        if min(self.tau_positive, self.tau_negative) <= 0:
            given = f"tau_positive {self.tau_positive}, tau_negative {self.tau_negative}"
            raise ValueError(f"{given}: must be > 0")

    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        """[M, C] gated loss."""
        tau = torch.where(inputs.advantages > 0, self.tau_positive, self.tau_negative)
        # 4 / tau: the gate's derivative at w = 1 is then 1, as that of the ratio.
        gate = torch.sigmoid(tau * (inputs.ratio - 1)) * 4 / tau
        return -gate * inputs.advantages * inputs.correction


@check_field_types
@dataclass(frozen=True)
class VESPO(Surrogate):
    """VESPO: -phi A l, phi = sg[exp(lam + k log W - lam W)], W the ratio of the whole completion.

    W is a product, not a mean, and includes the importance correction. Source: arXiv:2602.10693.

    Args:
        k: power of W if A >= 0, and if A < 0.
        lam: decay in W if A >= 0, and if A < 0.
    """

    k: tuple[float, float] = (2.0, 3.0)
    lam: tuple[float, float] = (3.0, 2.0)

    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        """[M, C] loss; phi includes the correction."""
        # The bounds are those of TRL: W is kept within [1e-8, e^20].
        floor = math.log(1e-8)
        steps = inputs.log_ratio.detach().clamp(-20.0, 20.0).sum(1, keepdim=True)
        correction = inputs.correction.log().clamp(floor, 20.0).sum(1, keepdim=True)
        log_w = (steps + correction).clamp(floor, 20.0)
        k = torch.where(inputs.advantages >= 0, *self.k)
        lam = torch.where(inputs.advantages >= 0, *self.lam)
        phi = (lam + k * log_w - lam * log_w.exp()).exp()
        return -phi * inputs.advantages * inputs.logprobs


@check_field_types
@dataclass(frozen=True)
class GMPO(Surrogate):
    """GMPO: -A exp(mean of clipped s), a geometric mean of token ratios. Source: arXiv:2507.20673.

    Args:
        clip_low: log-ratios are clipped at -clip_low if A < 0, in nats.
        clip_high: log-ratios are clipped at clip_high if A > 0, in nats.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        """[M, C] loss of the row, at each of its tokens."""
        s = inputs.log_ratio
        up, down = s.clamp(max=self.clip_high), s.clamp(min=-self.clip_low)
        mean = row_mean(torch.where(inputs.advantages > 0, up, down), inputs.mask)
        return -safe_exp(mean) * inputs.advantages * inputs.correction

    @property
    def clip_range(self) -> tuple[float, float]:
        """The clip range, as ratios."""
        return math.exp(-self.clip_low), math.exp(self.clip_high)


@check_field_types
@dataclass(frozen=True)
class DPPO(Surrogate):
    """DPPO: -sg[min(w, max_ratio)] A l within a trust region of probabilities, 0 outside of it.

    The divergence is that of two outcomes, this token or any other, with the probabilities
    p = e^l and p_old. A token leaves the trust region if it moved in the direction of its
    advantage by more than the limit. A ratio, in contrast, is large for rare tokens that hardly
    moved. Source: arXiv:2602.04879, Binary-TV and Binary-KL; verl: `dppo_tv`, `dppo_kl`.

    Args:
        divergence: `tv`, |p - p_old|, or `kl`, KL(p_old || p) of the two outcomes, in nats.
        max_low: largest divergence of a token that became less likely, if A <= 0.
        max_high: largest divergence of a token that became more likely, if A > 0.
        max_ratio: truncates the importance ratio, which has no other limit (verl: clip_ratio_c).
    """

    divergence: Literal["tv", "kl"] = "tv"
    max_low: float = 0.15
    max_high: float = 0.15
    max_ratio: float = 20.0

    def __post_init__(self) -> None:
        """Check the limits."""
        for name, low in (("max_low", 0.0), ("max_high", 0.0), ("max_ratio", 1.0)):
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low:g}")

    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        """[M, C] loss; 0 outside of the trust region."""
        fell, rose = self._outside(inputs)
        inside = ~torch.where(inputs.advantages > 0, rose, fell)
        weight = inputs.ratio.detach().clamp(max=self.max_ratio) * inputs.correction
        return torch.where(inside, -weight * inputs.advantages * inputs.logprobs, 0.0)

    def _outside(self, inputs: SurrogateInputs) -> tuple[Tensor, Tensor]:
        """[M, C] tokens that became less likely, or more likely, by more than the limit."""
        new, old = inputs.logprobs.detach(), inputs.old_logprobs
        moved = new.exp() - old.exp()
        distance = moved.abs() if self.divergence == "tv" else binary_kl(old, new)
        return (moved < 0) & (distance > self.max_low), (moved > 0) & (distance > self.max_high)

    def find_clipped(self, inputs: SurrogateInputs) -> tuple[Tensor, Tensor]:
        """[M, C] tokens outside of the trust region, by the sign of their advantage."""
        fell, rose = self._outside(inputs)
        return fell & (inputs.advantages < 0), rose & (inputs.advantages > 0)


def binary_kl(old: Tensor, new: Tensor) -> Tensor:
    """KL(p_old || p) of a token against all others, in nats; never infinite.

    Args:
        old: log p_old.
        new: log p, of the same shape.
    """
    # log(1 - p), at least log 1e-8.
    others_old, others = (torch.log((-torch.expm1(x)).clamp(min=1e-8)) for x in (old, new))
    return old.exp() * (old - new) - torch.expm1(old) * (others_old - others)


@check_field_types
@dataclass(frozen=True)
class PolicyGradient(Surrogate):
    """REINFORCE, RLOO: -A l, for one optimizer step per rollout. Source: Williams 1992."""

    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        """[M, C] loss."""
        return -inputs.advantages * inputs.logprobs * inputs.correction


class StepSurrogate(Surrogate):
    """A surrogate that treats some tokens differently, selected among all of the optimizer step.

    `Objective.select_tokens` calls `select` once per step, before it is split into micro-batches.

    Example:
        Drop the tokens of the lowest probability::

            @dataclass(frozen=True)
            class DropUnlikely(StepSurrogate):
                surrogate: Surrogate = field(default_factory=Clipped)

                def select(self, inputs, keys, comm):
                    return smallest(inputs.logprobs.where(inputs.mask, torch.nan), 10, keys, comm)
    """

    surrogate: Surrogate

    def __post_init__(self) -> None:
        """Check that only one surrogate selects tokens."""
        if isinstance(self.surrogate, StepSurrogate):
            inner, outer = type(self.surrogate).__name__, type(self).__name__
            raise ValueError(
                f"surrogate of {outer} is {inner}, which selects tokens as well; it must be one "
                "that does not, such as Clipped"
            )

    @abstractmethod
    def select(self, inputs: SurrogateInputs, keys: Tensor, comm: Comm) -> Tensor:
        """[M, C] tokens to treat differently; False off `inputs.mask`.

        Args:
            inputs: all tokens of the step on this rank.
            keys: [M, C] pseudorandom numbers, see `token_selection.token_keys`.
            comm: of the ranks that share the step.
        """

    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        """[M, C] loss of the inner surrogate; 0 for selected tokens."""
        assert inputs.selected is not None
        return torch.where(inputs.selected, 0.0, self.surrogate(inputs))

    def find_clipped(self, inputs: SurrogateInputs) -> tuple[Tensor, Tensor]:
        """[M, C] tokens that the inner surrogate clips."""
        return self.surrogate.find_clipped(inputs)


def build_unclipped() -> Clipped:
    """Return the surrogate -w A."""
    return Clipped(clip_low=1.0, clip_high=math.inf)


@check_field_types
@dataclass(frozen=True)
class ClipCov(StepSurrogate):
    """Clip-Cov: a few random tokens of high covariance lose their gradient, against entropy loss.

    The covariance of a token is (l - mean of l) (A - mean of A), over all tokens of the optimizer
    step. Tokens that the inner surrogate clips are not selected. The random choice is a hash of the
    text, so it does not depend on micro-batches or ranks. Source: arXiv:2505.22617, equations 10 to
    12; verl: `clip_cov`, which selects in each micro-batch.

    Args:
        frac: fraction of all tokens of the step to select, at least one token (verl:
            clip_cov_ratio).
        min_cov: only tokens of a larger covariance are selected (verl: clip_cov_lb).
        max_cov: only tokens of a smaller covariance are selected (verl: clip_cov_ub).
        surrogate: loss of the other tokens; the default is that of the authors' runs, ratios
            between 0 and 2.
    """

    frac: float = 2e-4
    min_cov: float = 1.0
    max_cov: float = 5.0
    surrogate: Surrogate = field(default_factory=lambda: Clipped(1.0, 1.0))

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        _check_frac(self.frac)
        if not self.min_cov < self.max_cov:
            raise ValueError(f"min_cov {self.min_cov}, max_cov {self.max_cov}: must be min < max")

    def select(self, inputs: SurrogateInputs, keys: Tensor, comm: Comm) -> Tensor:
        """[M, C] random tokens of a covariance between the limits."""
        cov = covariance(inputs.logprobs, inputs.advantages, inputs.mask, comm)
        low, high = self.find_clipped(inputs)
        eligible = inputs.mask & (cov > self.min_cov) & (cov < self.max_cov) & ~(low | high)
        number = max(1, int(self.frac * comm.sum(inputs.mask.sum())))
        return smallest(keys.where(eligible, torch.nan), number, keys, comm)


@check_field_types
@dataclass(frozen=True)
class KLCov(StepSurrogate):
    """KL-Cov: the tokens of highest covariance are held near the old policy, against entropy loss.

    They get a penalty coef |s|; the covariance is that of `ClipCov`. In the first optimizer step of
    a rollout s is 0, and so is the penalty's gradient; |s| up to 1e-4 counts as 0, because the
    gradient would have the sign of a rounding error. Source: arXiv:2505.22617, equations 10, 13
    and 14; verl: `kl_cov`, which selects in each micro-batch.

    Args:
        frac: fraction of all tokens of the step to select, at least one token; the authors take
            2e-3 with 7B and 2e-4 with 32B parameters (verl: kl_cov_ratio).
        coef: coefficient of the penalty (verl: ppo_kl_coef).
        surrogate: loss of all tokens; the default is -w A, without a clip.
    """

    frac: float = 2e-3
    coef: float = 1.0
    surrogate: Surrogate = field(default_factory=build_unclipped)

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        _check_frac(self.frac)
        if not 0 <= self.coef < math.inf:
            raise ValueError(f"coef is {self.coef}; it must be >= 0")

    def select(self, inputs: SurrogateInputs, keys: Tensor, comm: Comm) -> Tensor:
        """[M, C] the tokens of highest covariance."""
        cov = covariance(inputs.logprobs, inputs.advantages, inputs.mask, comm)
        number = max(1, int(self.frac * comm.sum(inputs.mask.sum())))
        return smallest((-cov).where(inputs.mask, torch.nan), number, keys, comm)

    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        """[M, C] loss of the inner surrogate; with the penalty for selected tokens."""
        assert inputs.selected is not None
        moved = inputs.selected & (inputs.log_ratio.detach().abs() > LOG_RATIO_ROUNDING)
        penalty = self.coef * inputs.log_ratio.abs() * inputs.correction
        return self.surrogate(inputs) + torch.where(moved, penalty, 0.0)


@check_field_types
@dataclass(frozen=True)
class M2PO(StepSurrogate):
    """M2PO: drops the tokens of the largest s^2 until the mean of s^2 is at most a limit.

    Only tokens that a clip could affect are counted and dropped: those of positive advantage that
    became more likely, and those of negative advantage that became less likely; |s| up to 1e-4
    counts as 0, because its sign is that of a rounding error. Stale rollouts then lose far fewer
    tokens than by a clip. Source: arXiv:2510.01161, algorithm 1; AReaL: `m2_threshold`, which
    counts all tokens. The authors' code clips ratios at a bound instead of dropping tokens, and
    never within [0.7, 1.5].

    Args:
        max_second_moment: largest mean of s^2 over the optimizer step, in nats^2.
        surrogate: loss of the tokens that are left; the default is -w A, without a clip.
    """

    max_second_moment: float = 0.04
    surrogate: Surrogate = field(default_factory=build_unclipped)

    def __post_init__(self) -> None:
        """Check the range."""
        super().__post_init__()
        if not self.max_second_moment >= 0:
            raise ValueError(f"max_second_moment is {self.max_second_moment}; it must be >= 0")

    def select(self, inputs: SurrogateInputs, keys: Tensor, comm: Comm) -> Tensor:
        """[M, C] the tokens to drop."""
        # A token within rounding did not move: its sign, and so its place in the mean, is chance.
        moved = inputs.log_ratio.detach().abs() > LOG_RATIO_ROUNDING
        affected = inputs.mask & moved & (inputs.log_ratio * inputs.advantages > 0)
        return largest_second_moments(inputs.log_ratio, affected, self.max_second_moment, comm)


def _check_frac(frac: float) -> None:
    """Reject a fraction of tokens outside of (0, 1]."""
    if not 0 < frac <= 1:
        raise ValueError(f"frac is {frac}; it must be above 0 and at most 1")


# --- importance ratios ---
# Each returns w from the log-ratios s [M, C] and the mask [M, C] of their tokens.


def token_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[M, C] w = e^s of each token."""
    return safe_exp(log_ratio)


def sequence_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[M, 1] geometric mean of the token ratios of a completion.

    Source: GSPO, arXiv:2507.18071.
    """
    return safe_exp(row_mean(log_ratio, mask))


def sequence_token_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[M, C] value of `sequence_ratio`, with the gradient of each token's own log-probability.

    Advantages may then differ between the tokens of a completion. Source: GSPO-token,
    arXiv:2507.18071; verl: `gspo`.
    """
    return safe_exp(row_mean(log_ratio.detach(), mask) + log_ratio - log_ratio.detach())


ImportanceSamplingLevel: TypeAlias = Literal["token", "sequence", "sequence_token"]
RATIOS = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
}


# --- loss aggregation ---


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
        """[M, C] m / tokens."""
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
        """[M, C] m / length / K."""
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
        """[M, C] m / (K * max_completion_length)."""
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
        """[M, C] m / K."""
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
        """[M, C] m / K, completed by `rescale_micro_batch`."""
        return mask / num_completions

    def rescale_micro_batch(self, weights: Tensor, mask: Tensor) -> Tensor:
        """[M, C] weights times rows over tokens of the micro-batch."""
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


# --- KL estimators ---
# d = log-probability under the reference minus that under the policy, [M, C], in nats.
# Source: Schulman 2020, Approximating KL divergence.

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


# --- importance correction ---


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
        """Check the bounds."""
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

    def position_weights(
        self, old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor
    ) -> Tensor:
        """[M, 1] weights of terms that do not depend on the token sampled at their position.

        These are sums over the vocabulary and observations. Those of a completion weight all of it.
        The weight of a token has the mean 1 for them after any prefix, so `token` leaves their
        mean unchanged without it; only `token_min` drops them. Arguments as of a call.
        """
        weights = self
        if self.level == "token":
            weights = replace(self, level="geometric_mean", mode="truncate", min=1.0, max=1.0)
        return weights(old_logprobs, sampler_logprobs, mask)


# --- added terms ---


@check_field_types
@dataclass(frozen=True)
class PositiveNLL:
    """VAPO's imitation of correct completions: the mean of -log p over their tokens, times `coef`.

    The mean is over all tokens of correct completions in the optimizer step. Source: VAPO,
    arXiv:2504.05118; NeMo-RL: `positive_example_nll_weight`.

    Args:
        coef: coefficient of the mean.
        min_reward: smallest total reward of a correct completion (NeMo-RL: above 0).
    """

    coef: float = 0.1
    min_reward: float = 1.0

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0 < self.coef < math.inf:
            given = f"positive_nll.coef is {self.coef}"
            raise ValueError(f"{given}; it must be above 0, or positive_nll null")
        if not math.isfinite(self.min_reward):
            raise ValueError(f"positive_nll.min_reward is {self.min_reward}; it must be finite")

    def find_correct(self, rewards: RewardTable) -> Tensor:
        """[N] True for completions with a valid reward of at least `min_reward`."""
        return (rewards.valid & (rewards.total >= self.min_reward)).flatten()


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

    coef: float = 1e-3
    estimator: KLName = "k1"

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0 < self.coef < math.inf:
            given = f"kl_in_reward.coef is {self.coef}"
            raise ValueError(f"{given}; it must be above 0, or kl_in_reward null")
        if self.estimator not in KL_ESTIMATORS:
            allowed = ", ".join(KL_ESTIMATORS)
            given = f"kl_in_reward.estimator is {self.estimator!r}"
            raise ValueError(f"{given}; it must be one of {allowed}")

    def token_kl(self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        """[N, C] KL estimate of each token, 0 off `mask`.

        Args:
            logprobs: [N, C] at sampling; an unknown (NaN) one counts as a KL of 0.
            ref_logprobs: [N, C] under the reference.
            mask: [N, C] True marks a generated token.
        """
        d = torch.where(mask, ref_logprobs - logprobs, 0.0).nan_to_num(0.0)
        return KL_ESTIMATORS[self.estimator](d)


# --- the objective ---


@dataclass(frozen=True)
class EntropyTotals:
    """Totals of one optimizer step for the entropy bonus and `top_entropy_quantile`.

    All micro-batches and ranks of the step share them. The denominators of the loss are in the loss
    weights of the tokens.

    Args:
        num_tokens: [] tokens that the entropy bonus is a mean over.
        entropy_threshold: [] smallest entropy of a token that contributes to the loss; None: all
            tokens contribute.

    Example:
        A step of 4,096 tokens of which the 20 % of highest entropy contribute::

            EntropyTotals(num_tokens=tensor(819), entropy_threshold=tensor(1.37))
    """

    num_tokens: Tensor
    entropy_threshold: Tensor | None = None


@check_field_types
@dataclass(frozen=True)
class Objective:
    """The training objective. The default is GRPO with a token mean and without a KL penalty.

    Args:
        advantages: advantage estimator; `token_advantages` applies it, and its result is
            `TrainingBatch.advantages`.
        importance_sampling_level: ratio of the policy to the old one per `token`, per `sequence`
            (GSPO), or per `sequence_token` (GSPO-token: the ratio of the sequence, the gradient of
            the token).
        old_policy: the ratio is taken to the policy `before_update`, or to the `sampler`, whose
            weights may be older (staleness) and whose arithmetic may differ (verl: bypass mode).
        surrogate: loss of one token.
        reward_coef: coefficient of the surrogate loss; 0: rewards are measured but not maximized,
            for distillation by the KL term alone (verl: use_task_rewards).
        loss_aggregation: token_mean (DAPO), sequence_mean (the GRPO paper), constant_length (Dr.
            GRPO), sequence_sum (LUSPO, RLOO), micro_batch_token_mean (BNPO), or a LossAggregation.
        log_ratio_coef: coefficient of a penalty s^2, the squared log-ratio of the policy to the old
            one, on every token (Kimi K2.5; prime-rl: kl_tau; DRO: beta / 2, per token as in verl,
            while the paper squares the sum over the completion).
        kl_coef: KL penalty coefficient (TRL: beta); 0: no reference model.
        kl_estimator: of the sampled token: k1, k2, k3, abs, or a function of (ref_logprobs -
            logprobs); or exact over the vocabulary: reverse_kl, forward_kl, jsd, or a Divergence.
            With a teacher as reference these are distillation (docs/howto/distillation.md).
        kl_bias_correction: multiply the KL penalty by the importance ratio (TRL:
            use_bias_correction_kl), which makes the gradient of k1 and k3 unbiased; see below.
            Switch it off with k2 and for the GRPO paper's loss. Without effect on divergences,
            which do not depend on the token that was sampled.
        entropy_coef: coefficient of a bonus for the mean entropy of the tokens in the loss.
        advantage_clip: advantages are limited to [-advantage_clip, advantage_clip]; null: no limit
            (NeMo-RL: advantage_clip_low, advantage_clip_high).
        exclude_zero_variance: leave groups without any advantage out of the loss and of its
            denominators (GPG; SkyRL: zero_variance_filter), so that the gradient does not shrink
            with their number. They have no KL penalty and no entropy bonus then.
        gamma: discount per token, counted from the last token of a completion; 1: none.
        mask_truncated_completions: exclude completions cut off by the length limit from the loss
            (DAPO).
        top_entropy_quantile: fraction of tokens, those of highest entropy, that contribute to the
            loss (arXiv:2506.01939).
        off_policy_mask_threshold: exclude completions of negative advantage whose mean
            log-probability fell by more than this many nats since sampling (arXiv:2512.02556).
        kl_mask_threshold: exclude tokens whose s^2 / 2 exceeds this, in nats, for any
            advantage (torchrl: kl_mask_threshold).
        importance_correction: weights for a sampler that differs from the trainer, of every term
            that is a mean over its samples (see `find_uncorrected`); null: none.
        positive_nll: adds the cross-entropy of correct completions to the loss (VAPO); null: none.
        observation_nll_coef: coefficient of the cross-entropy of the tokens of an environment, the
            mean over those of the optimizer step (ECHO, arXiv:2605.24517; prime-rl: `echo`, alpha
            0.1). It needs an environment, and sampling from all tokens.
        kl_in_reward: subtracts the KL to the reference from the reward; null: the KL is only a term
            of the loss (`kl_coef`).

    Gradient of the KL penalty k3 by l, for one token with d = l_ref - l and w = e^(l - l_old)::

        kl_bias_correction: false    1 - e^d    on average that of KL(reference || policy)
        kl_bias_correction: true     -w d       on average that of KL(policy || reference)

    So the correction changes the gradient on-policy as well, where w = 1 leaves the value as it is:
    training then minimizes the divergence that `policy/kl` shows. The weight 1 - e^d is unbounded
    for tokens that became much less likely than under the reference; -d grows slowly. With several
    optimizer steps per rollout, w also accounts for the tokens having been sampled before them.
    Source: DeepSeek-V3.2, arXiv:2512.02556, "Unbiased KL Estimate".

    Example:
        >>> dr_grpo = Objective(Normalized(scale="none"), loss_aggregation="constant_length")
        >>> dr_grpo.needs_reference
        False
    """

    advantages: Advantages = field(default_factory=Normalized)
    importance_sampling_level: ImportanceSamplingLevel = "token"
    old_policy: Literal["before_update", "sampler"] = "before_update"
    surrogate: Surrogate = field(default_factory=Clipped)
    reward_coef: float = 1.0
    loss_aggregation: LossAggregationName | LossAggregation = "token_mean"
    log_ratio_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: KLName | DivergenceName | Divergence | Callable = "k3"  # type: ignore[type-arg]
    kl_bias_correction: bool = True
    entropy_coef: float = 0.0
    advantage_clip: float | None = None
    exclude_zero_variance: bool = False
    gamma: float = 1.0
    mask_truncated_completions: bool = False
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    kl_mask_threshold: float | None = None
    importance_correction: ImportanceCorrection | None = None
    positive_nll: PositiveNLL | None = None
    observation_nll_coef: float = 0.0
    kl_in_reward: KLInReward | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        self._check_combinations()
        self._check_names()
        for name in ("reward_coef", "kl_coef", "log_ratio_coef", "observation_nll_coef"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be >= 0")
        if self.advantage_clip is not None and not self.advantage_clip > 0:
            raise ValueError(f"advantage_clip is {self.advantage_clip}; it must be above 0")
        if self.kl_mask_threshold is not None and not self.kl_mask_threshold >= 0:
            raise ValueError(f"kl_mask_threshold is {self.kl_mask_threshold}; it must be >= 0")
        if not math.isfinite(self.entropy_coef):
            raise ValueError(f"entropy_coef is {self.entropy_coef}; it must be finite")
        for name in ("gamma", "top_entropy_quantile"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")

    def _check_names(self) -> None:
        """Reject unknown names; a Python caller has no parser to check them."""
        kl_names = (*get_args(KLName), *get_args(DivergenceName))
        aggregations = get_args(LossAggregationName)
        for name, known in (("loss_aggregation", aggregations), ("kl_estimator", kl_names)):
            chosen = getattr(self, name)
            if not callable(chosen) and chosen not in known:
                allowed = ", ".join(known)
                raise ValueError(f"{name} is {chosen!r}; it must be one of {allowed}, or callable")

    def _check_combinations(self) -> None:
        """Reject options that exclude each other, or leave nothing to learn."""
        if not (self.reward_coef or self.kl_coef):
            raise ValueError(
                "reward_coef and kl_coef are 0, so there is nothing to learn. Set reward_coef to "
                "learn from rewards, or kl_coef and a reference to learn from a teacher"
            )
        if self.old_policy == "sampler" and self.importance_correction is not None:
            raise ValueError(
                "old_policy is sampler, so the ratio already corrects for the sampler; set "
                "importance_correction to null, or old_policy to before_update"
            )
        base = self.surrogate
        base = base.surrogate if isinstance(base, StepSurrogate) else base
        if isinstance(base, DPPO) and self.importance_sampling_level != "token":
            raise ValueError(
                f"importance_sampling_level is {self.importance_sampling_level}, but DPPO limits "
                "the probabilities of single tokens; set it to token"
            )
        self.advantages.check_contained()
        if self.kl_in_reward is not None and not self.advantages.uses_total:
            raise ValueError(
                f"kl_in_reward lowers the total reward, but {type(self.advantages).__name__} "
                "normalizes each reward function separately (GDPO); set kl_in_reward to null and "
                "use kl_coef, or other advantages"
            )

    @property
    def aggregation(self) -> LossAggregation:
        """The loss aggregation, looked up if it was given by name."""
        if isinstance(self.loss_aggregation, str):
            return LOSS_AGGREGATIONS[self.loss_aggregation]
        return self.loss_aggregation

    @property
    def needs_reference(self) -> bool:
        """True if the loss or the rewards need reference log-probabilities."""
        return self.kl_coef > 0 or self.kl_in_reward is not None

    @property
    def needs_reference_logprobs(self) -> bool:
        """True if log-probabilities of the sampled tokens under the reference are needed."""
        return self.kl_in_reward is not None or (self.kl_coef > 0 and self.divergence is None)

    @property
    def adds_nll(self) -> bool:
        """True if the loss has a cross-entropy term, see `nll_weights`."""
        return self.positive_nll is not None or self.observation_nll_coef > 0

    @property
    def divergence(self) -> Divergence | None:
        """Divergence over the vocabulary that is the KL term; None: an estimate, or no KL term."""
        given = self.kl_estimator
        found = DIVERGENCES.get(given) if isinstance(given, str) else given
        return found if self.kl_coef > 0 and isinstance(found, Divergence) else None

    @property
    def corrects_sampler(self) -> bool:
        """True if the loss accounts for completions of another policy than that of the update."""
        return self.importance_correction is not None or self.old_policy == "sampler"

    @property
    def needs_policy_kl(self) -> bool:
        """True if `kl_in_reward` is that of the policy before the update, not of the sampler."""
        return self.kl_in_reward is not None and self.corrects_sampler

    def find_uncorrected(self) -> list[str]:
        """Names of the terms in use that `importance_correction` or `old_policy` do not weight.

        A term of the sampled token has its weight. A term of a position (a divergence over the
        vocabulary, the entropy, an observation) has that of the completion, if there is one. With
        `old_policy: sampler` only terms with the ratio are weighted.
        """
        base = self.surrogate
        base = base.surrogate if isinstance(base, StepSurrogate) else base
        sampled, by_position = self.importance_correction is not None, False
        if self.importance_correction is not None:
            by_position = self.importance_correction.level != "token"
        to_sampler = self.old_policy == "sampler"
        kl = by_position if self.divergence else sampled or (to_sampler and self.kl_bias_correction)
        # {name: (is in use, is weighted)}
        terms = {
            "the surrogate loss": (
                self.reward_coef > 0,
                sampled or (to_sampler and not isinstance(base, PolicyGradient)),
            ),
            "kl_coef": (self.kl_coef > 0, kl),
            "log_ratio_coef": (self.log_ratio_coef > 0, sampled),
            "entropy_coef": (self.entropy_coef != 0, by_position),
            "positive_nll": (self.positive_nll is not None, sampled),
            "observation_nll_coef": (self.observation_nll_coef > 0, by_position),
        }
        return [name for name, (used, weighted) in terms.items() if used and not weighted]

    @property
    def needs_all_rows(self) -> bool:
        """True if a row with zero advantages can still have a gradient, from an added term."""
        return self.kl_coef > 0 or self.entropy_coef != 0 or self.log_ratio_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """True if `entropy_totals` needs every token's entropy before the step."""
        return self.top_entropy_quantile < 1

    @property
    def selects_tokens(self) -> bool:
        """True if `select_tokens` needs every token's log-probability before the step."""
        return isinstance(self.surrogate, StepSurrogate)

    def token_advantages(
        self,
        rewards: RewardTable,
        mask: Tensor,
        comm: Comm = ALONE,
        turns: Turns | None = None,
        score_norms: Tensor | None = None,
    ) -> Tensor:
        """[N, C] float32 advantage of every token of a rollout, 0 off `mask`.

        Args:
            rewards: of N = B * G completions.
            mask: [N, C] True marks a generated token.
            comm: of the ranks that share the batch.
            turns: of the episodes; None: every completion is one turn.
            score_norms: [N, C] see `TokenLogprobs`; needed only by `OptimalTokenBaseline`.
        """
        device, mask = mask.device, mask.to(rewards.total.device)
        lengths = mask.sum(1).view_as(rewards.total)
        if turns is not None and isinstance(self.advantages, TurnAdvantages):
            values = self.advantages.per_token(rewards, lengths, comm, turns)
        elif isinstance(self.advantages, OptimalTokenBaseline) and score_norms is not None:
            norms = score_norms.to(mask.device)
            values = self.advantages.per_token(rewards, mask, comm, norms)
        else:
            values = self.advantages(rewards, lengths, comm).reshape(-1, 1)
        if self.advantage_clip is not None:
            values = values.clamp(-self.advantage_clip, self.advantage_clip)
        # The last token has the whole advantage; each token before it gamma times that of the next.
        remaining = (mask.flip(1).cumsum(1).flip(1) - 1).clamp(min=0)
        discounted = torch.where(mask, values * self.gamma ** remaining.double(), 0.0)
        return discounted.to(device, torch.float32)

    def loss_weights(
        self,
        loss_mask: Tensor,
        truncated: Tensor,
        max_completion_length: int,
        comm: Comm = ALONE,
        dtype: torch.dtype = torch.float32,
        informative: Tensor | None = None,
    ) -> Tensor:
        """[M, C] weight of every token of an optimizer step; exactly 0 for tokens not in the loss.

        Args:
            loss_mask: [M, C] True marks a generated token.
            truncated: [M] True if the length limit stopped the completion.
            max_completion_length: that limit, in tokens.
            comm: of the ranks that share the step.
            dtype: of the weights.
            informative: [M] True for completions of a group with an advantage; used by
                `exclude_zero_variance`. None: all.
        """
        counted = torch.ones_like(truncated)
        if self.exclude_zero_variance and informative is not None:
            counted = informative
        if self.mask_truncated_completions:
            loss_mask = loss_mask & ~truncated[:, None]
        mask = (loss_mask & counted[:, None]).to(dtype)
        # Masked truncated completions count in N: otherwise the few others would get large weights.
        num_completions = comm.sum(counted.to(dtype).sum()).clamp(min=1)
        num_tokens = comm.sum(mask.sum()).clamp(min=1)
        return self.aggregation(mask, num_completions, num_tokens, max_completion_length)

    def subtract_kl(
        self, rewards: RewardTable, logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor
    ) -> RewardTable:
        """Return the rewards without the KL of `kl_in_reward`; the same ones without that option.

        Args:
            rewards: of N = B * G completions.
            logprobs: [N, C] at sampling; before the update if `needs_policy_kl`.
            ref_logprobs: [N, C] under the reference; needed only with `kl_in_reward`.
            mask: [N, C] True marks a generated token.
        """
        if self.kl_in_reward is None:
            return rewards
        assert ref_logprobs is not None, "kl_in_reward needs reference log-probs"
        kl = self.kl_in_reward.token_kl(logprobs, ref_logprobs, mask).sum(1).to(rewards.total)
        total = rewards.total - self.kl_in_reward.coef * kl.view_as(rewards.total)
        return replace(rewards, total=total)

    def nll_weights(
        self, loss_mask: Tensor, observed: Tensor, correct: Tensor, comm: Comm = ALONE
    ) -> Tensor:
        """[M, C] weight of -log p of every token of an optimizer step; 0 for tokens without it.

        Args:
            loss_mask: [M, C] True marks a generated token.
            observed: [M, C] True marks a token of the environment.
            correct: [M] True for completions that `positive_nll` imitates.
            comm: of the ranks that share the step.
        """
        imitated = 0.0 if self.positive_nll is None else self.positive_nll.coef
        terms = (imitated, loss_mask & correct[:, None]), (self.observation_nll_coef, observed)
        # coef / number of the term's tokens in the step, on all ranks
        scales = [coef / comm.sum(mask.sum()).clamp(min=1) for coef, mask in terms]
        return scales[0] * terms[0][1] + scales[1] * terms[1][1]

    def entropy_totals(
        self, weights: Tensor, entropy: Tensor | None = None, comm: Comm = ALONE
    ) -> EntropyTotals:
        """Compute the totals that all micro-batches of an optimizer step share.

        Args:
            weights: [M, C] of all rows of the step on this rank.
            entropy: [M, C] before the step; needed only if `needs_entropy`.
            comm: of the ranks that share the step.
        """
        in_loss, threshold = weights != 0, None
        if self.needs_entropy:
            assert entropy is not None, "top_entropy_quantile < 1 needs entropies"
            # float32: a quantile that falls on a token must not miss it by rounding in 1 - share.
            counted = entropy.detach().float()
            flat = counted.masked_fill(~in_loss, torch.nan).flatten()
            threshold = comm.gather(flat).nanquantile(1 - self.top_entropy_quantile)
            in_loss = in_loss & (counted >= threshold)
        return EntropyTotals(comm.sum(in_loss.sum()).clamp(min=1), threshold)

    def select_tokens(
        self, batch: TrainingBatch, new: TokenLogprobs | None = None, comm: Comm = ALONE
    ) -> TrainingBatch:
        """Return all rows of an optimizer step with the tokens that its surrogate selects.

        Args:
            batch: all rows of the step on this rank.
            new: [M, C] before the step; needed only if `selects_tokens`.
            comm: of the ranks that share the step.
        """
        if not isinstance(self.surrogate, StepSurrogate):
            return batch
        assert new is not None, f"{type(self.surrogate).__name__} needs log-probabilities"
        with torch.no_grad():
            inputs = self._surrogate_inputs(new, batch)
            return replace(batch, selected=self.surrogate.select(inputs, token_keys(batch), comm))

    def loss(
        self, new: TokenLogprobs, batch: TrainingBatch, totals: EntropyTotals | None = None
    ) -> LossOutput:
        """Loss of a micro-batch; the losses of an optimizer step's micro-batches add up.

        Args:
            new: [M, C] current log-probabilities and entropies, with gradient.
            batch: M completions; without `old_logprobs` the current policy is the old one: there is
                one optimizer step per rollout.
            totals: of the step, for the entropy bonus and mask; None if these are all its
                rows. If they are given, the batch has passed `select_tokens`.
        """
        if totals is None:
            totals = self.entropy_totals(batch.loss_weights, new.entropy)
            batch = self.select_tokens(batch, new)
        inputs = self._surrogate_inputs(new, batch)
        in_loss = batch.loss_weights != 0
        entropy = torch.where(in_loss, new.entropy, 0.0)
        # `kept` selects tokens of the policy-gradient term. The KL term holds for all tokens.
        kept = in_loss
        if totals.entropy_threshold is not None:
            kept = kept & (entropy.detach().float() >= totals.entropy_threshold)
        position_weights = self._position_weights(inputs.old_logprobs, batch, in_loss)
        bonus = (position_weights * torch.where(kept, entropy, 0.0)).sum()
        if self.off_policy_mask_threshold is not None:
            # Mean of log p_sampler - log p over a completion. A completion of negative advantage
            # that became much less likely has been pushed far enough: its tokens are left out.
            drift = torch.where(in_loss, batch.sampler_logprobs - inputs.logprobs.detach(), 0.0)
            drift = row_mean(drift.nan_to_num(0.0), in_loss)
            kept = kept & ((inputs.advantages >= 0) | (drift <= self.off_policy_mask_threshold))
        if self.kl_mask_threshold is not None:
            kept = kept & (inputs.log_ratio.detach().square() / 2 <= self.kl_mask_threshold)
        token_loss = self.reward_coef * torch.where(kept, self.surrogate(inputs), 0.0)
        stats = {"policy/entropy_trained": entropy, "policy/log_ratio": inputs.log_ratio}
        low, high = self.surrogate.find_clipped(inputs)
        stats["policy/clip_low_frac"], stats["policy/clip_high_frac"] = low, high
        if kept is not in_loss:
            stats["policy/kept_frac"] = kept
        if inputs.selected is not None:
            stats["policy/selected_frac"] = inputs.selected
        if self.importance_correction is not None:
            stats["policy/sampler_weight"] = inputs.correction
        if self.log_ratio_coef > 0:
            penalty = inputs.log_ratio.square() * inputs.correction
            token_loss = token_loss + self.log_ratio_coef * penalty
        if self.kl_coef > 0:
            if new.divergence is None:
                penalty = self._kl_estimate(inputs, batch)
            else:
                penalty = position_weights * torch.where(in_loss, new.divergence, 0.0)
            token_loss, stats["policy/kl"] = token_loss + self.kl_coef * penalty, penalty
        # loss = sum_t u_t (reward_coef surrogate_t + log_ratio_coef s_t^2 + kl_coef KL_t)
        #        - entropy_coef * mean entropy.
        # The loss weights u contain the denominators of the whole optimizer step, so micro-batches
        # add up.
        weights = self.aggregation.rescale_micro_batch(batch.loss_weights, in_loss)
        loss = (weights * token_loss).sum() - self.entropy_coef * bonus / totals.num_tokens
        sums = {name: (value.detach() * in_loss).sum() for name, value in stats.items()}
        pairs = {name: torch.stack([x, in_loss.sum()]) for name, x in sums.items()}
        largest = inputs.ratio.detach().max()
        pairs[RATIO_MAX] = torch.stack([largest, in_loss.any().to(largest)])
        if batch.nll_weights is not None:
            nll, nll_pairs = self._nll(new, batch, batch.nll_weights)
            loss, pairs = loss + nll, pairs | nll_pairs
        return LossOutput(loss, pairs)

    def _nll(
        self, new: TokenLogprobs, batch: TrainingBatch, weights: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the [] weighted sum of -log p, and {name: [2] its sum and count} by term."""
        nll = torch.where(weights != 0, -new.logprobs, 0.0)
        if self.importance_correction is not None:
            # Of all generated tokens: those without a weight in the loss may be imitated.
            old = new.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
            arguments = old, batch.sampler_logprobs, batch.loss_mask
            sampled = self.importance_correction(*arguments)
            by_position = self.importance_correction.position_weights(*arguments)
            weights = weights * torch.where(batch.loss_mask, sampled, by_position)
        terms = {"positive": batch.loss_mask} if self.positive_nll is not None else {}
        if self.observation_nll_coef > 0:
            terms["observation"] = ~batch.loss_mask
        pairs = {}
        for name, mask in terms.items():
            counted = mask & (weights != 0)
            total = torch.where(counted, nll.detach(), 0.0).sum()
            pairs[f"policy/{name}_nll"] = torch.stack([total, counted.sum()])
        return (weights * nll).sum(), pairs

    def _position_weights(self, old: Tensor, batch: TrainingBatch, mask: Tensor) -> Tensor:
        """[M, 1] weights of terms of a position, see `ImportanceCorrection.position_weights`."""
        if self.importance_correction is None:
            return torch.ones_like(old[:, :1])
        return self.importance_correction.position_weights(old, batch.sampler_logprobs, mask)

    def _kl_estimate(self, inputs: SurrogateInputs, batch: TrainingBatch) -> Tensor:
        """[M, C] KL estimate of each token, with gradient."""
        assert batch.ref_logprobs is not None, "kl_coef > 0 needs reference log-probs"
        # d = l_ref - l; k3 = e^d - d - 1 >= 0 (DeepSeekMath, eq. 4). Its gradient on-policy is
        # that of KL(reference || policy); times the ratio w, of KL(policy || reference).
        d = torch.where(inputs.mask, batch.ref_logprobs, 0.0) - inputs.logprobs
        given = self.kl_estimator
        estimator: KLEstimator = KL_ESTIMATORS[given] if isinstance(given, str) else given
        penalty = estimator(d) * inputs.correction
        return penalty * inputs.ratio if self.kl_bias_correction else penalty

    def _surrogate_inputs(self, new: TokenLogprobs, batch: TrainingBatch) -> SurrogateInputs:
        """Prepare the inputs of the surrogate, with zeros on padding.

        `torch.where` comes before any arithmetic: the gradient of 0 * NaN would be NaN.
        """
        in_loss = batch.loss_weights != 0
        logprobs = torch.where(in_loss, new.logprobs, 0.0)
        given = batch.sampler_logprobs if self.old_policy == "sampler" else batch.old_logprobs
        # Without one the ratio is 1, and its gradient that of the log-probability.
        old = logprobs.detach() if given is None else torch.where(in_loss, given, 0.0)
        # s = l - l_old, w = e^s. On-policy w is 1, and its gradient is that of l.
        log_ratio, correction = logprobs - old, torch.ones_like(logprobs)
        if self.importance_correction is not None:
            correction = self.importance_correction(old, batch.sampler_logprobs, in_loss)
        ratio = RATIOS[self.importance_sampling_level](log_ratio, in_loss)
        advantages = torch.where(in_loss, batch.advantages, 0.0)
        return SurrogateInputs(
            logprobs, log_ratio, ratio, advantages, in_loss, correction, batch.selected
        )
