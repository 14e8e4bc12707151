"""Check the settings of a GRPO run against each other, its trainer, its device and its data."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning import LightningModule

from litgrpo.algorithms.aggregation import MicroBatchTokenMean
from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.objective import Objective
from litgrpo.arguments import at_least, did_you_mean, find_page
from litgrpo.data.modules import SourceData
from litgrpo.data.pairs import PairSet
from litgrpo.data.prompts import PromptSet
from litgrpo.distributed.device import backend
from litgrpo.distributed.fsdp.units import is_sharded
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.environments.agent import Agent
from litgrpo.models.limits import check_lengths, check_tokens
from litgrpo.models.loading.load import Precision
from litgrpo.models.policy import Policy
from litgrpo.rewards.builtin.length import soft_overlong
from litgrpo.rewards.reward import Reward
from litgrpo.rewards.scorer import Scorer
from litgrpo.rollout.engines.base import RolloutEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.servers.reference import (
    SERVER_SCHEMES,
    ReferenceServers,
    ServedReference,
)
from litgrpo.rollout.sources.base import RolloutSource
from litgrpo.types import TASK

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


def check_observation_nll(
    objective: Objective, environment: object | None, sampling: Sampling
) -> None:
    """Check that there are observations, and that their log-probabilities are over all tokens.

    Raises:
        ValueError: a cross-entropy term of observations without an environment, with an agent, or
            with a filter.
    """
    if objective.observation_nll_coef == 0:
        return
    given = f"model.objective.observation_nll_coef is {objective.observation_nll_coef}"
    if environment is None:
        raise ValueError(
            f"{given}, but there is no model.environment, so no observations to predict. Set it to "
            "0, or set an environment."
        )
    if isinstance(environment, Agent):
        raise ValueError(
            f"{given}, but model.environment is an Agent, whose observations include replies of "
            "the policy in other segments. Set it to 0."
        )
    if sampling.truncated:
        raise ValueError(
            f"{given}, but model.sampling has top_k, top_p or min_p: log-probabilities are then "
            "over the tokens that could be sampled, and observations were not sampled. Remove the "
            "filters, or set it to 0."
        )


def check_tasks(
    trained: Collection[str], sets: Sequence[Mapping[str, Sequence[Any]]], scorer: Scorer
) -> None:
    """Check that the tasks that rewards name are tasks of the data.

    Args:
        trained: tasks of the training prompts; empty if they are not known.
        sets: {column: values} of the sets of prompts.
        scorer: has the rewards.

    Raises:
        ValueError: a reward names another task.
    """
    known = {*trained, *(str(task) for columns in sets for task in columns.get(TASK, []))}
    for name, reward in scorer.components.items():
        for task in reward.tasks if trained else ():
            if task not in known:
                raise ValueError(
                    f"model.rewards.{name}.tasks has {task!r}, but no prompt is of that task"
                    f"{did_you_mean(task, known)}. The tasks of the data are "
                    f"{', '.join(sorted(known))}."
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


def check_sharded_source(policy: Policy, engine: RolloutEngine, source: RolloutSource) -> None:
    """Check that a rollout does not need the weights that an update has sharded.

    Raises:
        ValueError: the engine samples ahead with the policy's own weights, which are sharded.
    """
    if source.provenance == "stale" and is_sharded(policy) and engine.samples_in != "servers":
        raise ValueError(
            f"model.source is {type(source).__name__}, but this engine generates with weights that "
            "trainer.strategy shards. Leave out the source, or use trainer.strategy ddp or a "
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


def read_reference(
    given: str | ReferenceServers | None,
    objective: Objective,
    sampling: Sampling,
    engine: RolloutEngine,
    *,
    moves: bool,
) -> str | ReferenceServers | None:
    """Return the reference of a run; the address of a server becomes `ReferenceServers`.

    Args:
        given: folder, Hub id, address or servers; None: the initial policy.
        objective: compares with it.
        sampling: of the rollouts.
        engine: may sample with servers.
        moves: a controller moves the reference.

    Raises:
        ValueError: servers cannot return what this run needs of the reference.
    """
    if isinstance(given, str) and given.startswith(SERVER_SCHEMES):
        given = ReferenceServers([given])
    if not isinstance(given, ReferenceServers) or not objective.needs_reference:
        return given
    problem = ""
    if objective.divergence is not None:
        problem = (
            "model.objective.kl_estimator is a divergence over the vocabulary, but servers return "
            "log-probabilities of the sampled tokens: set it to k3"
        )
    elif sampling.policy_temperature != 1:
        problem = (
            f"model.sampling.temperature is {sampling.temperature}, but servers return "
            "log-probabilities at temperature 1: set it to 1.0"
        )
    elif sampling.truncated:
        problem = (
            f"model.sampling has top_k {sampling.top_k}, top_p {sampling.top_p} and min_p "
            f"{sampling.min_p}, but servers return log-probabilities over all tokens: set them to "
            "0, 1.0 and 0.0"
        )
    elif moves:
        problem = (
            "model.controllers.reference moves the weights of the reference, but those of servers "
            "stay as they are: leave it out"
        )
    elif {*engine.addresses} & {*given.urls}:
        problem = (
            "model.engine.urls has the same server, whose weights become the policy's: start "
            "another one"
        )
    if problem:
        raise ValueError(
            f"model.reference is a vLLM server ({given.urls[0]}). {problem}, or load the reference "
            "from a folder or Hub id."
        )
    return given


def check_served_reference(module: LightningModule, reference: object, completion: int) -> None:
    """Check before a fit that servers can compute the reference of the data's rows.

    Args:
        module: attached to its trainer.
        reference: of the KL term; only a `ServedReference` is checked.
        completion: limit on the tokens of a completion.

    Raises:
        RuntimeError: no server responds, or one has another tokenizer or a shorter context.
    """
    trainer: Any = module.trainer
    if not isinstance(reference, ServedReference) or trainer.state.fn != "fit":
        return
    longest, data = 0, trainer.datamodule
    if isinstance(data, SourceData) and isinstance(data.sets["train"], PromptSet):
        rows = data.sets["train"]
        longest = max(rows.max_tokens, rows.max_reference_tokens) + completion
    reference.check(longest)


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
    device: torch.device,
    engine: RolloutEngine,
    objective: Objective,
    precision: Precision,
    source: RolloutSource,
) -> None:
    """Check that a device that compiles a program per shape (XLA) can compute this run.

    Raises:
        ValueError: shapes follow the completions, or the gradient depends on the rows of a
            micro-batch, or dropout would differ when activations are recomputed.
    """
    if not backend(device).static_shapes:
        return
    if "static shapes" not in engine.allows:
        raise ValueError(
            f"engine is {type(engine).__name__}, whose shapes follow the completions, but this "
            "device compiles a program for each shape. Set engine: {class_path: StaticEngine}, as "
            "the config overrides for such devices in configs/hardware do."
        )
    if not source.fixed_shapes:
        raise ValueError(
            f"model.source is {type(source).__name__}, but shapes of its completions differ, and "
            "this device compiles a program for each shape. Train on a CPU or a GPU, or leave it "
            "out."
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
    kinds = (PromptSet, PairSet)
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
    objective: Objective,
    engine: RolloutEngine,
    source: RolloutSource,
    *,
    entropy_target: bool = False,
) -> Objective:
    """Add an importance correction if the sampler's probabilities are not the trainer's.

    With `old_policy: sampler` the ratio of the objective corrects for them already. The log names
    the terms of the loss that are not corrected.

    Args:
        objective: of the config.
        engine: samples.
        source: of the rollouts.
        entropy_target: a controller sets the coefficient of the entropy bonus.
    """
    if engine.exact_logprobs and not source.is_off_policy:
        return objective
    reason = f"{type(engine).__name__} has its own log-probabilities"
    if source.is_off_policy:
        reason = f"model.source is {type(source).__name__}, so rollouts are off-policy"
    if not objective.corrects_sampler:
        objective = replace(objective, importance_correction=ImportanceCorrection())
    correction = "importance_correction is on"
    if objective.importance_correction is None:
        correction = "old_policy is sampler, so the ratio corrects for it"
    used = replace(objective, entropy_coef=1.0) if entropy_target else objective
    uncorrected = used.find_uncorrected()
    terms = f"but {', '.join(uncorrected)}" if uncorrected else "of the loss"
    rank_zero_info(
        f"{reason}: model.objective.{correction}. All terms {terms} are corrected "
        f"({find_page('docs/explanation/algorithm.md#off-policy-rollouts')}). Log-probabilities "
        "before the update are recomputed if there are several optimizer steps per rollout."
    )
    return objective


def can_reuse_sampler_logprobs(
    trainer_precision: str,
    precision: Precision,
    engine: RolloutEngine,
    environment: object | None,
    source: RolloutSource,
) -> bool:
    """Return True if the sampler's log-probabilities are the trainer's, up to float32 rounding.

    In lower precision the two round differently enough to move ratios. In episodes the rows that
    are decoded together depend on when observations arrive, and with them rounding does.
    """
    full_precision = trainer_precision == "32-true" and precision.autocast_dtype is None
    full_precision = full_precision and precision.dtype in EXACT_DTYPES
    same_weights = engine.exact_logprobs and not source.is_off_policy
    return full_precision and same_weights and environment is None


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
