"""Terms that are added to the surrogate loss."""

import math
from dataclasses import dataclass

from torch import Tensor

from litgrpo.argument_types import check_field_types
from litgrpo.types import RewardTable


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
