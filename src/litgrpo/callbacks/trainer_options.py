"""Lightning's options that cannot go with our modules, and the keys of ours that do the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.environments import ClusterEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import StrategyRegistry

from litgrpo.arguments import did_you_mean, require

# Parts of the names of strategies that cut weights over processes.
SHARDING = ("fsdp", "modelparallel", "deepspeed")
OURS = "FSDP2Strategy"
INSTEAD_OF_SHARDING = (
    "FSDP1, tensor parallelism and DeepSpeed are not supported: to divide the weights over "
    "processes take trainer.strategy {class_path: litgrpo.distributed.fsdp.strategy.FSDP2Strategy} "
    "(configs/hardware/fsdp2.yaml)."
)
INSTEAD_OF_CALLBACKS: dict[type, str] = {
    StochasticWeightAveraging: "its mean of weights is none that sampled; leave it out, and let "
    "model.lr_scheduler lower the learning rate",
    GradientAccumulationScheduler: "an optimizer step has all rows of its batch here; its size is "
    "data.batch_size, and what goes through the model at once model.update.micro_batch_tokens",
    LearningRateFinder: "its trial steps would be iterations of the run; give "
    "model.optimizer.init_args.lr, and compare several by `compare`",
    BatchSizeFinder: "its trial steps would be iterations of the run; give data.batch_size, and "
    "model.update.micro_batch_tokens for memory",
}


def name_of(strategy: Any) -> str:
    """The word or the class of a strategy.

    Example:
        >>> name_of("ddp"), name_of({"class_path": "lightning.pytorch.strategies.FSDPStrategy"})
        ('ddp', 'FSDPStrategy')
    """
    if isinstance(strategy, str):
        return strategy
    if isinstance(strategy, Mapping):
        return str(strategy["class_path"]).rpartition(".")[2]
    return type(strategy).__name__


def refuse_sharding(strategy: Any) -> None:
    """Refuse a strategy that cuts weights in a way that nothing here knows, before training.

    Args:
        strategy: Lightning's, by name or as an object.

    Raises:
        ValueError: it is one of them.
    """
    name = name_of(strategy)
    shards = any(part in name.lower().replace("_", "") for part in SHARDING)
    require(not shards or name == OURS, f"trainer.strategy is {name}. {INSTEAD_OF_SHARDING}")


def cluster_plugins(given: Any) -> list[Any]:
    """Lightning's plugins; under SLURM its own answer to SIGUSR1 is off.

    It would save in the middle of an iteration and requeue the job, while the training goes on.
    Ours saves between two iterations and ends; the batch script requeues (docs/scale.md).

    Args:
        given: `trainer.plugins`.
    """
    plugins = [] if given is None else list(given) if isinstance(given, list) else [given]
    chosen = any(isinstance(each, ClusterEnvironment) for each in plugins)
    slurm = [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else []
    return plugins if chosen else plugins + slurm


def refuse_compiled(module: Any) -> None:
    """Refuse a module that was compiled as a whole.

    Raises:
        ValueError: it was given to the trainer as `torch.compile(module)`.
    """
    require(
        module._compiler_ctx is None,
        f"{type(module).__name__} was given as torch.compile(module), but an iteration samples, "
        "rewards and learns in shapes that change, which no compiler holds together: hand the "
        "trainer the module itself.",
    )


def check_trainer_options(given: Mapping[str, Any], module: Any) -> None:
    """Refuse options of Lightning's trainer that fight our modules; name what to give instead.

    Args:
        given: the trainer's arguments.
        module: the module that it will train.

    Raises:
        ValueError: one of them.
    """
    refuse_sharding(given["strategy"])
    _check_launch(given["strategy"])
    by_hand = not module.automatic_optimization
    clipping = "model.update.max_grad_norm" if by_hand else "model.max_grad_norm"
    instead: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
        (
            "accumulate_grad_batches",
            lambda value: by_hand and value != 1,
            "An optimizer step has all rows of its batch here: their number is data.batch_size, "
            "and what goes through the model at once model.update.micro_batch_tokens.",
        ),
        ("gradient_clip_val", lambda value: value is not None, f"Give {clipping} instead."),
        ("gradient_clip_algorithm", lambda value: value is not None, f"Give {clipping} instead."),
        (
            "overfit_batches",
            bool,
            "To train on few prompts give data.train.limit, and data.val null.",
        ),
        (
            "barebones",
            bool,
            "It takes away what a run is made of. For less output give --tensorboard false, "
            "--csv false, trainer.enable_progress_bar false.",
        ),
        (
            "devices",
            lambda value: str(value) == "-1" and _on_cpu(given["accelerator"]),
            "A CPU has no number of devices to take all of: say how many processes.",
        ),
    )
    for name, is_meant, advice in instead:
        value = given[name]
        require(not is_meant(value), f"trainer.{name} is {value}. {advice}")
    _check_callbacks(given["callbacks"])


def _check_launch(strategy: Any) -> None:
    if not isinstance(strategy, str):
        return
    known = ["auto", *StrategyRegistry.available_strategies()]
    require(
        strategy in known,
        f"trainer.strategy is {strategy!r}{did_you_mean(strategy, known)}: it can be a word such "
        "as auto or ddp, or a class: {class_path: package.module.Class}.",
    )
    require(
        "spawn" not in strategy,
        f"trainer.strategy is {strategy}, whose processes get copies of what this one has built "
        "and hand no results back. Take trainer.strategy ddp.",
    )


def _on_cpu(accelerator: Any) -> bool:
    return accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())


def _check_callbacks(callbacks: Any) -> None:
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        for kind, advice in INSTEAD_OF_CALLBACKS.items():
            unfit = isinstance(callback, kind)
            require(not unfit, f"trainer.callbacks has {kind.__name__}: {advice}.")
