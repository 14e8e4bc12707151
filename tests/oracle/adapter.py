"""Compute TRL's cases with litgrpo's public objects: numpy in, numpy out.

Settings are mapped one to one. In addition, the accumulation settings scale the result: litgrpo
normalizes over all rows of an optimizer step at once, TRL over one micro-batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from litgrpo.algorithms.advantages import GDPO, Advantages, Normalized
from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.surrogates import CISPO, SAPO, VESPO, Clipped, Surrogate
from litgrpo.types import RewardTable, TokenLogprobs
from tests.support.by_hand import batch_of

Case = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray]

MAX_COMPLETION_LEN = 16
AGGREGATIONS = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "bnpo": "micro_batch_token_mean",
    "dr_grpo": "constant_length",
    "luspo": "sequence_sum",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
}


def _tensor(arrays: Arrays, name: str) -> Tensor:
    return torch.from_numpy(np.asarray(arrays[f"in/{name}"]).copy())


def _surrogate(case: Case) -> Surrogate:
    """Surrogate of a case. TRL's CISPO cap is `epsilon_high`; low caps warn in litgrpo."""
    low, high = case["epsilon"], case["epsilon_high"]
    high = low if high is None else high
    k_positive, lam_positive, k_negative, lam_negative = case["vespo"]
    match case["loss_type"]:
        case "cispo":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return CISPO(high)
        case "sapo":
            return SAPO(case["sapo_temperature_pos"], case["sapo_temperature_neg"])
        case "vespo":
            return VESPO((k_positive, k_negative), (lam_positive, lam_negative))
        case _:
            return Clipped(low, high, case["delta"])


def objective(case: Case) -> Objective:
    """Build the objective of a loss case."""
    correction = None
    if case["is_ratio"] is not None:
        level = "token" if case["is_ratio"] == "token" else "sequence"
        correction = ImportanceCorrection(level, max=None)
    return Objective(
        importance_sampling_level=case["level"],
        surrogate=_surrogate(case),
        loss_aggregation=AGGREGATIONS[case["loss_type"]],
        kl_coef=case["beta"],
        kl_estimator="k3",
        kl_bias_correction=case["bias_correction_kl"],
        entropy_coef=case["entropy_coef"],
        top_entropy_quantile=case["top_entropy_quantile"],
        off_policy_mask_threshold=case["off_policy_mask_threshold"],
        importance_correction=correction,
    )


def _sampler_logprobs(case: Case, arrays: Arrays, old: Tensor, mask: Tensor) -> Tensor:
    """Sampler log-probs; if TRL received ratios, those that result in these ratios."""
    if case["is_ratio"] is None:
        return _tensor(arrays, "sampling_logps") if case["sampling"] else old
    if case["is_ratio"] == "token":
        log_ratio = _tensor(arrays, "is_ratio_token").log()
        if case["loss_type"] == "vespo":
            # TRL's VESPO multiplies the ratios of all positions, padding included; litgrpo's
            # multiplies those of real tokens, so these receive the product of the whole row.
            log_ratio = log_ratio.sum(1, keepdim=True)
        else:
            return old - log_ratio
    else:
        log_ratio = _tensor(arrays, "is_ratio_seq").log()
    return old - log_ratio / mask.sum(1, keepdim=True).clamp(min=1)


def _accumulation_factors(case: Case, loss_tokens: Tensor) -> tuple[float, float]:
    """Return the factors of the weights and of the entropy bonus due to accumulation."""
    training = case["mode"] == "train"
    per_micro = 1 / case["ga"] if training else 1.0
    if AGGREGATIONS[case["loss_type"]] != "token_mean":
        return per_micro, per_micro
    # The tokens of one accumulation window, of which the case's rows are a part.
    window = max(case["num_items_in_batch"], 1)
    window *= case["ga"] / case["steps_per_generation"] if training else 1.0
    return float(loss_tokens) / window, per_micro


