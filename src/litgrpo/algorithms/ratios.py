"""Importance ratios of the update: each returns w from the log-ratios s [M, C] and their mask."""

from typing import Literal, TypeAlias

from torch import Tensor

from litgrpo.tensors import row_mean, safe_exp


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
