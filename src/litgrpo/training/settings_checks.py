"""Check the settings of a GRPO run against each other, its trainer, its device and its data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning import LightningModule

from litgrpo.algorithms.losses import ImportanceCorrection, MicroBatchTokenMean, Objective
from litgrpo.arguments import at_least
from litgrpo.data.modules import SourceData
from litgrpo.data.pairs import PairSet
from litgrpo.data.prompts import PromptSet, StreamedPrompts
from litgrpo.distributed.device import backend
from litgrpo.distributed.fsdp.units import is_sharded
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.models.limits import check_lengths, check_tokens
from litgrpo.models.loading import Precision
from litgrpo.models.policy import Policy
from litgrpo.rewards.builtin.length import soft_overlong
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.engines.base import RolloutEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.training.update_config import UpdateConfig

# Of a rollout's token: its id (8 bytes), random number, log-probability and masks.
BYTES_PER_TOKEN = 18
EXACT_DTYPES = ("float32", "float64")


def check_sizes(
    group_size: int, max_completion_length: int, max_iterations: int | None, objective: Objective
) -> None:
    """Check that a gradient is possible with these sizes.

    Raises:
        ValueError: a size is below 1, or advantages compare the completions of a group of one.
    """
    at_least("group_size", group_size, 1)
    at_least("max_completion_length", max_completion_length, 1)
    at_least("max_iterations", max_iterations, 1)
    if group_size == 1 and objective.reward_coef and objective.advantages.needs_group:
        raise ValueError(
            "group_size is 1, but this objective compares completions of the same prompt. Set "
            "group_size to 2 or more, or model.objective.advantages.baseline and .scale to batch "
            "or none."
        )


def check_batch(module: LightningModule, group_size: int, completion: int, steps: int) -> None:
    """Check that a rollout fits this machine, and that each optimizer step gets a group.

    Args:
        module: attached to its trainer.
        group_size: G.
        completion: C, the limit on the tokens of a completion.
        steps: optimizer steps of a pass over the rollout.

    Raises:
        ValueError: it does not.
    """
    trainer: Any = module.trainer
    prompts = getattr(trainer.datamodule, "batch_size", None)
    if not isinstance(prompts, int):  # a loader or data of the user's own
        return
    prompts = max(1, prompts // trainer.world_size)
    if steps > prompts:
        raise ValueError(
            f"model.update.num_mini_batches is {steps}, but a batch has {prompts} groups per "
            "process (data.batch_size), and a mini-batch takes whole groups. Set num_mini_batches "
            f"to at most {prompts}, or raise data.batch_size."
        )
    needed = prompts * group_size * completion * BYTES_PER_TOKEN
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total:
        raise ValueError(
            f"A rollout of {prompts} prompts (data.batch_size) x {group_size} completions "
            f"(model.group_size) x {completion:,} tokens (model.max_completion_length) needs at "
            f"least {needed / 2**30:,.0f} GiB, but this machine has {total / 2**30:,.0f} GiB. "
            "Lower one of them."
        )


def check_async(
    update: UpdateConfig, dynamic_sampling_attempts: int, environment: object | None
) -> None:
    """Check that the next iteration's prompts do not depend on this iteration's result.

    Raises:
        ValueError: a stale rollout is combined with dynamic sampling or an environment.
    """
    if update.staleness and (dynamic_sampling_attempts or environment):
        raise ValueError(
            "model.update.staleness is 1: the next rollout is generated before this one is "
            "finished, which dynamic_sampling_attempts and environment do not allow. Set staleness "
            "to 0, or remove them."
        )


def check_observation_nll(
    objective: Objective, environment: object | None, sampling: Sampling
) -> None:
    """Check that there are observations, and that their log-probabilities are over all tokens.

    Raises:
        ValueError: a cross-entropy term of observations without an environment, or with a filter.
    """
    if objective.observation_nll_coef == 0:
        return
    given = f"model.objective.observation_nll_coef is {objective.observation_nll_coef}"
    if environment is None:
        raise ValueError(
            f"{given}, but there is no model.environment, so no observations to predict. Set it to "
            "0, or set an environment."
        )
    if sampling.truncated:
        raise ValueError(
            f"{given}, but model.sampling has top_k, top_p or min_p: log-probabilities are then "
            "over the tokens that could be sampled, and observations were not sampled. Remove the "
            "filters, or set it to 0."
        )


def check_greedy(
    objective: Objective, rewards: Mapping[str, Reward], dynamic_sampling_attempts: int
) -> None:
    """Check that rewards of greedy and sampled completions can be compared.

    Raises:
        ValueError: advantages with a greedy baseline and dynamic sampling, which looks for groups
            whose rewards differ; or a reward that is normalized among completions.
    """
    if not objective.advantages.needs_greedy:
        return
    name = type(objective.advantages).__name__
    if dynamic_sampling_attempts:
        raise ValueError(
            f"model.objective.advantages is {name}, whose baseline is a greedy completion: groups "
            "of equal rewards have an advantage. Set model.dynamic_sampling_attempts to 0."
        )
    normalized = [key for key, reward in rewards.items() if reward.normalize != "none"]
    if normalized:
        raise ValueError(
            f"model.objective.advantages is {name}, whose baseline is the reward of a single "
            f"greedy completion, but model.rewards.{normalized[0]}.normalize is "
            f"{rewards[normalized[0]].normalize}. Set it to none."
        )


def check_async_sharding(policy: Policy, engine: RolloutEngine) -> None:
    """Check that a rollout does not need the weights that an update has sharded.

    Raises:
        ValueError: the engine samples with the policy's own weights, which are sharded.
    """
    if is_sharded(policy) and not engine.samples_elsewhere:
        raise ValueError(
            "model.update.staleness is 1, but this engine generates with weights that "
            "trainer.strategy shards. Set staleness to 0, or use trainer.strategy ddp or a "
            "ServerEngine."
        )


def check_reference_prompts(
    module: LightningModule, objective: Objective, environment: object | None
) -> None:
    """Check that a reference reads the prompts that the data have for it.

    Raises:
        ValueError: there is no KL term, or an environment adds to the policy's prompts.
    """
    trainer: Any = module.trainer
    data = trainer.datamodule
    if not isinstance(data, SourceData) or data.prompt_format.reference is None:
        return
    if not objective.needs_reference:
        raise ValueError(
            "data.reference_template is set, but there is no KL term that compares with a "
            "reference. Set model.objective.kl_coef, or leave out reference_template."
        )
    if environment is not None:
        raise ValueError(
            "data.reference_template replaces the prompts, but model.environment adds its first "
            "observation to them. Leave out one of the two."
        )


def check_temperature(sampling: Sampling, group_size: int) -> None:
    """Check that the completions of a group can differ.

    Raises:
        ValueError: the temperature is 0 and groups have several completions.
    """
    if group_size > 1 and sampling.greedy:
        raise ValueError(
            f"model.sampling.temperature is 0, so the {group_size} completions of a group are "
            "equal and have no advantage. Train with 1.0; model.evaluation.temperature is for "
            "validation."
        )


def check_trainer_precision(precision: str) -> None:
    """Check the trainer's precision plugin.

    Raises:
        ValueError: `trainer.precision` is a `-true` one other than 32, which would convert prompts.
    """
    if precision.endswith("-true") and precision != "32-true":
        raise ValueError(
            f"trainer.precision is {precision!r}; the dtype of the weights is "
            "model.precision.dtype. Set trainer.precision to 32-true or bf16-mixed."
        )


def check_device(
    device: torch.device, engine: RolloutEngine, objective: Objective, precision: Precision
) -> None:
    """Check that a device that compiles a program per shape (XLA) can compute this run.

    Raises:
        ValueError: shapes follow the completions, or the gradient depends on the rows of a
            micro-batch, or dropout would differ when activations are recomputed.
    """
    if not backend(device).static_shapes:
        return
    if not engine.static_shapes:
        raise ValueError(
            f"engine is {type(engine).__name__}, whose shapes follow the completions, but this "
            "device compiles a program for each shape. Set engine: {class_path: StaticEngine}, as "
            "the config overrides for such devices in configs/hardware do."
        )
    if isinstance(objective.aggregation, MicroBatchTokenMean):
        raise ValueError(
            "model.objective.loss_aggregation divides by the tokens of a micro-batch, which has a "
            "fixed shape with filler rows on this device. Use token_mean."
        )
    if precision.gradient_checkpointing and not precision.disable_dropout:
        raise ValueError(
            "model.precision.disable_dropout is false and model.precision.gradient_checkpointing "
            "is on, but this device cannot draw the same dropout again. Change one of them."
        )


def check_data_fits_model(
    module: LightningModule, policy: Policy, completion: int, key: str
) -> None:
    """Check tokens and lengths of the data against the model's embeddings and positions.

    Loaders that were passed to the trainer without a data module are not checked.

    Args:
        module: attached to its trainer.
        policy: reads the data.
        completion: limit on the tokens of a completion; 0 if the data contain the completions.
        key: option that limits the length of a row.

    Raises:
        ValueError: the model has no embedding of a token or of a position.
    """
    data = module.trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, SourceData):
        return
    kinds = (PromptSet, PairSet, StreamedPrompts)
    known = {name: rows for name, rows in data.sets.items() if isinstance(rows, kinds)}
    check_tokens(policy, {name: rows.ids for name, rows in known.items()})
    longest = {name: rows.max_tokens for name, rows in known.items()}
    check_lengths(policy, longest, completion, key)


def with_candidates(sampling: Sampling) -> Sampling:
    """Set top_k so that the candidate set of each token can be stored for the update.

    With filters, probabilities are over the tokens that could be drawn (the candidate set). The
    update needs the same set, so it must not be larger than `max_candidates`.

    Raises:
        ValueError: top_k is larger.
    """
    top_k, largest = sampling.top_k, sampling.max_candidates
    if not sampling.truncated:
        return sampling
    if top_k > largest:
        raise ValueError(
            f"model.sampling.top_k is {top_k}, but at most model.sampling.max_candidates = "
            f"{largest} tokens are stored for the update. Lower top_k, set it to 0 (all tokens), "
            "or raise model.sampling.max_candidates (4 bytes per generated token and candidate)."
        )
    return replace(sampling, top_k=top_k or largest)


def with_importance_correction(
    objective: Objective, engine: RolloutEngine, update: UpdateConfig
) -> Objective:
    """Add an importance correction if the sampler's probabilities are not the trainer's.

    With `old_policy: sampler` the ratio of the objective corrects for them already.
    """
    corrected = objective.importance_correction is not None or objective.old_policy == "sampler"
    if corrected or (engine.exact_logprobs and not update.staleness):
        return objective
    reason = f"{type(engine).__name__} has its own log-probabilities"
    if update.staleness:
        reason = "model.update.staleness is 1, so rollouts are off-policy"
    rank_zero_info(
        f"{reason}: model.objective.importance_correction is on. Log-probabilities before the "
        "update are recomputed if there are several optimizer steps per rollout."
    )
    return replace(objective, importance_correction=ImportanceCorrection())


def can_reuse_sampler_logprobs(
    trainer_precision: str,
    precision: Precision,
    engine: RolloutEngine,
    environment: object | None,
    update: UpdateConfig,
) -> bool:
    """Return True if the sampler's log-probabilities are the trainer's, up to float32 rounding.

    In lower precision the two round differently enough to move ratios. In episodes the rows that
    are decoded together depend on when observations arrive, and with them rounding does.
    """
    full_precision = trainer_precision == "32-true" and precision.autocast_dtype is None
    full_precision = full_precision and precision.dtype in EXACT_DTYPES
    return full_precision and engine.exact_logprobs and environment is None and not update.staleness


def overlong_reward(fraction: float, max_completion_length: int) -> dict[str, Reward]:
    """Return DAPO's soft overlong punishment as a reward; {} if the fraction is 0.

    Args:
        fraction: of the length limit, at its end, over which the reward falls from 0 to -1.
        max_completion_length: the limit.

    Raises:
        ValueError: the fraction is not between 0 and 1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"overlong_buffer_frac is {fraction}; it must be between 0 (off) and 1.")
    if not fraction:
        return {}
    kwargs: dict[str, Any] = {
        "max_completion_length": max_completion_length,
        "soft_punish_cache": max(1, round(fraction * max_completion_length)),
    }
    return {"soft_overlong": Reward(soft_overlong, kwargs=kwargs)}
