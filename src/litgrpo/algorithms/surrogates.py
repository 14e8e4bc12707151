"""Published surrogates beside the clipped one, which is in `objective`; a new loss goes here."""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from litgrpo.algorithms.losses import Surrogate, Tokens
from litgrpo.tensors import bounded_exp, row_mean


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