def loss(case: Case, arrays: Arrays) -> tuple[float, np.ndarray, np.ndarray]:
    """Compute the loss and its gradients with respect to log-probabilities and entropies.

    Args:
        case: one of TRL's loss cases.
        arrays: all arrays, among them those under `in/`.

    Returns:
        The loss, [8, 12] and [8, 12].
    """
    chosen = objective(case)
    seen = mask = _tensor(arrays, case["mask"]).bool()
    if case["tool_mask"]:
        mask = seen & _tensor(arrays, "tool_mask").bool()
    logprobs, entropy = _tensor(arrays, "logps"), _tensor(arrays, "entropies")
    logprobs.requires_grad_()
    entropy.requires_grad_()
    old = _tensor(arrays, "old_logps") if case["old"] else None
    known_old = logprobs.detach() if old is None else old
    advantages = _tensor(arrays, case["advantages"])
    rows, length = mask.shape
    uncut = torch.zeros(rows, dtype=torch.bool)
    weights = chosen.loss_weights(mask, uncut, MAX_COMPLETION_LEN, dtype=torch.float64)
    of_weights, of_bonus = _accumulation_factors(case, mask.sum().clamp(min=1))
    training_batch = batch_of(
        mask,
        completion_mask=seen,
        sampler_logprobs=_sampler_logprobs(case, arrays, known_old, mask),
        advantages=advantages if advantages.ndim == 2 else advantages[:, None].expand(rows, length),
        loss_weights=weights * of_weights,
        old_logprobs=old,
        ref_logprobs=_tensor(arrays, "ref_logps") if chosen.needs_reference else None,
    )
    parts = [chosen]
    if chosen.importance_correction is not None and chosen.kl_coef:
        # TRL corrects the surrogate loss only, litgrpo the KL penalty as well.
        without_rewards = replace(chosen, reward_coef=0.0, entropy_coef=0.0)
        parts = [
            replace(chosen, kl_coef=0.0),
            replace(without_rewards, importance_correction=None),
        ]
    new = TokenLogprobs(logprobs, entropy)
    losses = []
    for part in parts:
        step = part.prepare_step(training_batch, new)
        if step.term_weights is not None:
            step = replace(step, term_weights=step.term_weights * of_bonus)
        losses.append(part.loss(new, step).loss)
    value = torch.stack(losses).sum()
    value.backward()
    gradients = [
        torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (logprobs, entropy)
    ]
    return value.item(), gradients[0].numpy(), gradients[1].numpy()


def advantages(case: Case, arrays: Arrays) -> np.ndarray:
    """Compute the [8] advantages of an advantage case."""
    rewards = torch.from_numpy(np.asarray(arrays[case["rewards"]], dtype=np.float64))
    weights = torch.tensor(case["reward_weights"], dtype=torch.float64)
    grouped = rewards.view(-1, case["num_generations"], rewards.shape[1])
    valid = ~grouped.isnan().all(2)
    names = [f"r{k}" for k in range(rewards.shape[1])]
    table = RewardTable(
        components={name: grouped[..., k] for k, name in enumerate(names)},
        weights=dict(zip(names, weights.tolist(), strict=True)),
        total=(grouped * weights).nansum(2),
        valid=valid,
    )
    chosen: Advantages = Normalized(baseline="group", scale=case["scale_rewards"])
    if case["multi_objective_aggregation"] == "normalize_then_sum":
        chosen = GDPO()
    mask = torch.ones(len(rewards), 2, dtype=torch.bool)
    return Objective(advantages=chosen).token_advantages(table, mask)[:, 0].numpy()


def importance(case: Case, arrays: Arrays, old: np.ndarray, sampler: np.ndarray) -> np.ndarray:
    """Compute the [8, 12] or [8, 1] importance weights of a case."""
    level, mode = case["mode"].split("_")
    low = 0.0 if case["clip_min"] is None else case["clip_min"]
    correction = ImportanceCorrection(level, mode, low, case["clip_max"])
    mask = _tensor(arrays, "completion_mask").bool()
    return correction(torch.from_numpy(old), torch.from_numpy(sampler), mask).numpy()
