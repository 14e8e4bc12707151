"""Reject Lightning's trainer options and callbacks that do not work, with what to set instead.

docs/reference/api.md has them and those that work; `tests/modules/test_lightning_options.py`
tests each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.environments import ClusterEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import StrategyRegistry
from torch.optim.lr_scheduler import ReduceLROnPlateau

from litgrpo.arguments import as_list, did_you_mean, require
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.lightning_compat import is_compiled, saves_by_time

AVERAGES = (
    "averaged weights differ from the weights that generate rollouts; let `model.lr_scheduler` "
    "lower the learning rate"
)
TRIALS = "its trial steps would be iterations of the run; set "
STEP = (
    "an optimizer step uses all rows of its batch: set `data.batch_size`, and "
    "`model.update.micro_batch_tokens` for memory"
)
CLIP = "set `model.update.max_grad_norm` (SFT: `model.max_grad_norm`)"
SHARD = "to shard weights use `litgrpo.distributed.fsdp.strategy.FSDP2Strategy`"
# {option: (its default, why another value does not work)}, in the words of the page.
REJECTED_OPTIONS: dict[str, tuple[Any, str]] = {
    "overfit_batches": (
        0,
        "to train on few prompts set `data.train.limit`, and `data.val: null`",
    ),
    "accumulate_grad_batches": (
        1,
        f"{STEP}; it works for SFT, whose step is then that of the large batch (a mean over all "
        "target tokens)",
    ),
    "gradient_clip_val": (None, CLIP),
    "gradient_clip_algorithm": (None, CLIP),
    "barebones": (
        False,
        "it disables logging, which training needs; for less output use `--tensorboard false`, "
        "`--csv false`, `trainer.enable_progress_bar: false`",
    ),
}
REJECTED_CALLBACKS: dict[type[Callback], str] = {
    StochasticWeightAveraging: AVERAGES,
    WeightAveraging: AVERAGES,
    GradientAccumulationScheduler: STEP,
    LearningRateFinder: f"{TRIALS}`model.optimizer.lr`",
    BatchSizeFinder: f"{TRIALS}`data.batch_size`",
}
SAVES_BY_TIME = (
    "it saves nothing with manual optimization, which GRPO uses: set "
    "`IterationCheckpoint(every_n_iterations=...)`"
)
SPAWN = "its processes get copies of the module and return no results; use `ddp`"
COMPILED = "shapes change in every iteration; pass the module itself"
DEVICES = re.compile(r"-1|[1-9]\d*|\[?\d+(?:, ?\d+)*,?\]?")
# Lower-case parts of the names of strategies that shard weights.
SHARDING = ("fsdp", "modelparallel", "deepspeed")


def check_trainer_options(options: Mapping[str, Any], module: Any) -> None:
    """Reject options of the trainer that do not work.

    Raises:
        ValueError: with the option and what to set instead.
    """
    check_strategy(options.get("strategy", "auto"))
    for name, (default, note) in REJECTED_OPTIONS.items():
        value = options.get(name, default)
        is_allowed = name == "accumulate_grad_batches" and module.automatic_optimization
        require(value == default or is_allowed, describe_rejection(name, value, note))
    accelerator = options.get("accelerator", "auto")
    is_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    devices = str(options.get("devices", "auto"))
    require(
        devices == "auto" or DEVICES.fullmatch(devices) is not None,
        f"trainer.devices is {devices!r}; it must be auto, a number, or a list of numbers.",
    )
    require(
        devices != "-1" or not is_cpu,
        "trainer.devices is -1, which is not supported on CPU: set the number of processes.",
    )
    for callback in as_list(options.get("callbacks")):
        for kind, note in REJECTED_CALLBACKS.items():
            message = describe_rejection("callbacks", type(callback).__name__, note)
            require(not isinstance(callback, kind), message)
        if isinstance(callback, ModelCheckpoint) and not module.automatic_optimization:
            value = "ModelCheckpoint(train_time_interval=...)"
            message = describe_rejection("callbacks", value, SAVES_BY_TIME)
            require(not saves_by_time(callback), message)


def describe_rejected_callback(callbacks: Any) -> str:
    """Return why the first rejected callback of a recipe does not work; "" if none is rejected.

    Its missing arguments would be the parser's error, although no argument makes it work.
    """
    paths = [
        str(item.get("class_path") if isinstance(item, Mapping) else item)
        for item in as_list(callbacks)
    ]
    names = {path.rpartition(".")[2] for path in paths}
    for kind, note in REJECTED_CALLBACKS.items():
        if kind.__name__ in names:
            return describe_rejection("callbacks", kind.__name__, note)
    return ""


def check_trainer(module: Any) -> None:
    """Reject options of the trainer that a module is attached to; for `setup`.

    Raises:
        ValueError: with the option and what to set instead.
    """
    require(not is_compiled(module), describe_rejection("fit", "torch.compile(module)", COMPILED))
    trainer = module.trainer
    require(trainer.strategy.root_device.type != "mps", NO_FLOAT64)
    names = (*REJECTED_OPTIONS, "strategy", "callbacks")
    check_trainer_options({name: getattr(trainer, name) for name in names}, module)


def check_optimizers(module: Any) -> None:
    """Reject what a class of the user's own returns from `configure_optimizers` if it cannot work.

    Raises:
        ValueError: with what to return.
    """
    name, trainer = type(module).__name__, module.trainer
    schedules = trainer.lr_scheduler_configs
    # For None, Lightning makes an optimizer without parameters.
    number = sum(bool(optimizer.param_groups) for optimizer in trainer.optimizers)
    require(
        number == 1,
        f"{name}.configure_optimizers returned {number} optimizers; it must return one, over all "
        "trained weights. It may have several parameter groups.",
    )
    # Lightning steps schedules as they ask for, but not in manual optimization.
    is_stepped = all(
        (config.interval, config.frequency) == ("step", 1)
        and not isinstance(config.scheduler, ReduceLROnPlateau)
        for config in schedules
    )
    names = ", ".join(type(config.scheduler).__name__ for config in schedules)
    require(
        module.automatic_optimization or (is_stepped and len(schedules) <= 1),
        f"{name}.configure_optimizers returned the schedule {names}; it must be one, stepped "
        'after every optimizer step without a metric. Return {"optimizer": ..., "lr_scheduler": '
        '{"scheduler": ..., "interval": "step"}}, with its length in optimizer steps.',
    )


NO_FLOAT64 = (
    "Apple's GPU (MPS) has no float64, which sampling, rewards and metrics are computed in. Set "
    "trainer.accelerator: cpu."
)


def check_accelerator(name: Any) -> None:
    """Reject an accelerator that this machine lacks.

    Raises:
        ValueError: with the accelerators that it has.
    """
    accelerators = AcceleratorRegistry.available_accelerators()
    if not isinstance(name, str) or name == "auto":
        return
    on_mps = name == "mps" or (name == "gpu" and is_mps_chosen())
    require(not on_mps, NO_FLOAT64)
    # Lightning takes `gpu` for the first kind of GPU that it finds.
    kinds = ("cuda", "mps") if name == "gpu" else (name,)
    require(
        name == "gpu" or name in accelerators,
        f"trainer.accelerator is {name!r}{did_you_mean(name, ['gpu', *accelerators])}: expected "
        f"auto, gpu, {', '.join(accelerators)}",
    )
    usable = [
        accelerator
        for accelerator in accelerators
        if AcceleratorRegistry[accelerator]["accelerator"].is_available()
    ]
    require(
        bool({*kinds} & {*usable}),
        f"trainer.accelerator is {name!r}, but this machine has no such device, or torch was "
        f"installed without support for it. Set auto, or one of: {', '.join(usable)}.",
    )


def is_mps_chosen() -> bool:
    """Return True if Lightning would take Apple's GPU for `auto` and `gpu`."""
    return torch.backends.mps.is_available() and not torch.cuda.is_available()


