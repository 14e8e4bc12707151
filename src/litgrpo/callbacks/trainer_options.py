"""Lightning's trainer options and callbacks: which ones work, which are rejected, and why.

docs/reference/lightning.md shows `OPTIONS`; `tests/training/test_lightning_options.py` tests
every row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.environments import ClusterEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import StrategyRegistry

from litgrpo.arguments import did_you_mean, require
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.training.lightning_compat import is_compiled


class TrainerOption(NamedTuple):
    """One row of the table in docs/reference/lightning.md.

    Example:
        >>> OPTIONS["overfit_batches"].works
        False
    """

    works: bool
    note: str


_AVERAGES = "averaged weights differ from the weights that generate rollouts; let "
_AVERAGES += "`model.lr_scheduler` lower the learning rate"
_TRIALS = "its trial steps would be iterations of the run; set "
_STEP = "an optimizer step uses all rows of its batch: set `data.batch_size`, and "
_STEP += "`model.update.micro_batch_tokens` for memory"

# {name: row}. Without a note an option does what Lightning documents. One iteration is one batch.
OPTIONS: dict[str, TrainerOption] = {
    "max_epochs": TrainerOption(
        True, "passes over the prompts; `model.max_iterations` is the usual limit"
    ),
    "max_steps": TrainerOption(True, "counts optimizer steps; a started iteration is finished"),
    "min_epochs, min_steps": TrainerOption(True, "also postpone the end by `model.max_iterations`"),
    "max_time": TrainerOption(
        True, "`litgrpo` stops early enough for the last validation and checkpoint (`TimeBudget`)"
    ),
    "fast_dev_run": TrainerOption(True, "one iteration, one validation batch, no files"),
    "limit_train_batches": TrainerOption(True, "iterations of a pass over the prompts"),
    "limit_val_batches, limit_test_batches, limit_predict_batches": TrainerOption(True, ""),
    "overfit_batches": TrainerOption(
        False, "to train on few prompts set `data.train.limit`, and `data.val: null`"
    ),
    "val_check_interval, check_val_every_n_epoch": TrainerOption(
        True, "with `check_val_every_n_epoch: null` the interval counts iterations"
    ),
    "num_sanity_val_steps": TrainerOption(
        True, "-1 evaluates all held-out prompts before training, for the summary's `before`"
    ),
    "log_every_n_steps": TrainerOption(
        True, "counts iterations; `litgrpo` sets it to 1, and Lightning's default of 50 becomes 1"
    ),
    "accumulate_grad_batches": TrainerOption(
        False,
        f"{_STEP}; it works for SFT, whose step is then that of the large batch (a mean over all "
        "target tokens)",
    ),
    "gradient_clip_val, gradient_clip_algorithm": TrainerOption(
        False, "set `model.update.max_grad_norm` (SFT: `model.max_grad_norm`)"
    ),
    "precision": TrainerOption(True, "32-true, bf16-mixed, 16-mixed; see also `model.precision`"),
    "strategy: auto, ddp": TrainerOption(True, ""),
    "strategy: fsdp, deepspeed, ModelParallelStrategy": TrainerOption(
        False, "to shard weights use `litgrpo.distributed.fsdp.strategy.FSDP2Strategy`"
    ),
    "strategy: ddp_spawn": TrainerOption(
        False, "its processes get copies of the module and return no results; use `ddp`"
    ),
    "profiler": TrainerOption(True, ""),
    "detect_anomaly": TrainerOption(True, ""),
    "deterministic": TrainerOption(True, ""),
    "inference_mode": TrainerOption(True, ""),
    "logger": TrainerOption(
        True, "any Lightning logger; with `litgrpo` a failing logger does not stop training"
    ),
    "enable_progress_bar": TrainerOption(
        True, "Lightning's own bars are replaced by one that counts iterations; subclasses stay"
    ),
    "enable_checkpointing": TrainerOption(True, ""),
    "enable_model_summary": TrainerOption(True, ""),
    "barebones": TrainerOption(
        False,
        "it disables logging, which training needs; for less output use `--tensorboard false`, "
        "`--csv false`, `trainer.enable_progress_bar: false`",
    ),
    "ModelCheckpoint": TrainerOption(
        True,
        "`every_n_train_steps` counts optimizer steps; `IterationCheckpoint` counts iterations, "
        "verifies files, and resumes exactly. By default it saves after a validation, so without "
        "one set `every_n_train_steps` or `save_on_train_epoch_end: true`; otherwise the run is "
        "rejected (warned without `monitor`)",
    ),
    "OnExceptionCheckpoint": TrainerOption(True, ""),
    "EarlyStopping": TrainerOption(
        True,
        "`monitor` any metric that is logged, such as `val/reward` or `reward/mean`; checked after "
        "a validation, so a run without one is rejected unless `check_on_train_epoch_end: true`",
    ),
    "LearningRateMonitor": TrainerOption(True, "`optim/lr` is logged in any case"),
    "DeviceStatsMonitor": TrainerOption(True, ""),
    "Timer": TrainerOption(True, "a started iteration is finished"),
    "ModelSummary, RichModelSummary": TrainerOption(True, ""),
    "LambdaCallback": TrainerOption(True, ""),
    "TQDMProgressBar, RichProgressBar": TrainerOption(True, "replaced, see `enable_progress_bar`"),
    "StochasticWeightAveraging, WeightAveraging": TrainerOption(False, _AVERAGES),
    "GradientAccumulationScheduler": TrainerOption(False, _STEP),
    "LearningRateFinder": TrainerOption(False, f"{_TRIALS}`model.optimizer.lr`"),
    "BatchSizeFinder": TrainerOption(False, f"{_TRIALS}`data.batch_size`"),
    "torch.compile(module)": TrainerOption(
        False, "shapes change in every iteration; pass the module itself"
    ),
}
REJECTED_CALLBACKS: dict[type[Callback], str] = {
    StochasticWeightAveraging: "StochasticWeightAveraging, WeightAveraging",
    WeightAveraging: "StochasticWeightAveraging, WeightAveraging",
    GradientAccumulationScheduler: "GradientAccumulationScheduler",
    LearningRateFinder: "LearningRateFinder",
    BatchSizeFinder: "BatchSizeFinder",
}
DEVICES = re.compile(r"-1|[1-9]\d*|\[?\d+(?:, ?\d+)*,?\]?")
# Lower-case parts of the names of strategies that shard weights.
SHARDING = ("fsdp", "modelparallel", "deepspeed")


def page() -> str:
    """The table as the Markdown of docs/reference/lightning.md."""
    lines = ["| option or callback | | note |", "| --- | --- | --- |"]
    for name, option in OPTIONS.items():
        names = ", ".join(f"`{each}`" for each in name.split(", "))
        lines.append(f"| {names} | {'works' if option.works else 'rejected'} | {option.note} |")
    return "\n".join(lines)


def check_trainer_options(given: Mapping[str, Any], module: Any) -> None:
    """Reject options of the trainer that do not work; see `OPTIONS`.

    Args:
        given: arguments of the trainer.
        module: the module that it will train.

    Raises:
        ValueError: with the option and what to set instead.
    """
    check_strategy(given.get("strategy", "auto"))
    accumulates = given.get("accumulate_grad_batches", 1) != 1
    if accumulates and not module.automatic_optimization:
        _reject("accumulate_grad_batches", given["accumulate_grad_batches"])
    clipping = "gradient_clip_val, gradient_clip_algorithm"
    for name in clipping.split(", "):
        if given.get(name) is not None:
            _reject(name, given[name], row=clipping)
    for name in ("overfit_batches", "barebones"):
        if given.get(name):
            _reject(name, given[name])
    accelerator = given.get("accelerator", "auto")
    is_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    devices = str(given.get("devices", "auto"))
    require(
        devices == "auto" or DEVICES.fullmatch(devices) is not None,
        f"trainer.devices is {devices!r}; it must be auto, a number, or a list of numbers.",
    )
    if devices == "-1" and is_cpu:
        raise ValueError(
            "trainer.devices is -1, which is not supported on CPU: set the number of processes."
        )
    callbacks = given.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        for kind, row in REJECTED_CALLBACKS.items():
            if isinstance(callback, kind):
                _reject("callbacks", type(callback).__name__, row=row)


def describe_rejected_callback(given: Any) -> str:
    """Return why the first rejected callback of a recipe does not work; "" if none is rejected.

    Its missing arguments would be the parser's error, although no argument makes it work.

    Args:
        given: trainer.callbacks: names, `{class_path: ...}` or a list of them.
    """
    each_of = given if isinstance(given, list) else [given]
    paths = [str(each.get("class_path") if isinstance(each, Mapping) else each) for each in each_of]
    names = {path.rpartition(".")[2] for path in paths}
    for kind, row in REJECTED_CALLBACKS.items():
        if kind.__name__ in names:
            return describe_rejection("callbacks", kind.__name__, row)
    return ""


def check_trainer(module: Any) -> None:
    """Reject options of the trainer that a module is attached to; for `setup`.

    Raises:
        ValueError: with the option and what to set instead.
    """
    if is_compiled(module):
        _reject("fit", "torch.compile(module)", row="torch.compile(module)")
    trainer = module.trainer
    require(trainer.strategy.root_device.type != "mps", NO_FLOAT64)
    names = "strategy accumulate_grad_batches gradient_clip_val gradient_clip_algorithm "
    names += "overfit_batches barebones callbacks"
    check_trainer_options({name: getattr(trainer, name) for name in names.split()}, module)


NO_FLOAT64 = (
    "Apple's GPU (MPS) has no float64, which sampling, rewards and metrics are computed in. Set "
    "trainer.accelerator: cpu."
)


def check_accelerator(name: Any) -> None:
    """Reject an accelerator that this machine lacks.

    Raises:
        ValueError: with the accelerators that it has.
    """
    known = AcceleratorRegistry.available_accelerators()
    if not isinstance(name, str) or name == "auto":
        return
    on_mps = name == "mps" or (name == "gpu" and is_mps_chosen())
    require(not on_mps, NO_FLOAT64)
    # Lightning takes `gpu` for the first kind of GPU that it finds.
    kinds = ("cuda", "mps") if name == "gpu" else (name,)
    require(
        name == "gpu" or name in known,
        f"trainer.accelerator is {name!r}{did_you_mean(name, ['gpu', *known])}: expected auto, "
        f"gpu, {', '.join(known)}",
    )
    usable = [each for each in known if AcceleratorRegistry[each]["accelerator"].is_available()]
    require(
        bool({*kinds} & {*usable}),
        f"trainer.accelerator is {name!r}, but this machine has no such device, or torch was "
        f"installed without support for it. Set auto, or one of: {', '.join(usable)}.",
    )


def is_mps_chosen() -> bool:
    """Return True if Lightning would take Apple's GPU for `auto` and `gpu`."""
    return torch.backends.mps.is_available() and not torch.cuda.is_available()


