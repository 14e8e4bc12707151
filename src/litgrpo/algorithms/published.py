"""The published algorithms by name, as in `objective: dapo`.

What litgrpo chose where a paper leaves it open is in docs/explanation/algorithm.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from litgrpo.algorithms.advantages import (
    GDPO,
    GFPO,
    Normalized,
    OptimalTokenBaseline,
    PassAtK,
    ReMax,
    Whitened,
)
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

NAME = "name"  # key of an objective that names a published algorithm
CENTERED = Normalized(scale="none")
REINFORCE = PolicyGradient()
# REINFORCE++ with the KL in the loss: the gradient of k2 on-policy is that of the KL.
KL_K2: Mapping[str, Any] = {"kl_coef": 0.01, "kl_estimator": "k2", "kl_bias_correction": False}


@dataclass(frozen=True)
class Algorithm:
    """A published algorithm.

    Args:
        source: paper, or code.
        objective: its objective.
        beside: {argument of GRPO: value} that it also sets, unless they are given.

    Example:
        >>> PUBLISHED["dapo"].objective.surrogate
        Clipped(clip_low=0.2, clip_high=0.28, max_ratio=None)
    """

    source: str
    objective: Objective
    beside: Mapping[str, Any] = field(default_factory=dict)


# fmt: off
PUBLISHED: dict[str, Algorithm] = {
    "grpo": Algorithm("GRPO, arXiv:2402.03300, eq. 3, 4", Objective(
        loss_aggregation="sequence_mean", kl_coef=0.04, kl_bias_correction=False)),
    "dr_grpo": Algorithm("Dr. GRPO, arXiv:2503.20783", Objective(
        CENTERED, loss_aggregation="constant_length")),
    "dapo": Algorithm("DAPO, arXiv:2503.14476, eq. 8, 13", Objective(
        surrogate=Clipped(0.2, 0.28), mask_truncated_completions=True),
        {"dynamic_sampling_attempts": 8, "scoring": {"overlong_buffer_frac": 0.2}}),
    "bnpo": Algorithm("TRL's loss_type bnpo", Objective(
        loss_aggregation="micro_batch_token_mean")),
    "gspo": Algorithm("GSPO, arXiv:2507.18071, eq. 5, 7", Objective(
        importance_sampling_level="sequence", surrogate=Clipped(3e-4, 4e-4),
        loss_aggregation="sequence_mean")),
    "cispo": Algorithm("CISPO, arXiv:2506.13585, eq. 4", Objective(surrogate=CISPO())),
    "sapo": Algorithm("SAPO, arXiv:2511.20347", Objective(
        surrogate=SAPO(), loss_aggregation="sequence_mean")),
    "vespo": Algorithm("VESPO, arXiv:2602.10693", Objective(surrogate=VESPO())),
    "luspo": Algorithm("LUSPO, arXiv:2602.05261", Objective(
        importance_sampling_level="sequence", surrogate=Clipped(2e-3, 2.5e-3),
        loss_aggregation="sequence_sum")),
    "gmpo": Algorithm("GMPO, arXiv:2507.20673", Objective(
        surrogate=GMPO(), loss_aggregation="sequence_mean")),
    "rloo": Algorithm("RLOO, arXiv:2402.14740", Objective(
        Normalized("others", "none"), surrogate=REINFORCE, loss_aggregation="sequence_sum")),
    "reinforce": Algorithm("REINFORCE, Williams 1992", Objective(
        Normalized("none", "none"), surrogate=REINFORCE, loss_aggregation="sequence_sum")),
    "reinforce_baseline": Algorithm("REINFORCE with a baseline, Williams 1992", Objective(
        Normalized("batch", "none"), surrogate=REINFORCE, loss_aggregation="sequence_sum")),
    "reinforce_pp": Algorithm("REINFORCE++, arXiv:2501.03262", Objective(
        Normalized("batch", "batch"), loss_aggregation="sequence_mean", **KL_K2)),
    "gdpo": Algorithm("GDPO, arXiv:2601.05242", Objective(
        GDPO(), loss_aggregation="sequence_mean")),
    "gfpo": Algorithm("GFPO, arXiv:2508.09726", Objective(
        GFPO(rank_by="shortest", normalize_kept_only=True))),
    "gigpo": Algorithm("GiGPO, arXiv:2505.10978, eq. 3, 6 to 8", Objective(
        GiGPO(), loss_aggregation="sequence_mean")),
    "mt_grpo": Algorithm("MT-GRPO, arXiv:2505.11821", Objective(
        MTGRPO(), loss_aggregation="sequence_mean")),
    "gtpo": Algorithm("GTPO, arXiv:2511.14846", Objective(
        GTPO(), loss_aggregation="sequence_mean")),
    "rebn": Algorithm("Return batch normalization, arXiv:2510.01051", Objective(
        ReBN(), surrogate=REINFORCE, loss_aggregation="constant_length")),
    "simpletir": Algorithm("SimpleTIR, arXiv:2509.02479", Objective(
        SimpleTIR(), loss_aggregation="sequence_mean")),
    "dppo": Algorithm("DPPO-Binary-TV, arXiv:2602.04879; verl: dppo_tv", Objective(
        old_policy="sampler", surrogate=DPPO())),
    "dppo_kl": Algorithm("DPPO-Binary-KL, arXiv:2602.04879; verl: dppo_kl", Objective(
        old_policy="sampler", surrogate=DPPO("kl", 0.05, 0.05))),
    "prime_rl": Algorithm("default of prime-rl, arXiv:2602.04879, arXiv:2602.02276", Objective(
        CENTERED, old_policy="sampler", surrogate=DPPO(max_low=0.2, max_high=0.2),
        log_ratio_coef=1e-3)),
    "dro": Algorithm("DRO, arXiv:2405.19107; verl: dro", Objective(
        CENTERED, surrogate=REINFORCE, log_ratio_coef=0.5)),
    "gspo_token": Algorithm("GSPO-token, arXiv:2507.18071, eq. 13, 14; verl: gspo", Objective(
        importance_sampling_level="sequence_token", surrogate=Clipped(3e-4, 4e-4),
        loss_aggregation="sequence_mean")),
    "max_rl": Algorithm("MaxRL, arXiv:2602.02710; prime-rl: max_rl", Objective(
        Normalized(scale="mean"), surrogate=REINFORCE, loss_aggregation="sequence_sum")),
    "opo": Algorithm("OPO, arXiv:2505.23585; verl: opo", Objective(
        Normalized("length_weighted", "none"), surrogate=REINFORCE,
        loss_aggregation="sequence_sum")),
    "pass_at_k": Algorithm("Pass@k, arXiv:2503.19595; verl: grpo_passk", Objective(
        PassAtK(), surrogate=REINFORCE, loss_aggregation="sequence_sum")),
    "gpg": Algorithm("GPG, arXiv:2504.02546; verl: gpg", Objective(
        CENTERED, surrogate=REINFORCE, exclude_zero_variance=True)),
    "reinforce_pp_baseline": Algorithm("REINFORCE++-baseline, arXiv:2501.03262", Objective(
        Whitened(), **KL_K2)),
    "clip_cov": Algorithm("Clip-Cov, arXiv:2505.22617, eq. 10 to 12", Objective(
        surrogate=ClipCov())),
    "kl_cov": Algorithm("KL-Cov, arXiv:2505.22617, eq. 10, 13, 14", Objective(surrogate=KLCov())),
    "m2po": Algorithm("M2PO, arXiv:2510.01161, algorithm 1; AReaL: m2_threshold", Objective(
        old_policy="sampler", surrogate=M2PO())),
    "remax": Algorithm("ReMax, arXiv:2310.10505; verl: remax", Objective(
        ReMax(), surrogate=REINFORCE, loss_aggregation="sequence_sum")),
    "otb": Algorithm("optimal token baseline, arXiv:2602.07078", Objective(
        OptimalTokenBaseline())),
}
# fmt: on


def find_algorithm(name: object) -> Algorithm:
    """Return a published algorithm by its name, or raise a ValueError with names like it."""
    algorithm = PUBLISHED.get(name) if isinstance(name, str) else None
    if algorithm is None:
        nearest = get_close_matches(str(name), PUBLISHED) or PUBLISHED
        raise ValueError(
            f"objective is {name!r}, but no published algorithm has this name: use one such as "
            f"{', '.join(nearest)}, or {{option: value}}"
        )
    return algorithm


def apply_name(arguments: dict[str, Any]) -> None:
    """Replace a named objective in the arguments of GRPO, in place, by its options.

    Options beside the name replace those of the published objective.
    """
    objective = arguments.get("objective")
    if isinstance(objective, str):
        objective = {NAME: objective}
    if isinstance(objective, Mapping) and NAME in objective:
        algorithm = find_algorithm(objective[NAME])
        changes = {key: value for key, value in objective.items() if key != NAME}
        arguments["objective"] = with_changes(settings_of(algorithm.objective), changes)
        for name, value in algorithm.beside.items():
            if isinstance(value, Mapping) and isinstance(options := arguments.get(name), Mapping):
                arguments[name] = {**value, **options}
            else:
                arguments.setdefault(name, value)


def settings_of(part: Any) -> dict[str, Any]:
    """Return {field: value} of what differs from the defaults; objects with `class_path`."""
    default = type(part)()
    values = {option.name: getattr(part, option.name) for option in fields(part)}
    changed = [name for name, value in values.items() if value != getattr(default, name)]
    return {name: _plain(values[name]) for name in changed}


def _plain(value: Any) -> Any:
    """Return a value of an option as settings."""
    if is_dataclass(value):
        kind = type(value)
        inner = {option.name: _plain(getattr(value, option.name)) for option in fields(value)}
        return {"class_path": f"{kind.__module__}.{kind.__qualname__}", **inner}
    return list(value) if isinstance(value, tuple) else value


def with_changes(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with others over them; an object of another class replaces one."""
    result = dict(settings)
    for name, new in changes.items():
        old = result.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            class_name = str(new.get("class_path", "")).rpartition(".")[2]
            if class_name in ("", str(old["class_path"]).rpartition(".")[2]):
                new = with_changes(old, {**new, "class_path": old["class_path"]})  # noqa: PLW2901
        result[name] = new
    return result