def choose_accelerator(name: Any) -> Any:
    """Return the accelerator to train on: the CPU instead of a GPU without float64."""
    if name != "auto" or not is_mps_chosen():
        return name
    rank_zero_info("Training on the CPU: Apple's GPU (MPS) has no float64, which sampling needs.")
    return "cpu"


def check_strategy(strategy: Any) -> None:
    """Reject strategies that shard weights in another way, and ones that copy the module.

    Raises:
        ValueError: with the name of a strategy that works.
    """
    name = strategy_name(strategy)
    shards = any(part in name.lower().replace("_", "") for part in SHARDING)
    value = f"{name} (FSDP1, tensor parallelism and DeepSpeed)"
    require(not shards or name == "FSDP2Strategy", describe_rejection("strategy", value, SHARD))
    if not isinstance(strategy, str):
        return
    strategies = ["auto", *StrategyRegistry.available_strategies()]
    require(
        strategy in strategies,
        f"trainer.strategy is {strategy!r}{did_you_mean(strategy, strategies)}: expected a name "
        "such as auto or ddp, or a class: {class_path: package.module.Class}.",
    )
    require("spawn" not in strategy, describe_rejection("strategy", strategy, SPAWN))


def strategy_name(strategy: Any) -> str:
    """Name of a strategy."""
    if isinstance(strategy, str):
        return strategy
    if isinstance(strategy, Mapping):
        return str(strategy["class_path"]).rpartition(".")[2]
    return type(strategy).__name__


def describe_rejection(option: str, value: Any, note: str) -> str:
    """Return why a value of an option does not work, in one line."""
    note = note.replace("`", "")
    return f"trainer.{option} is {value}, which does not work with litgrpo: {note}."


def cluster_plugins(option: Any) -> list[Any]:
    """Plugins of the trainer; under SLURM with Lightning's own answer to SIGUSR1 disabled.

    Lightning would save in the middle of an iteration and requeue the job while the training
    continues. `IterationCheckpoint` saves between two iterations and exits; the batch script
    requeues (docs/explanation/scale.md).
    """
    plugins = as_list(option)
    has_environment = any(isinstance(plugin, ClusterEnvironment) for plugin in plugins)
    if not has_environment and SLURMEnvironment.detect():
        plugins.append(SLURMEnvironment(auto_requeue=False))
    return plugins