def choose_accelerator(name: Any) -> Any:
    """Return the accelerator to train on: the CPU instead of a GPU without float64.

    Args:
        name: trainer.accelerator.
    """
    if name != "auto" or not is_mps_chosen():
        return name
    rank_zero_info("Training on the CPU: Apple's GPU (MPS) has no float64, which sampling needs.")
    return "cpu"


def check_strategy(strategy: Any) -> None:
    """Reject strategies that shard weights in another way, and ones that copy the module.

    Args:
        strategy: Lightning's, by name, as `{class_path: ...}` or as an object.

    Raises:
        ValueError: with the name of a strategy that works.
    """
    name = strategy_name(strategy)
    shards = any(part in name.lower().replace("_", "") for part in SHARDING)
    if shards and name != "FSDP2Strategy":
        row = "strategy: fsdp, deepspeed, ModelParallelStrategy"
        _reject("strategy", f"{name} (FSDP1, tensor parallelism and DeepSpeed)", row=row)
    if not isinstance(strategy, str):
        return
    known = ["auto", *StrategyRegistry.available_strategies()]
    require(
        strategy in known,
        f"trainer.strategy is {strategy!r}{did_you_mean(strategy, known)}: expected a name such "
        "as auto or ddp, or a class: {class_path: package.module.Class}.",
    )
    if "spawn" in strategy:
        _reject("strategy", strategy, row="strategy: ddp_spawn")


