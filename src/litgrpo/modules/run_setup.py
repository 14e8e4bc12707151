"""Fill in the learning rate and the length of a run, and build its optimizer and schedule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Timer
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW, Optimizer

from litgrpo.callbacks.guards import TimeBudget
from litgrpo.distributed.device import backend
from litgrpo.distributed.fsdp.strategy import strategy_of
from litgrpo.distributed.messages import log, rank, rank_zero_info
from litgrpo.learning.optim import DefaultAdamW, Warmup
from litgrpo.lightning_compat import count_training_batches, find_trainer
from litgrpo.models.loading.sharded_weights import PolicySharding

DEFAULT_EPOCHS = 3  # transformers' and TRL's num_train_epochs
LIGHTNINGS_DEFAULT_EPOCHS = 1000  # of a Trainer without max_epochs
EMBEDDED = "builtin:"
MUCH_HIGHER = 30  # times the default learning rate: worth a note
MAX_TRIAL_STEPS = 10_000  # of a schedule
SAMPLED_WEIGHTS = 10_000  # of a parameter
MOSTLY_LOST = 0.5  # fraction of the weights that an update does not change


@dataclass(frozen=True)
class DefaultRates:
    """Default learning rates of AdamW.

    Args:
        full: for all weights of a pretrained model.
        lora: for adapters.
        small: for a small model, built-in or trained from scratch.

    Example:
        >>> DefaultRates(full=1e-6, lora=1e-5, small=3e-4).lora
        1e-05
    """

    full: float
    lora: float
    small: float

    def select(self, module: Any) -> tuple[float, str]:
        """Return the default rate for what a module trains, and a description of it."""
        if module.lora is not None:
            return self.lora, "adapters"
        if module.pretrained is None or str(module.pretrained).startswith(EMBEDDED):
            return self.small, "a small model"
        return self.full, "full fine-tuning"


# TRL: GRPOConfig, SFTConfig and its PEFT page; `small` are the rates of the built-in recipes.
GRPO_RATES = DefaultRates(full=1e-6, lora=1e-5, small=3e-4)
SFT_RATES = DefaultRates(full=2e-5, lora=2e-4, small=1e-3)


def build_optimizer(module: Any, default_rates: DefaultRates, steps_per_iteration: int = 1) -> Any:
    """Build the optimizer over a module's trained weights, and its schedule.

    Also sets `module.max_iterations` if nothing else limits the run, since a schedule needs the
    number of steps.

    Args:
        module: attached to its trainer; has `optimizer`, `lr_scheduler`, `max_iterations`, `lora`
            and `pretrained`.
        default_rates: learning rates if the config has none.
        steps_per_iteration: optimizer steps of an iteration.

    Returns:
        The result of Lightning's `configure_optimizers`.

    Raises:
        ValueError: optimizer or schedule reject their arguments.
    """
    iterations = resolve_run_length(module)
    if module.trainer.max_steps > 0:  # a started iteration is finished
        limit = -(-module.trainer.max_steps // steps_per_iteration)
        iterations = limit if iterations is None else min(iterations, limit)
    parameters = [p for p in module.parameters() if p.requires_grad]
    steps = None if iterations is None else iterations * steps_per_iteration
    optimizer = _construct("optimizer", module.optimizer, parameters)
    _set_and_log_learning_rate(optimizer, *default_rates.select(module))
    _check_eps(optimizer)
    _warn_of_lost_updates(optimizer)
    if str(module.trainer.precision) != "16-mixed":  # there the scaler must unscale before clipping
        use_fused_kernel(optimizer)
    if module.lr_scheduler is None:
        try_steps(module.optimizer, None, optimizer, steps)
        return optimizer
    schedule = _construct("lr_scheduler", module.lr_scheduler, optimizer)
    if isinstance(schedule, Warmup):
        schedule.set_total_steps(steps)
    try_steps(module.optimizer, module.lr_scheduler, optimizer, steps)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": schedule, "interval": "step"},
    }


def use_fused_kernel(optimizer: Optimizer) -> None:
    """Let Adam and AdamW update all weights by one kernel on CUDA, unless the config decides.

    Torch's default there makes temporary copies as large as all weights.
    """
    if type(optimizer) not in (Adam, AdamW, DefaultAdamW):
        return
    for group in optimizer.param_groups:
        undecided = group["fused"] is None and group["foreach"] is None
        on_cuda = all(p.is_cuda and p.is_floating_point() for p in group["params"])
        if undecided and on_cuda and not group["differentiable"]:
            group["fused"] = True


def _construct(option: str, constructor: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return constructor(argument)
    except Exception as error:  # the class may be of any package
        raise ValueError(f"Could not construct model.{option}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def try_steps(
    build: Callable[[Any], Any],
    build_schedule: Callable[[Any], Any] | None,
    optimizer: Optimizer,
    steps: int | None,
) -> None:
    """Take a step with a small weight, and follow the schedule to the end of the run.

    Some optimizers need a closure or sparse gradients, and some schedules a metric or fewer steps
    than the run has. All of them fail in their first steps, after minutes of loading.

    Args:
        build: constructor of the optimizer.
        build_schedule: constructor of the schedule, if there is one.
        optimizer: the optimizer of the run.
        steps: optimizer steps of the run, if known.

    Raises:
        ValueError: optimizer or schedule cannot be used.
    """
    first = next(p for group in optimizer.param_groups for p in group["params"])
    if first.is_meta or backend(first.device).static_shapes:
        return
    weight = Parameter(torch.ones(2, 2, dtype=first.dtype, device=first.device))
    weight.grad = torch.full_like(weight, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the run itself are shown
        try:
            trial = build([weight])
        except Exception:  # a constructor that expects several groups of weights
            return
        if isinstance(trial, DefaultAdamW):
            trial.set_default_lr(1.0)
        name, schedule = type(optimizer).__name__, None
        if build_schedule is not None:
            schedule = _construct("lr_scheduler", build_schedule, trial)
            if isinstance(schedule, Warmup):
                schedule.set_total_steps(steps)
        try:
            # As Lightning: with a closure, which returns nothing in manual optimization.
            trial.step(_return_none)
        except Exception as error:
            raise ValueError(
                f"model.optimizer {name} does not work with dense gradients and a plain `step()`: "
                f"{_reason(error)}. Use another optimizer, such as torch.optim.AdamW."
            ) from error
        for number in range(min(steps or 1, MAX_TRIAL_STEPS) if schedule is not None else 0):
            try:
                schedule.step()  # type: ignore[union-attr]
                rates = [float(group["lr"]) for group in trial.param_groups]
            except Exception as error:
                raise ValueError(
                    f"model.lr_scheduler {type(schedule).__name__} fails at optimizer step "
                    f"{number + 1} of {steps or 'the run'}: {_reason(error)}. Use a schedule that "
                    "is stepped without a metric and is as long as the run, such as WarmupCosine."
                ) from error
            if not all(0 <= rate < math.inf for rate in rates):
                raise ValueError(
                    f"model.lr_scheduler {type(schedule).__name__} sets the learning rate to "
                    f"{rates[0]} at optimizer step {number + 1}; it must be 0 or more."
                )


def _set_and_log_learning_rate(optimizer: Optimizer, default: float, trained: str) -> None:
    name, origin = type(optimizer).__name__, ""
    if isinstance(optimizer, DefaultAdamW):
        name = "AdamW"
        if optimizer.needs_lr:
            origin = f" (default for {trained})"
        optimizer.set_default_lr(default)
    group = optimizer.param_groups[0]
    if group.get("lr") is None:
        raise ValueError(
            f"model.optimizer {name} has no learning rate (lr is None): set model.optimizer.lr; "
            "for transformers' Adafactor also relative_step: false."
        )
    lr, decay = float(group["lr"]), group.get("weight_decay", 0) or 0
    line = f"Optimizer: {name}, lr {lr:.3g}{origin}, weight decay {decay:g}"
    if "betas" in group and lr > MUCH_HIGHER * default:
        line += f". That lr is high: {default:.0e} is usual for {trained} (--model.optimizer.lr)"
    rank_zero_info(line)


def _check_eps(optimizer: Optimizer) -> None:
    """Check that the optimizer's divisor does not become 0 in the dtype of its weights."""
    for group in optimizer.param_groups:
        option, weights = group.get("eps"), group["params"]
        # Adafactor has two, of which torch's may be None.
        for eps in option if isinstance(option, tuple | list) else [option]:
            if not eps or not weights or torch.tensor(eps, dtype=weights[0].dtype) != 0:
                continue
            raise ValueError(
                f"The optimizer's eps is {eps}, which is 0 in {weights[0].dtype}: its first step "
                "would not be finite. Set model.precision.dtype to float32 (with trainer.precision "
                "16-mixed for speed) or bfloat16, or model.optimizer.eps to 1e-4."
            )


