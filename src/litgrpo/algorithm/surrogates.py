"""Surrogates: the loss of one token, whose gradient moves the policy along the advantage."""

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from litgrpo.tensors import bounded_exp, row_mean


@dataclass(frozen=True)
class Tokens:
    """What a surrogate may look at; every field is finite, 0 or 1 on padding.

    Args:
        logprobs: [M, C] l, log-probability now, with gradient.
        log_ratio: [M, C] s, log-probability now minus before the update, with gradient.
        ratio: [M, C] or [M, 1] w, importance ratio of the update, with gradient.
        advantages: [M, C] A, how much better than expected.
        mask: [M, C] tokens that count.
        correction: [M, C] or [M, 1] weight of the trainer over the sampler.
    """

    logprobs: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    mask: Tensor
    correction: Tensor


class Surrogate(ABC):
    """The loss of one token."""

    @abstractmethod
    def __call__(self, tokens: Tokens) -> Tensor:
        """[M, C] loss of each token, corrected for the sampler."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """Ratios below and above which a token pushed further loses gradient; for statistics."""
        return 0.0, torch.inf


@dataclass(frozen=True)
class Clipped(Surrogate):
    """GRPO, DAPO, GSPO: -min(min(w, cap) A, clip(w, 1 - clip_low, 1 + clip_high) A).

    Source: PPO, arXiv:1707.06347; clip-higher: DAPO, arXiv:2503.14476 (0.2, 0.28); GSPO,
    arXiv:2507.18071 (3e-4, 4e-4 with `ratio: sequence`); cap: INTELLECT-2, arXiv:2505.07291.

    Args:
        clip_low: how far below 1 the ratio may go.
        clip_high: how far above 1 the ratio may go.
        cap: two-sided clip: largest ratio of a bad token that became likely; not given: none.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    cap: float | None = None

    def __post_init__(self) -> None:
        """Check the range."""
        if min(self.clip_low, self.clip_high) < 0:
            raise ValueError(f"clip_low {self.clip_low}, clip_high {self.clip_high}: must be >= 0")

    def __call__(self, tokens: Tokens) -> Tensor:
        """[M, C] clipped loss."""
        free = tokens.ratio.clamp(max=torch.inf if self.cap is None else self.cap)
        clipped = tokens.ratio.clamp(*self.clip_range)
        worst = torch.minimum(free * tokens.advantages, clipped * tokens.advantages)
        return -worst * tokens.correction

    @property
    def clip_range(self) -> tuple[float, float]:
        """The range of the clip."""
        return 1 - self.clip_low, 1 + self.clip_high


@dataclass(frozen=True)
class CISPO(Surrogate):
    """CISPO: -sg[min(w, cap)] A l; every token keeps its gradient. Source: arXiv:2506.13585.

    Args:
        cap: largest ratio, not its distance from 1; at 1 or less gradients shrink, with a warning.
    """

    cap: float = 5.0

    def __post_init__(self) -> None:
        """Warn of a cap that was meant as a distance from 1."""
        if self.cap <= 1:
            warnings.warn(f"CISPO's cap {self.cap} is <= 1: gradients shrink", stacklevel=3)

    def __call__(self, tokens: Tokens) -> Tensor:
        """[M, C] loss."""
        weight = tokens.ratio.detach().clamp(max=self.cap) * tokens.correction
        return -weight * tokens.advantages * tokens.logprobs

    @property
    def clip_range(self) -> tuple[float, float]:
        """The cap; capped tokens keep their gradient."""
        return 0.0, self.cap


@dataclass(frozen=True)
class SAPO(Surrogate):
    """SAPO: -4 / tau sigmoid(tau (w - 1)) A, a soft gate for the clip. Source: arXiv:2511.20347.

    Args:
        tau_positive: sharpness of the gate where A > 0.
        tau_negative: sharpness of the gate elsewhere; larger, for stability.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        """Check the range."""
        if min(self.tau_positive, self.tau_negative) <= 0:
            raise ValueError(f"tau {self.tau_positive}, {self.tau_negative}: must be above 0")

    def __call__(self, tokens: Tokens) -> Tensor:
        """[M, C] gated loss."""
        tau = torch.where(tokens.advantages > 0, self.tau_positive, self.tau_negative)
        gate = torch.sigmoid(tau * (tokens.ratio - 1)) * 4 / tau
        return -gate * tokens.advantages * tokens.correction


@dataclass(frozen=True)
class VESPO(Surrogate):
    """VESPO: -phi A l, phi = sg[exp(lam + k log W - lam W)], W the ratio of the whole completion.

    W is a product, not a mean, and holds the sampler's correction. Source: arXiv:2602.10693.

    Args:
        k: power of W where A >= 0 and where A < 0.
        lam: decay in W where A >= 0 and where A < 0.
    """

    k: tuple[float, float] = (2.0, 3.0)
    lam: tuple[float, float] = (3.0, 2.0)

    def __call__(self, tokens: Tokens) -> Tensor:
        """[M, C] loss; phi holds the correction."""
        floor = math.log(1e-8)
        steps = tokens.log_ratio.detach().clamp(-20.0, 20.0).sum(1, keepdim=True)
        correction = tokens.correction.log().clamp(floor, 20.0).sum(1, keepdim=True)
        log_w = (steps + correction).clamp(floor, 20.0)
        k = torch.where(tokens.advantages >= 0, *self.k)
        lam = torch.where(tokens.advantages >= 0, *self.lam)
        phi = (lam + k * log_w - lam * log_w.exp()).exp()
        return -phi * tokens.advantages * tokens.logprobs


@dataclass(frozen=True)
class GMPO(Surrogate):
    """GMPO: -A exp(mean of clipped s), a geometric mean of token ratios. Source: arXiv:2507.20673.

    Args:
        clip_low: how far below 0 a log-ratio may go where A < 0, in nats.
        clip_high: how far above 0 a log-ratio may go where A > 0, in nats.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __call__(self, tokens: Tokens) -> Tensor:
        """[M, C] loss of the row, at each of its tokens."""
        s = tokens.log_ratio
        up, down = s.clamp(max=self.clip_high), s.clamp(min=-self.clip_low)
        mean = row_mean(torch.where(tokens.advantages > 0, up, down), tokens.mask)
        return -bounded_exp(mean) * tokens.advantages * tokens.correction

    @property
    def clip_range(self) -> tuple[float, float]:
        """The range of the clip, as ratios."""
        return math.exp(-self.clip_low), math.exp(self.clip_high)


@dataclass(frozen=True)
class PolicyGradient(Surrogate):
    """REINFORCE, RLOO: -A l, for one update per rollout. Source: Williams 1992."""

    def __call__(self, tokens: Tokens) -> Tensor:
        """[M, C] loss."""
        return -tokens.advantages * tokens.logprobs * tokens.correction
