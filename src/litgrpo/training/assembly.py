"""Builds the parts of GRPO from a recipe's settings, and refuses settings that contradict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn

from litgrpo.algorithms import (
    estimators,  # noqa: F401
    surrogates,  # noqa: F401
)
from litgrpo.algorithms import turn_credit as credit  # noqa: F401
from litgrpo.algorithms.importance import ImportanceCorrection
from litgrpo.algorithms.loss_aggregation import MicroBatchTokenMean
from litgrpo.algorithms.losses import Objective
from litgrpo.algorithms.turn_credit import TurnAdvantages
from litgrpo.arguments import at_least, require
from litgrpo.data.sampler import BatchLoader
from litgrpo.distributed.device import Clock, backend
from litgrpo.distributed.fsdp.strategy import strategy_of
from litgrpo.distributed.fsdp.units import is_divided
from litgrpo.distributed.messages import rank_zero_info

# credit, surrogates and estimators are imported so that recipes can name their classes.
from litgrpo.models.kernels import linear as linears
from litgrpo.models.loading import Precision, load_policy, load_reference
from litgrpo.models.policy import Policy
from litgrpo.models.reference import FrozenReference, Reference
from litgrpo.models.sharded_weights import PolicySharding
from litgrpo.rewards.builtin.length import soft_overlong
from litgrpo.rewards.reward import Reward
from litgrpo.rewards.scorer import Scorer
from litgrpo.rollout.async_rollout import AsyncRollouter
from litgrpo.rollout.dynamic_sampling import DynamicSampling
from litgrpo.rollout.engines.base import RolloutEngine
from litgrpo.rollout.episodes import EpisodeSettings
from litgrpo.rollout.gathered import GatheredRollouter
from litgrpo.rollout.rollouter import AllGroups, Rollouter
from litgrpo.rollout.sampling import Sampling
from litgrpo.training.episode_setup import episodes_of
from litgrpo.training.even_batches import Even
from litgrpo.training.learner import Coefficients, Learner
from litgrpo.training.micro_batches import Ragged
from litgrpo.training.static_batches import Static
from litgrpo.training.trainer_adapters import TrainerComm, is_attached
from litgrpo.training.update_config import UpdateConfig
from litgrpo.types import PromptBatch

EXACT_DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class Settings:
    """What of a recipe the parts of an iteration are made from; see `GRPO`."""

    group_size: int
    max_completion_length: int
    sampling: Sampling
    engine: RolloutEngine
    environment: object | None
    episode: EpisodeSettings
    update: UpdateConfig
    precision: Precision
    dynamic_sampling_attempts: int
    seed: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Completions of each prompt, and tokens of a completion at most."""
        return self.group_size, self.max_completion_length


def place_of(module: LightningModule, policy: Policy) -> tuple[torch.device, str]:
    """The device and the precision of a module's trainer, or the policy's where it has none."""
    if is_attached(module):
        return module.trainer.strategy.root_device, str(module.trainer.precision)
    return policy.model.device, "32-true"


def loaded(module: Any) -> tuple[Policy, Reference | None]:
    """The policy of a GRPO and, where its objective has a KL term, its reference, loaded once."""
    pretrained, precision, lora = module.pretrained, module.settings.precision, module.lora
    policy, reference = module.policy, module.reference
    sharding = make_sharding(module)
    if policy is None:
        tokenizer = module.fit_tokenizer()
        how: Any = {"precision": precision, "lora": lora, "sharding": sharding}
        policy = load_policy(pretrained, tokenizer=tokenizer, **how)
    if sharding is not None:
        sharding.shard(policy)
    if module.coefficients.objective.needs_reference and reference is None:
        path = module.reference_path
        reference = load_reference(policy, path, pretrained, precision, lora, sharding=sharding)
    if sharding is not None and isinstance(reference, FrozenReference):
        sharding.shard(reference.policy)
    return policy, reference


def make_sharding(module: LightningModule) -> PolicySharding | None:
    """Return the sharding of a module's trainer strategy; None if weights are not sharded."""
    strategy = strategy_of(module)
    return None if strategy is None else PolicySharding(strategy)


