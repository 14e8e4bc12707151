"""Surrogate losses: the loss of one token, from its ratio and its advantage."""

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from litgrpo.algorithms.inputs import Need, SurrogateInputs
from litgrpo.algorithms.token_selection import (
    covariance,
    largest_second_moments,
    smallest,
)
from litgrpo.argument_types import check_field_types
from litgrpo.distributed.collectives import Comm
from litgrpo.tensors import row_mean, safe_exp

LOG_RATIO_ROUNDING = 1e-4  # two forward passes in float32 differ by less, in nats


class Surrogate(ABC):
    """The loss of one token.

    Example:
        A surrogate is a frozen dataclass; its fields are the options of the config::

            @dataclass(frozen=True)
            class MyLoss(Surrogate):
                max_ratio: float = 2.0

                def __call__(self, inputs):
                    ratio = inputs.ratio.clamp(max=self.max_ratio)
                    return -ratio * inputs.advantages * inputs.sampler_weight
    """

    needs: ClassVar[frozenset[Need]] = frozenset()
    ignores_token: ClassVar[bool] = False

    @property
    def uses_ratio(self) -> bool:
        """True if it has the importance ratio, which `old_policy: sampler` makes its correction."""
        return True

    @property
    def is_per_token(self) -> bool:
        """True if it has a meaning only with `importance_sampling_level: token`."""
        return False

    def select(self, inputs: SurrogateInputs, keys: Tensor, comm: Comm) -> Tensor | None:
        """[M, C] tokens to treat differently, see `StepSurrogate`; None: it selects none."""
        return None

    @abstractmethod
    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        """[M, C] loss of each token, times `inputs.sampler_weight`."""

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
        if not 0 <= self.clip_low <= 1:  # a ratio is at least 0
            raise ValueError(f"clip_low is {self.clip_low}; it must be from 0 to 1 (never clips)")
        if not self.clip_high >= 0:
            raise ValueError(f"clip_high is {self.clip_high}; it must be at least 0")
        if self.max_ratio is not None and self.max_ratio <= 0:
            raise ValueError(f"max_ratio is {self.max_ratio}; it must be above 0")

    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        # DeepSeekMath, eq. 3: the gain is min(w A, clip(w, 1 - eps, 1 + eps) A). The minimum is
        # pessimistic: it removes the gradient only if the ratio has already moved in the direction
        # of the advantage. For A < 0 and w > 1 + eps the gain w A is unbounded below; `max_ratio`
        # bounds it.
        unclipped = inputs.ratio
        if self.max_ratio is not None:
            unclipped = unclipped.clamp(max=self.max_ratio)
        clipped = inputs.ratio.clamp(*self.clip_range)
        gain = torch.minimum(unclipped * inputs.advantages, clipped * inputs.advantages)
        return -gain * inputs.sampler_weight

    @property
    def clip_range(self) -> tuple[float, float]:
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
        if self.max_ratio <= 1:
            warnings.warn(f"CISPO: max_ratio {self.max_ratio} <= 1 shrinks gradients", stacklevel=3)

    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        # REINFORCE with a truncated importance weight: the clip changes the weight of a token but
        # never removes its gradient, because the ratio is detached.
        weight = inputs.ratio.detach().clamp(max=self.max_ratio) * inputs.sampler_weight
        return -weight * inputs.advantages * inputs.logprobs

    @property
    def clip_range(self) -> tuple[float, float]:
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
        if min(self.tau_positive, self.tau_negative) <= 0:
            setting = f"tau_positive {self.tau_positive}, tau_negative {self.tau_negative}"
            raise ValueError(f"{setting}: must be > 0")

    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        tau = torch.where(inputs.advantages > 0, self.tau_positive, self.tau_negative)
        # 4 / tau: the gate's derivative at w = 1 is then 1, as that of the ratio.
        gate = torch.sigmoid(tau * (inputs.ratio - 1)) * 4 / tau
        return -gate * inputs.advantages * inputs.sampler_weight


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
        # The bounds are those of TRL: W is kept within [1e-8, e^20].
        floor = math.log(1e-8)
        steps = inputs.log_ratio.detach().clamp(-20.0, 20.0).sum(1, keepdim=True)
        log_weight = inputs.sampler_weight.log().clamp(floor, 20.0).sum(1, keepdim=True)
        log_w = (steps + log_weight).clamp(floor, 20.0)
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
        s = inputs.log_ratio
        up, down = s.clamp(max=self.clip_high), s.clamp(min=-self.clip_low)
        mean = row_mean(torch.where(inputs.advantages > 0, up, down), inputs.mask)
        return -safe_exp(mean) * inputs.advantages * inputs.sampler_weight

    @property
    def clip_range(self) -> tuple[float, float]:
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
        for name, low in (("max_low", 0.0), ("max_high", 0.0), ("max_ratio", 1.0)):
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low:g}")

    @property
    def is_per_token(self) -> bool:
        return True

    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        fell, rose = self._outside(inputs)
        inside = ~torch.where(inputs.advantages > 0, rose, fell)
        weight = inputs.ratio.detach().clamp(max=self.max_ratio) * inputs.sampler_weight
        return torch.where(inside, -weight * inputs.advantages * inputs.logprobs, 0.0)

    def _outside(self, inputs: SurrogateInputs) -> tuple[Tensor, Tensor]:
        """[M, C] tokens that became less likely, or more likely, by more than the limit."""
        new, old = inputs.logprobs.detach(), inputs.old_logprobs
        moved = new.exp() - old.exp()
        distance = moved.abs() if self.divergence == "tv" else binary_kl(old, new)
        return (moved < 0) & (distance > self.max_low), (moved > 0) & (distance > self.max_high)

    def find_clipped(self, inputs: SurrogateInputs) -> tuple[Tensor, Tensor]:
        fell, rose = self._outside(inputs)
        return fell & (inputs.advantages < 0), rose & (inputs.advantages > 0)


