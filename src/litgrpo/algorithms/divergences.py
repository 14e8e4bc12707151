"""Divergences between two distributions over the whole vocabulary, exact, with their gradients.

They replace a KL estimate of the sampled token in the KL term (`Objective.kl_estimator`): with a
reference that is another model, the teacher, training is distillation on the policy's own samples.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from litgrpo.argument_types import check_field_types


class Divergence(ABC):
    """Divergence of the policy p from the reference q, distributions over V tokens."""

    def __call__(self, logits: Tensor, reference: Tensor) -> Tensor:
        """[k] divergence (nats) at each position, with gradient by the policy's logits.

        Args:
            logits: [k, V] of the policy, float32, with gradient.
            reference: [k, V] of the reference, float32.
        """
        apply: Any = _DivergenceOfLogits.apply
        value: Tensor = apply(logits, reference, self)
        return value

    @abstractmethod
    def value_and_slope(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Compute [k] D and [k, V] p_v * dD/dp_v from log-probabilities [k, V]."""


@dataclass(frozen=True)
class ReverseKL(Divergence):
    """KL(p || q) = sum_v p_v (log p_v - log q_v): the policy avoids what the reference avoids.

    Source: on-policy distillation, arXiv:2306.13649 (GKD), section 3; verl: `reverse_kl`.
    """

    def value_and_slope(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        slope = log_p.exp() * (log_p - log_q)
        return slope.sum(-1), slope


@dataclass(frozen=True)
class ForwardKL(Divergence):
    """KL(q || p) = sum_v q_v (log q_v - log p_v): the policy covers what the reference does.

    Source: knowledge distillation; on the policy's samples: arXiv:2306.13649 (GKD), section 3.
    """

    def value_and_slope(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        q = log_q.exp()
        return (q * (log_q - log_p)).sum(-1), -q


@check_field_types
@dataclass(frozen=True)
class JSD(Divergence):
    """Generalized Jensen-Shannon divergence, beta KL(q || m) + (1 - beta) KL(p || m).

    m = beta q + (1 - beta) p. It is never above log 2, unlike the KLs. Divided by beta it tends to
    the forward KL for beta -> 0, and divided by 1 - beta to the reverse KL for beta -> 1.
    Source: arXiv:2306.13649 (GKD), section 3; TRL: `beta` of GKDConfig.

    Args:
        beta: weight of the reference in the mixture, between 0 and 1.

    Example:
        >>> p = torch.tensor([[0.0, 0.0]])  # two tokens, equally likely
        >>> JSD()(p, p)
        tensor([0.])
    """

    beta: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.beta < 1:
            raise ValueError(
                f"beta is {self.beta}; it must be between 0 and 1. The limits are kl_estimator: "
                "forward_kl (0) and reverse_kl (1)"
            )

    def value_and_slope(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        p, q = log_p.exp(), log_q.exp()
        log_m = (self.beta * q + (1 - self.beta) * p).clamp(min=torch.finfo(p.dtype).tiny).log()
        # 0 log 0 = 0. The derivatives of m cancel: only the one of p log p is left.
        slope = (1 - self.beta) * torch.where(p > 0, p * (log_p - log_m), 0.0)
        forward = torch.where(q > 0, q * (log_q - log_m), 0.0)
        return slope.sum(-1) + self.beta * forward.sum(-1), slope


DivergenceName: TypeAlias = Literal["reverse_kl", "forward_kl", "jsd"]
DIVERGENCES: dict[str, Divergence] = {
    "reverse_kl": ReverseKL(),
    "forward_kl": ForwardKL(),
    "jsd": JSD(),
}


@check_field_types
@dataclass(frozen=True)
class TopK(Divergence):
    """A divergence over the reference's k most likely tokens, and one bin for all others.

    It is never above the divergence over all tokens, and equal to it for k of the size of the
    vocabulary. The proportions within the bin do not count. NeMo-RL: `topk_logits_k`, without
    the bin.

    Args:
        k: number of tokens, at least 1.
        divergence: over the k + 1 outcomes: reverse_kl, forward_kl, jsd, or a Divergence.

    Example:
        >>> p, q = torch.tensor([[0.7, 0.1, 0.2]]).log(), torch.tensor([[0.7, 0.2, 0.1]]).log()
        >>> bool(TopK(1)(p, q) < 1e-6)  # both give the first token 0.7
        True
    """

    k: int
    divergence: DivergenceName | Divergence = "reverse_kl"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k is {self.k}; it must be at least 1")
        if isinstance(self.divergence, str) and self.divergence not in DIVERGENCES:
            allowed = ", ".join(DIVERGENCES)
            raise ValueError(f"divergence is {self.divergence!r}; it must be one of {allowed}")
        if isinstance(self.divergence, TopK):
            raise ValueError("divergence of TopK is TopK; it must be one over all of its outcomes")

    def value_and_slope(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.divergence
        inner = DIVERGENCES[inner] if isinstance(inner, str) else inner
        if self.k >= log_q.shape[-1]:
            return inner.value_and_slope(log_p, log_q)
        top = log_q.topk(self.k, dim=-1).indices
        rest_p, rest_q = (
            x.scatter(-1, top, -torch.inf).logsumexp(-1, True) for x in (log_p, log_q)
        )
        binned_p, binned_q = (
            torch.cat([x.gather(-1, top), rest], -1)
            for x, rest in ((log_p, rest_p), (log_q, rest_q))
        )
        value, slope = inner.value_and_slope(binned_p, binned_q)
        # A token v of the bin has dD/dp_v = dD/dp_bin, so p_v dD/dp_v is its share of the bin's.
        return value, ((log_p - rest_p).exp() * slope[:, -1:]).scatter(-1, top, slope[:, :-1])


class _DivergenceOfLogits(torch.autograd.Function):
    """Divergence of softmax distributions; keeps one [k, V] tensor for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, reference: Tensor, divergence: Divergence) -> Tensor:
        log_p, log_q = logits.log_softmax(-1), reference.log_softmax(-1)
        value, slope = divergence.value_and_slope(log_p, log_q)
        # p_v = softmax(z)_v, so dD/dz_v = p_v (dD/dp_v - sum_w p_w dD/dp_w).
        ctx.save_for_backward(slope - log_p.exp_() * slope.sum(-1, keepdim=True))
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (of_logits,) = ctx.saved_tensors
        return of_logits * grad[:, None], None, None