def join(
    settings: Settings,
    policy: Policy,
    reference: Reference | None,
    coefficients: Coefficients,
    scorer: Scorer,
    module: LightningModule,
) -> tuple[Clock, Rollouter, Learner, AllGroups]:
    """The objects that an iteration goes through; they know no trainer.

    Args:
        settings: of the recipe.
        policy: samples and learns.
        reference: for the KL term.
        coefficients: the objective.
        scorer: judges.
        module: whose parts policy and reference are; its trainer, if it has one, tells device and
            precision.
    """
    check_ahead(settings)
    device, precision = place_of(module, policy)
    static_shapes = backend(device).static_shapes
    use_static_shapes(module, device)
    clock, comm = Clock(device), TrainerComm(module)
    rollouter = rollouter_class(policy, settings)(
        policy,
        *settings.sizes,
        engine=settings.engine,
        episodes=episodes_of(module, settings.environment, settings.episode, policy),
        sampling=settings.sampling,
        seed=settings.seed,
        clock=clock,
    )
    if isinstance(rollouter, AsyncRollouter) and is_attached(module):
        rollouter.source = partial(prompts_ahead, module, backend(device).data_device)
    learner = Learner(
        policy,
        coefficients,
        settings.update.fitted(
            linears.count_linear_outputs(policy.model), static_shapes=static_shapes
        ),
        settings.sampling,
        *settings.sizes,
        reference=reference,
        exact_logprobs=settings.engine.exact_logprobs,
        reuse_sampler_logprobs=same_digits(settings, precision),
        comm=comm,
        clock=clock,
        # The device decides how the learner batches, whichever engine samples.
        micro_batching=Static(backend(device)) if static_shapes else ragged(policy, comm),
    )
    dynamic_sampling = AllGroups()
    if settings.dynamic_sampling_attempts:
        resampling = (
            settings.dynamic_sampling_attempts,
            backend(device).data_device,
            comm,
            static_shapes,
        )
        found = coefficients.objective.advantages
        credit = found if isinstance(found, TurnAdvantages) else None
        dynamic_sampling = DynamicSampling(rollouter, scorer, *resampling, credit=credit)
    before = vars(module)
    if "learner" in before:  # limits where memory was short outlive the trainer
        learner.max_rows = before["learner"].max_rows
        rollouter.max_rows = before["rollouter"].max_rows
    return clock, rollouter, learner, dynamic_sampling


def rollouter_class(policy: Policy, settings: Settings) -> type[Rollouter]:
    """What samples: it gathers divided weights, or works ahead.

    Raises:
        ValueError: both, where the engine samples with the policy's own weights.
    """
    divided, stale = is_divided(policy), settings.update.staleness
    require(
        not (divided and stale and not settings.engine.samples_elsewhere),
        f"update.staleness is {stale}: a rollout ahead is not sampled while trainer.strategy "
        "divides the weights. Set it to 0, take trainer.strategy ddp, or a ServerEngine.",
    )
    return AsyncRollouter if stale else GatheredRollouter if divided else Rollouter


def ragged(policy: Policy, comm: TrainerComm) -> Ragged:
    """Micro-batches that follow their content; as many on every process if weights are divided."""
    return Even(policy, comm) if is_divided(policy) else Ragged()


def check_sizes(
    group_size: int, max_completion_length: int, max_iterations: int | None, objective: Objective
) -> None:
    """Refuse sizes that nothing can be learned with.

    Raises:
        ValueError: a size below 1, or a group of one where completions of it are compared.
    """
    at_least("group_size", group_size, 1)
    at_least("max_completion_length", max_completion_length, 1)
    at_least("max_iterations", max_iterations, 1)
    require(
        group_size > 1 or not objective.advantages.compares,
        "group_size is 1, but this objective compares completions of the same prompt. Take 2 "
        "or more, or a baseline without a group: objective.advantages.baseline batch or none.",
    )


def overlong(share: float, max_completion_length: int) -> dict[str, Reward]:
    """The soft overlong punishment over the last share of the tokens; none for a share of 0."""
    require(0 <= share <= 1, f"soft_overlong is {share}; it must be between 0 (off) and 1.")
    if not share:
        return {}
    limits = {
        "max_completion_length": max_completion_length,
        "soft_punish_cache": max(1, round(share * max_completion_length)),
    }
    return {"soft_overlong": Reward(soft_overlong, kwargs=limits)}


def prompts_ahead(module: Any, device: torch.device) -> PromptBatch:
    """The prompts of the next iteration.

    Raises:
        ValueError: the training data do not tell them.
    """
    loader = module.trainer.train_dataloader
    require(
        isinstance(loader, BatchLoader),
        "update.staleness is 1, which needs litgrpo.PromptData. Set it to 0.",
    )
    return loader.ahead().to(device)


def check_ahead(settings: Settings) -> None:
    """Refuse what would have to be known before it has been learned.

    Raises:
        ValueError: prompts are resampled, or environments answer.
    """
    require(
        not (
            settings.update.staleness
            and (settings.dynamic_sampling_attempts or settings.environment)
        ),
        "update.staleness is 1, but dynamic_sampling_attempts asks for prompts, or an "
        "environment for answers, "
        "by what an iteration finds. Set staleness to 0, or leave these out.",
    )


def corrected(objective: Objective, engine: RolloutEngine, update: UpdateConfig) -> Objective:
    """The objective with a correction for the sampler, where it is not the policy."""
    if update.staleness and objective.importance_correction is None:
        rank_zero_info(
            "update.staleness is 1, so rollouts are of earlier weights: "
            "objective.importance_correction is on, and log-probabilities are computed anew."
        )
        return replace(objective, importance_correction=ImportanceCorrection())
    if engine.exact_logprobs or objective.importance_correction is not None:
        return objective
    rank_zero_info(
        f"{type(engine).__name__} does not sample with the policy's own log-probabilities: "
        "objective.importance_correction is on, and those before the update are computed anew."
    )
    return replace(objective, importance_correction=ImportanceCorrection())


