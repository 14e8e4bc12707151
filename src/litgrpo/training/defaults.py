"""What a recipe leaves open: the learning rate, the length of the run. Said when a fit starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import Timer
from torch.nn import Parameter
from torch.optim import Optimizer

from litgrpo.arguments import require
from litgrpo.callbacks.guards import TimeBudget
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.rollout.sampling import Sampling
from litgrpo.training.optim import DefaultAdamW, Warmup

PASSES = 3  # over the data, where nothing ends the run: transformers' and TRL's num_train_epochs
LIGHTNINGS_EPOCHS = 1000  # a Trainer that was given no length has this one
EMBEDDED = "builtin:"
MUCH_HIGHER = 30  # times the usual learning rate: worth a word


@dataclass(frozen=True)
class UsualRates:
    """Learning rates that are usual for AdamW.

    Args:
        weights: for all weights of a pretrained model.
        adapters: for adapters.
        own: for a small model that was trained from nothing.
    """

    weights: float
    adapters: float
    own: float

    def of(self, module: Any) -> tuple[float, str]:
        """The usual rate for what a module trains, and what that is."""
        if module.lora is not None:
            return self.adapters, "adapters"
        if module.pretrained is None or str(module.pretrained).startswith(EMBEDDED):
            return self.own, "a small model that began from nothing"
        return self.weights, "all weights of a pretrained model"


# TRL: GRPOConfig, SFTConfig, and its page on PEFT; the last of each is our own recipes'.
GRPO_RATES = UsualRates(weights=1e-6, adapters=1e-5, own=3e-4)
SFT_RATES = UsualRates(weights=2e-5, adapters=2e-4, own=1e-3)


def settled(module: Any, usual: UsualRates, steps_per_iteration: int = 1) -> tuple[Any, Any]:
    """The constructors of a module's optimizer and schedule, with what the recipe leaves open.

    Settles the length of the run, too, and says it.

    Args:
        module: attached to its trainer; has `optimizer`, `lr_scheduler`, `max_iterations`, `lora`
            and `pretrained`.
        usual: learning rates, where the recipe gives none.
        steps_per_iteration: optimizer steps.

    Returns:
        Parameters -> optimizer; and optimizer -> schedule, or None. Both raise a ValueError with
        their class's own sentence where it refuses what it was given.
    """
    iterations = length_of(module)
    steps = None if iterations is None else iterations * steps_per_iteration

    def optimizer(parameters: list[Parameter]) -> Optimizer:
        made = constructed("optimizer", module.optimizer, parameters)
        say_optimizer(made, *usual.of(module))
        return made

    def schedule(optimizer: Optimizer) -> Any:
        made = constructed("lr_scheduler", module.lr_scheduler, optimizer)
        if isinstance(made, Warmup):
            made.set_total_steps(steps)
        return made

    return optimizer, None if module.lr_scheduler is None else schedule


def constructed(key: str, make: Callable[[Any], Any], argument: Any) -> Any:
    """What a constructor makes; its own sentence under the key where it refuses.

    Raises:
        ValueError: it refuses.
    """
    try:
        return make(argument)
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:
        sentence = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"model.{key} cannot be made: {sentence}") from error


def say_optimizer(made: Optimizer, usual: float, trained: str) -> None:
    """One line: optimizer, learning rate and weight decay; another word where it is far off.

    Args:
        made: takes the usual learning rate if it has none.
        usual: learning rate of AdamW.
        trained: for this.
    """
    name, origin = type(made).__name__, ""
    if isinstance(made, DefaultAdamW):
        name, origin = "AdamW", f" (usual for {trained})" if made.needs_lr else ""
        made.set_default_lr(usual)
    lr, decay = float(made.param_groups[0]["lr"]), made.param_groups[0].get("weight_decay", 0)
    line = f"Optimizer: {name}, lr {lr:.3g}{origin}, weight decay {decay:g}"
    if "betas" in made.param_groups[0] and lr > MUCH_HIGHER * usual:
        line += f". That lr is high: {usual:.0e} is usual for {trained} (--model.optimizer.lr)"
    rank_zero_info(line)


def length_of(module: Any) -> int | None:
    """Iterations of the run, after three passes over the data were set where nothing ends it.

    None where something else does: a number of tokens, or the trainer's own limits.
    """
    trainer = module.trainer
    if module.max_iterations is not None:
        return int(module.max_iterations)
    if trainer.max_steps != -1 or trainer.max_epochs not in (-1, None, LIGHTNINGS_EPOCHS):
        return limited_by_trainer(trainer)
    if module.max_generated_tokens is not None or trainer.fast_dev_run or timed(trainer):
        return None
    batches = batches_of_a_pass(trainer)
    if batches is None:
        return None
    module.max_iterations = PASSES * batches
    rank_zero_info(
        f"Length: {PASSES} passes over the data, {module.max_iterations} iterations, as nothing "
        "else ends this run (--model.max_iterations)"
    )
    return PASSES * batches


def limited_by_trainer(trainer: Trainer) -> int | None:
    """Iterations that the trainer's own limits allow; None where it counts something else."""
    batches = batches_of_a_pass(trainer)
    if trainer.max_steps != -1 or batches is None:
        return None
    return batches * int(trainer.max_epochs or 0)


def batches_of_a_pass(trainer: Trainer) -> int | None:
    """Iterations of one pass over the training data; None where their number is not known."""
    trainer.fit_loop.setup_data()
    batches = trainer.num_training_batches
    if not 0 < batches < float("inf"):
        return None
    return -(-int(batches) // trainer.accumulate_grad_batches)


def timed(trainer: Any) -> bool:
    """Whether a limit of time ends the run."""
    return any(isinstance(each, Timer | TimeBudget) for each in trainer.callbacks)


def refuse_greedy_training(sampling: Sampling, group_size: int) -> None:
    """Refuse groups of copies.

    Raises:
        ValueError: the temperature is 0 and the groups are of several.
    """
    require(
        group_size == 1 or not sampling.greedy,
        f"sampling.temperature is 0, so the {group_size} completions of a group are copies, and "
        "nothing can be learned from comparing them. Train with 1.0; evaluation.temperature is "
        "for validation.",
    )