def strategy_name(strategy: Any) -> str:
    """Name of a strategy.

    Example:
        >>> strategy_name({"class_path": "lightning.pytorch.strategies.FSDPStrategy"})
        'FSDPStrategy'
    """
    if isinstance(strategy, str):
        return strategy
    if isinstance(strategy, Mapping):
        return str(strategy["class_path"]).rpartition(".")[2]
    return type(strategy).__name__


def describe_rejection(option: str, value: Any, row: str = "") -> str:
    """Return why an option does not work, in one line; `row` is its name in `OPTIONS`."""
    note = OPTIONS[row or option].note.replace("`", "")
    return f"trainer.{option} is {value}, which does not work with litgrpo: {note}."


def _reject(option: str, value: Any, row: str = "") -> None:
    raise ValueError(describe_rejection(option, value, row))


def cluster_plugins(given: Any) -> list[Any]:
    """Plugins of the trainer; under SLURM with Lightning's own answer to SIGUSR1 disabled.

    Lightning would save in the middle of an iteration and requeue the job while the training
    continues. `IterationCheckpoint` saves between two iterations and exits; the batch script
    requeues (docs/explanation/scale.md).

    Args:
        given: value of `trainer.plugins`.
    """
    plugins = [] if given is None else list(given) if isinstance(given, list) else [given]
    has_environment = any(isinstance(each, ClusterEnvironment) for each in plugins)
    if not has_environment and SLURMEnvironment.detect():
        plugins.append(SLURMEnvironment(auto_requeue=False))
    return plugins
