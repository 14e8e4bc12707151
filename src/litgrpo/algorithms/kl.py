"""KL from d [M, C], log-probability under the reference minus that now (Schulman 2020), in nats."""

from torch import Tensor

from litgrpo.tensors import bounded_exp


def k1(d: Tensor) -> Tensor:
    """-d: unbiased; as a loss it feels the reference only with `kl_bias_correction`."""
    return -d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2: biased, but on-policy its gradient is that of the KL."""
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """e^d - d - 1: unbiased, never negative; that of GRPO, arXiv:2402.03300. Cannot overflow."""
    return bounded_exp(d) - d - 1


def absolute(d: Tensor) -> Tensor:
    """|d|: no divergence, but a penalty met in practice."""
    return d.abs()