def binary_kl(old: Tensor, new: Tensor) -> Tensor:
    """KL(p_old || p) of a token against all others, from log p_old and log p; never infinite."""
    # log(1 - p), at least log 1e-8.
    rest_old, rest_new = (torch.log((-torch.expm1(x)).clamp(min=1e-8)) for x in (old, new))
    return old.exp() * (old - new) - torch.expm1(old) * (rest_old - rest_new)


@check_field_types
@dataclass(frozen=True)
class PolicyGradient(Surrogate):
    """REINFORCE, RLOO: -A l, for one optimizer step per rollout. Source: Williams 1992."""

    @property
    def uses_ratio(self) -> bool:
        return False

    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        return -inputs.advantages * inputs.logprobs * inputs.sampler_weight


class StepSurrogate(Surrogate):
    """A surrogate that treats some tokens differently, selected among all of the optimizer step.

    `Objective.prepare_step` calls `select` once per step, before it is split into micro-batches.

    Example:
        Drop the tokens of the lowest probability::

            @dataclass(frozen=True)
            class DropUnlikely(StepSurrogate):
                surrogate: Surrogate = field(default_factory=Clipped)

                def select(self, inputs, keys, comm):
                    return smallest(inputs.logprobs.where(inputs.mask, torch.nan), 10, keys, comm)
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"before_step"})
    surrogate: Surrogate

    @property
    def uses_ratio(self) -> bool:
        return self.surrogate.uses_ratio

    @property
    def is_per_token(self) -> bool:
        return self.surrogate.is_per_token

    def __post_init__(self) -> None:
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
        assert inputs.selected is not None
        return torch.where(inputs.selected, 0.0, self.surrogate(inputs))

    def find_clipped(self, inputs: SurrogateInputs) -> tuple[Tensor, Tensor]:
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
        super().__post_init__()
        _check_frac(self.frac)
        if not self.min_cov < self.max_cov:
            raise ValueError(f"min_cov {self.min_cov}, max_cov {self.max_cov}: must be min < max")

    def select(self, inputs: SurrogateInputs, keys: Tensor, comm: Comm) -> Tensor:
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
        super().__post_init__()
        _check_frac(self.frac)
        if not 0 <= self.coef < math.inf:
            raise ValueError(f"coef is {self.coef}; it must be >= 0")

    def select(self, inputs: SurrogateInputs, keys: Tensor, comm: Comm) -> Tensor:
        cov = covariance(inputs.logprobs, inputs.advantages, inputs.mask, comm)
        number = max(1, int(self.frac * comm.sum(inputs.mask.sum())))
        return smallest((-cov).where(inputs.mask, torch.nan), number, keys, comm)

    def __call__(self, inputs: SurrogateInputs) -> Tensor:
        assert inputs.selected is not None
        moved = inputs.selected & (inputs.log_ratio.detach().abs() > LOG_RATIO_ROUNDING)
        penalty = self.coef * inputs.log_ratio.abs() * inputs.sampler_weight
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
        super().__post_init__()
        if not self.max_second_moment >= 0:
            raise ValueError(f"max_second_moment is {self.max_second_moment}; it must be >= 0")

    def select(self, inputs: SurrogateInputs, keys: Tensor, comm: Comm) -> Tensor:
        # A token within rounding did not move: its sign, and so its place in the mean, is chance.
        moved = inputs.log_ratio.detach().abs() > LOG_RATIO_ROUNDING
        affected = inputs.mask & moved & (inputs.log_ratio * inputs.advantages > 0)
        return largest_second_moments(inputs.log_ratio, affected, self.max_second_moment, comm)


def _check_frac(frac: float) -> None:
    """Reject a fraction of tokens outside of (0, 1]."""
    if not 0 < frac <= 1:
        raise ValueError(f"frac is {frac}; it must be above 0 and at most 1")
