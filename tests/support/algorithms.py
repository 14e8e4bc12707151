"""The published algorithms as objectives, under the names of their overlays in `configs`."""

from litgrpo.algorithms.advantages import Normalized
from litgrpo.algorithms.estimators import DecoupledNormalized, TopShare
from litgrpo.algorithms.kl import k2
from litgrpo.algorithms.loss_aggregation import Constant, MicroBatchTokenMean
from litgrpo.algorithms.losses import Clipped, Objective, TokenMean
from litgrpo.algorithms.surrogates import CISPO, GMPO, SAPO, VESPO, PolicyGradient
from litgrpo.algorithms.turn_credit import GTPO, MTGRPO, GiGPO, ReBN, WithoutVoid

CLIP_HIGHER = Clipped(0.2, 0.28)
SUM = Constant(by_limit=False)

PUBLISHED = {
    "grpo": Objective(kl_coef=0.04),
    "dr_grpo": Objective(Normalized(scale="none"), loss_aggregation=Constant()),
    "dapo": Objective(
        surrogate=CLIP_HIGHER, loss_aggregation=TokenMean(), mask_truncated_completions=True
    ),
    "bnpo": Objective(loss_aggregation=MicroBatchTokenMean()),
    "gspo": Objective(ratio="sequence", surrogate=Clipped(3e-4, 4e-4)),
    "cispo": Objective(surrogate=CISPO(), loss_aggregation=TokenMean()),
    "sapo": Objective(surrogate=SAPO()),
    "vespo": Objective(surrogate=VESPO(), loss_aggregation=TokenMean()),
    "luspo": Objective(ratio="sequence", surrogate=Clipped(2e-3, 2.5e-3), loss_aggregation=SUM),
    "gmpo": Objective(surrogate=GMPO()),
    "rloo": Objective(
        Normalized("others", "none"), surrogate=PolicyGradient(), loss_aggregation=SUM
    ),
    "reinforce": Objective(
        Normalized("none", "none"), surrogate=PolicyGradient(), loss_aggregation=SUM
    ),
    "reinforce_baseline": Objective(
        Normalized("batch", "none"), surrogate=PolicyGradient(), loss_aggregation=SUM
    ),
    "reinforce_pp": Objective(Normalized("batch", "batch"), kl_coef=0.01, kl=k2),
    "gdpo": Objective(DecoupledNormalized()),
    "gfpo": Objective(TopShare(by="shortest", among_kept=True), loss_aggregation=TokenMean()),
    "gigpo": Objective(GiGPO()),
    "mt_grpo": Objective(MTGRPO()),
    "gtpo": Objective(GTPO()),
    "rebn": Objective(ReBN(), surrogate=PolicyGradient(), loss_aggregation=Constant()),
    "simpletir": Objective(WithoutVoid()),
}