def _warn_of_lost_updates(optimizer: Optimizer) -> None:
    """Warn if Adam's steps are rounded away: weights of low precision would not change at all."""
    lost, total = 0.0, 0
    for group in optimizer.param_groups:
        if "betas" not in group:  # the size of other optimizers' steps depends on the gradients
            continue
        for weight in group["params"]:
            local = weight.detach()
            local = local.to_local() if isinstance(local, DTensor) else local
            is_low = torch.finfo(local.dtype).eps > torch.finfo(torch.float32).eps
            if not is_low or not local.numel():
                continue
            sizes = local.flatten()[:: max(1, local.numel() // SAMPLED_WEIGHTS)].abs().float()
            # A number between 2^k and 2^(k+1) changes by steps of 2^k eps.
            spacing = torch.finfo(weight.dtype).eps * torch.exp2(sizes.log2().floor())
            # The sample represents all of the weight, so a tensor counts by its size.
            lost += float((2 * float(group["lr"]) < spacing).double().mean()) * local.numel()
            total += local.numel()
    if total and lost > MOSTLY_LOST * total and rank() == 0:
        dtype = str(optimizer.param_groups[0]["params"][0].dtype).removeprefix("torch.")
        lr = float(optimizer.param_groups[0]["lr"])
        log.warning(
            f"model.precision.dtype is {dtype}: steps of the learning rate, {lr:g}, are rounded "
            f"away in {lost / total:.0%} of the weights, which will not change. Set "
            "model.precision.dtype to float32 (model.precision.autocast_dtype bfloat16 keeps the "
            "speed), or raise model.optimizer.lr."
        )


def find_autocast_dtype(module: Any) -> torch.dtype | None:
    """Return the dtype of a module's matrix products, if lower than that of its weights."""
    name, trainer = module.precision.autocast_dtype, find_trainer(module)
    if name is None and trainer is not None:
        name = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}.get(str(trainer.precision))
    return None if name is None else getattr(torch, name)


def make_sharding(module: Any) -> PolicySharding | None:
    """Return the sharding of a module's trainer strategy; None if weights are not sharded."""
    strategy = strategy_of(module)
    return None if strategy is None else PolicySharding(strategy)


def given_epochs(max_epochs: int | None) -> int | None:
    """Return the epochs that a trainer was given; None if they are no limit."""
    return None if max_epochs in (-1, None, LIGHTNINGS_DEFAULT_EPOCHS) else max_epochs


def resolve_run_length(module: Any) -> int | None:
    """Return the iterations of the run; by default set `module.max_iterations` to three epochs.

    Returns:
        None if something else ends the run: a number of tokens, time, or the trainer's max_steps,
        which may also end it earlier.
    """
    trainer = module.trainer
    if module.max_iterations is not None:
        return int(module.max_iterations)
    if (epochs := given_epochs(trainer.max_epochs)) is not None:
        batches = batches_per_epoch(trainer)
        return None if batches is None else batches * epochs
    limits_time = any(isinstance(callback, Timer | TimeBudget) for callback in trainer.callbacks)
    limits_steps = trainer.max_steps != -1  # fast_dev_run sets it
    if module.max_generated_tokens is not None or limits_steps or limits_time:
        return None
    batches = batches_per_epoch(trainer)
    if batches is None:
        return None
    module.max_iterations = DEFAULT_EPOCHS * batches
    rank_zero_info(
        f"Length: {DEFAULT_EPOCHS} epochs, {module.max_iterations} iterations "
        "(default; set --model.max_iterations)"
    )
    return module.max_iterations


def ends_run(module: Any) -> bool:
    """Return whether an evaluation that happens now is the last one, as far as is known."""
    trainer = find_trainer(module)
    if trainer is None or trainer.state.fn != "fit" or trainer.should_stop:
        return True
    length = resolve_run_length(module)
    is_at_end = length is not None and module.iteration >= length
    return is_at_end or 0 <= trainer.max_steps <= trainer.global_step


def log_that_run_is_complete(module: Any) -> None:
    """Log that a fit trains nothing, because a limit was reached before."""
    limits = {"max_iterations": module.max_iterations}
    limits["max_generated_tokens"] = module.max_generated_tokens
    named = ", ".join(f"model.{name} {value}" for name, value in limits.items() if value)
    rank_zero_info(
        f"Nothing to train: {module.iteration} iterations are finished ({named}). Raise the limit "
        "to train further."
    )


def batches_per_epoch(trainer: Trainer) -> int | None:
    """Return the iterations of one epoch; None if their number is not known."""
    batches = count_training_batches(trainer)
    if not 0 < batches < float("inf"):
        return None
    return -(-int(batches) // trainer.accumulate_grad_batches)


def passes_over_data(trainer: Trainer) -> float:
    """Return how often the training prompts have been seen, including the current batch."""
    return trainer.current_epoch + (trainer.fit_loop.batch_idx + 1) / trainer.num_training_batches


def _return_none() -> Any:
    return None


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
