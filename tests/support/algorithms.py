"""The published algorithms as objectives, by name, and those of distillation."""

from litgrpo.algorithms.divergences import JSD
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.published import PUBLISHED as ALGORITHMS
from litgrpo.algorithms.surrogates import Clipped

CLIP_HIGHER = Clipped(0.2, 0.28)
PUBLISHED = {name: algorithm.objective for name, algorithm in ALGORITHMS.items()}

# Those of `configs/distillation`: the reference is the teacher.
DISTILLING = {
    "on_policy": Objective(reward_coef=0.0, kl_coef=1.0),
    "gkd": Objective(reward_coef=0.0, kl_coef=1.0, kl_estimator="reverse_kl"),
    "forward": Objective(kl_coef=0.5, kl_estimator="forward_kl"),
    "jsd": Objective(kl_coef=0.5, kl_estimator=JSD(0.1)),
}
