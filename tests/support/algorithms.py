"""The published algorithms as objectives, by the names of their files in `configs`."""

from litgrpo.algorithms.advantages import (
    GDPO,
    GFPO,
    Normalized,
    OptimalTokenBaseline,
    PassAtK,
    ReMax,
    Whitened,
)
from litgrpo.algorithms.divergences import JSD
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.surrogates import (
    CISPO,
    DPPO,
    GMPO,
    M2PO,
    SAPO,
    VESPO,
    ClipCov,
    Clipped,
    KLCov,
    PolicyGradient,
)
from litgrpo.algorithms.turns import GTPO, MTGRPO, GiGPO, ReBN, SimpleTIR

CLIP_HIGHER = Clipped(0.2, 0.28)

PUBLISHED = {
    "grpo": Objective(loss_aggregation="sequence_mean", kl_coef=0.04, kl_bias_correction=False),
    "dr_grpo": Objective(Normalized(scale="none"), loss_aggregation="constant_length"),
    "dapo": Objective(
        surrogate=CLIP_HIGHER, loss_aggregation="token_mean", mask_truncated_completions=True
    ),
    "bnpo": Objective(loss_aggregation="micro_batch_token_mean"),
    "gspo": Objective(
        importance_sampling_level="sequence",
        surrogate=Clipped(3e-4, 4e-4),
        loss_aggregation="sequence_mean",
    ),
    "cispo": Objective(surrogate=CISPO(), loss_aggregation="token_mean"),
    "sapo": Objective(surrogate=SAPO(), loss_aggregation="sequence_mean"),
    "vespo": Objective(surrogate=VESPO(), loss_aggregation="token_mean"),
    "luspo": Objective(
        importance_sampling_level="sequence",
        surrogate=Clipped(2e-3, 2.5e-3),
        loss_aggregation="sequence_sum",
    ),
    "gmpo": Objective(surrogate=GMPO(), loss_aggregation="sequence_mean"),
    "rloo": Objective(
        Normalized("others", "none"), surrogate=PolicyGradient(), loss_aggregation="sequence_sum"
    ),
    "reinforce": Objective(
        Normalized("none", "none"), surrogate=PolicyGradient(), loss_aggregation="sequence_sum"
    ),
    "reinforce_baseline": Objective(
        Normalized("batch", "none"), surrogate=PolicyGradient(), loss_aggregation="sequence_sum"
    ),
    "reinforce_pp": Objective(
        Normalized("batch", "batch"),
        loss_aggregation="sequence_mean",
        kl_coef=0.01,
        kl_estimator="k2",
        kl_bias_correction=False,
    ),
    "gdpo": Objective(GDPO(), loss_aggregation="sequence_mean"),
    "gfpo": Objective(
        GFPO(rank_by="shortest", normalize_kept_only=True), loss_aggregation="token_mean"
    ),
    "gigpo": Objective(GiGPO(), loss_aggregation="sequence_mean"),
    "mt_grpo": Objective(MTGRPO(), loss_aggregation="sequence_mean"),
    "gtpo": Objective(GTPO(), loss_aggregation="sequence_mean"),
    "rebn": Objective(ReBN(), surrogate=PolicyGradient(), loss_aggregation="constant_length"),
    "simpletir": Objective(SimpleTIR(), loss_aggregation="sequence_mean"),
    "dppo": Objective(old_policy="sampler", surrogate=DPPO()),
    "dppo_kl": Objective(old_policy="sampler", surrogate=DPPO("kl", 0.05, 0.05)),
    "prime_rl": Objective(
        Normalized(scale="none"),
        old_policy="sampler",
        surrogate=DPPO(max_low=0.2, max_high=0.2),
        log_ratio_coef=1e-3,
    ),
    "dro": Objective(Normalized(scale="none"), surrogate=PolicyGradient(), log_ratio_coef=0.5),
    "gspo_token": Objective(
        importance_sampling_level="sequence_token",
        surrogate=Clipped(3e-4, 4e-4),
        loss_aggregation="sequence_mean",
    ),
    "max_rl": Objective(
        Normalized(scale="mean"), surrogate=PolicyGradient(), loss_aggregation="sequence_sum"
    ),
    "opo": Objective(
        Normalized("length_weighted", "none"),
        surrogate=PolicyGradient(),
        loss_aggregation="sequence_sum",
    ),
    "pass_at_k": Objective(PassAtK(), surrogate=PolicyGradient(), loss_aggregation="sequence_sum"),
    "gpg": Objective(
        Normalized(scale="none"), surrogate=PolicyGradient(), exclude_zero_variance=True
    ),
    "reinforce_pp_baseline": Objective(
        Whitened(), kl_coef=0.01, kl_estimator="k2", kl_bias_correction=False
    ),
    "clip_cov": Objective(surrogate=ClipCov()),
    "kl_cov": Objective(surrogate=KLCov()),
    "m2po": Objective(old_policy="sampler", surrogate=M2PO()),
    "remax": Objective(ReMax(), surrogate=PolicyGradient(), loss_aggregation="sequence_sum"),
    "otb": Objective(OptimalTokenBaseline()),
}

# Those of `configs/distillation`: the reference is the teacher.
DISTILLING = {
    "on_policy": Objective(reward_coef=0.0, kl_coef=1.0),
    "gkd": Objective(reward_coef=0.0, kl_coef=1.0, kl_estimator="reverse_kl"),
    "forward": Objective(kl_coef=0.5, kl_estimator="forward_kl"),
    "jsd": Objective(kl_coef=0.5, kl_estimator=JSD(0.1)),
}