def same_digits(settings: Settings, trainer_precision: str) -> bool:
    """Whether the sampler's log-probabilities are those of the learning step, up to rounding.

    In lower precision the two round differently enough to move ratios, and greedy decoding has
    log-probabilities of its own. In episodes which rows decode together depends on when answers
    come, and so does rounding.
    """
    precision = settings.precision
    full = trainer_precision == "32-true" and precision.autocast_dtype is None
    full = full and precision.dtype in EXACT_DTYPES
    alone = settings.environment is None and not settings.update.staleness
    return full and alone and settings.engine.exact_logprobs and not settings.sampling.greedy


def check_device(settings: Settings, objective: Objective, device: torch.device) -> None:
    """Refuse what a device that compiles a program for each set of shapes cannot compute.

    Raises:
        ValueError: the engine's shapes change, the loss_aggregation counts the rows of a
            micro-batch, or
            dropout would be drawn anew where activations are computed a second time.
    """
    if not backend(device).static_shapes:
        return
    require(
        settings.engine.static_shapes,
        f"engine is {type(settings.engine).__name__}, whose shapes follow the completions, but "
        "this device compiles a program for each shape. Give engine: {class_path: StaticEngine}, "
        "as the overlays for such devices in configs/hardware do.",
    )
    require(
        not isinstance(objective.loss_aggregation, MicroBatchTokenMean),
        "objective.loss_aggregation is MicroBatchTokenMean, whose gradient depends on the rows "
        "of a "
        "micro-batch, which are filled up in fixed shapes. Take TokenMean.",
    )
    require(
        not (settings.precision.gradient_checkpointing and not settings.precision.disable_dropout),
        "precision.disable_dropout is false and precision.gradient_checkpointing is on, but this "
        "device cannot repeat random numbers in the backward pass. Change one of them.",
    )


def remembered(sampling: Sampling) -> Sampling:
    """The sampling of a training: a token that filters let through comes from a set that is kept.

    Raises:
        ValueError: top_k asks for a larger set.
    """
    top_k, largest = sampling.top_k, sampling.max_candidates
    if not sampling.truncated:
        return sampling
    require(
        top_k <= largest,
        f"sampling.top_k is {top_k}, but learning takes its ratios over the tokens that could be "
        f"drawn and remembers {largest} of them. Lower top_k, set it to 0 (all tokens), or raise "
        "sampling.max_candidates (4 bytes for each token of a rollout and each of the set).",
    )
    return replace(sampling, top_k=top_k or largest)


def prepare_device(module: Any, device: torch.device) -> None:
    """Set up the device of a GRPO; where shapes are static, prompts and numbers stay on the host.

    Raises:
        ValueError: device or precision cannot compute what the recipe asks for.
    """
    check_trainer_precision(str(module.trainer.precision))
    check_device(module.settings, module.coefficients.objective, device)
    backend(device).prepare()
    if backend(device).static_shapes:
        # Overridden here alone, because Lightning warns of it.
        module.transfer_batch_to_device = unmoved
        module.log = numbers_on_host(partial(LightningModule.log, module))


def unmoved(batch: Any, *_: Any) -> Any:
    """A batch, where it is."""
    return batch


def numbers_on_host(log: Callable[..., None]) -> Callable[..., None]:
    """A module's `log` for plain numbers that do not go to the device and back.

    There each would become a program, and every set of them another one.
    """

    def call(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        number = isinstance(value, int | float)
        log(name, torch.tensor(float(value)) if number else value, *args, **kwargs)

    return call


def use_static_shapes(module: nn.Module, device: torch.device) -> None:
    """Let the policies of a module compute in fixed shapes where the device compiles programs."""
    for part in module.modules():
        if isinstance(part, Policy):
            part.static_shapes = backend(device).static_shapes
            if part.static_shapes and part.bare_model.is_activation_checkpointing:
                # A hook that compilers cannot trace; checkpoints without reentry need none.
                part.bare_model.disable_input_require_grads()


def changing(module: nn.Module, coefficients: Coefficients) -> dict[str, Tensor]:
    """{name: tensor} of the weights that training changes."""
    follows = coefficients.moves_reference
    return {
        name: parameter.data
        for name, parameter in module.named_parameters()
        if parameter.requires_grad or (follows and name.startswith("reference."))
    }


def check_trainer_precision(precision: str) -> None:
    """Refuse a precision plugin that would convert prompts instead of weights.

    Raises:
        ValueError: it is a `-true` one other than 32.
    """
    require(
        precision == "32-true" or not precision.endswith("-true"),
        f"trainer.precision is {precision!r}; the weights' type is model.precision.dtype. "
        "Give trainer.precision 32-true or bf16-mixed.",
    )
