"""Every private use of Lightning, each with its reason; an update that breaks one says which.

Lightning's public API covers almost all of litgrpo. What it lacks is used here and nowhere else;
`tests/test_lightning_compat.py` shows what each function relies on.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from torch import Tensor

if TYPE_CHECKING:
    from lightning import LightningModule, Trainer

TESTED = "2.6.6"
DEFAULT_LOG_INTERVAL = 50  # Trainer.log_every_n_steps
# Warnings of every run that ask nothing of the user.
HARMLESS_WARNINGS = (
    r".*does not have many workers",  # prompts are tokenized once; there is nothing to load
    r".*in eval mode at the start of training",  # dropout is off unless the recipe turns it on
    r".*sync_dist=True",  # the modules average over processes before they log
    r".*You have overridden `transfer_batch_to_device`",
    r".*isinstance\(treespec, LeafSpec\)",  # Lightning's own call of torch
    r"Using ModelCheckpoint with manual optimization",  # weights after the step are meant
    r".*`max_epochs` was not set",  # `max_iterations` ends the training
    r".*is_gradient_checkpointing. is deprecated",  # peft asks transformers by the old name
    # Lightning's calls of jsonargparse.
    r"(?s).*(JsonargparseDeprecationWarning|deprecated in v4\.\d+\.\d+ and will be removed in v5)",
)


def private(owner: Any, name: str) -> Any:
    """Return an attribute of Lightning that has no public name."""
    if not hasattr(owner, name):
        raise RuntimeError(
            f"lightning {lightning.__version__} has no {type(owner).__name__}.{name}, which "
            f"litgrpo uses. litgrpo is tested with lightning {TESTED}: install that version, or "
            "adapt litgrpo/lightning_compat.py."
        )
    return getattr(owner, name)


def set_data_parallel_size(strategy: Any, size: int) -> None:
    """Set the number of ranks of a `ModelParallelStrategy`.

    With "auto", Lightning takes the number of nodes. The number of ranks is not known yet when the
    strategy is made, so it cannot be passed as the argument `data_parallel_size`.
    """
    private(strategy, "_data_parallel_size")
    strategy._data_parallel_size = size


def find_trainer(module: LightningModule) -> Trainer | None:
    """Return the trainer that a module is attached to, if any.

    (Nothing private: `module.trainer` raises if there is none.)
    """
    try:
        return module.trainer
    except RuntimeError:
        return None


def is_compiled(module: LightningModule) -> bool:
    """Return True for a module that was passed as `torch.compile(module)`.

    Lightning unwraps such a module before the module's first hook; only this attribute is left.
    """
    return private(module, "_compiler_ctx") is not None


def saves_by_time(checkpoint: ModelCheckpoint) -> bool:
    """Return True for `ModelCheckpoint(train_time_interval=...)`."""
    return private(checkpoint, "_train_time_interval") is not None


def validate_now(trainer: Any, *, log: bool = True) -> None:
    """Run a validation between two iterations.

    `Trainer.validate` cannot be called inside a fit. These are the steps that
    `_TrainingEpochLoop.on_advance_end` takes; all of their names are public, their order is not
    documented. With `log`, the metrics reach the loggers.
    """
    loop, loggers = trainer.fit_loop.epoch_loop.val_loop, trainer.loggers
    loop.restarting = False  # a resumed run would skip the batches that its checkpoint counted
    trainer.validating = True
    trainer.loggers = loggers if log else []
    try:
        loop.run()
    finally:
        trainer.loggers = loggers
    trainer.training = True


def log_every_iteration(trainer: Any) -> None:
    """Log each iteration, unless the trainer was given another interval than Lightning's default.

    An iteration takes seconds to minutes, so that a short run would log nothing.
    """
    if trainer.log_every_n_steps == DEFAULT_LOG_INTERVAL:
        trainer.log_every_n_steps = 1


def log_numbers(module: Any, numbers: Mapping[str, Tensor], prog_bar: Collection[str] = ()) -> None:
    """Log the numbers of an iteration as `LightningModule.log_dict` does, 30 times as fast.

    `log_dict` inspects signatures and moves a torchmetrics object for each number: 35 ms for the
    70 numbers of an iteration of the quickstart, against 1 ms here (2 cores, Zen 4). Only new names
    and the first number, which resets what an earlier epoch left, go through `log`.

    Names of this hook's last call that are missing now are not logged. `log_dict` would repeat
    their old numbers; the trainer's `callback_metrics`, by which callbacks monitor, keep them. A
    progress bar of Lightning shows `prog_bar`.
    """
    hook, results = private(module, "_current_fx_name"), private(module.trainer, "_results")
    if results is not None:
        earlier = vars(results).setdefault("logged_numbers", {})  # {hook: names}
        for name in earlier.get(hook, set()) - numbers.keys():
            results.pop(f"{hook}.{name}", None)
            for shown in (module.trainer.logged_metrics, module.trainer.progress_bar_metrics):
                shown.pop(name, None)
        earlier[hook] = set(numbers)
    for position, (name, value) in enumerate(numbers.items()):
        key = f"{hook}.{name}"
        if position > 0 and results is not None and key in results:
            results.update_metrics(key, value, batch_size=1)
        else:
            module.log(name, value, prog_bar=name in prog_bar)


def count_training_batches(trainer: Any) -> int | float:
    """Return the batches of an epoch; inf if their number is unknown.

    Before training starts, the loader that this sets up is dropped again: Lightning loads the
    position of a resumed run only into a loader that it sets up afterwards.
    """
    is_training = private(trainer.fit_loop, "_combined_loader") is not None
    trainer.fit_loop.setup_data()
    batches = trainer.num_training_batches
    if not is_training:
        trainer.fit_loop._combined_loader = None
    return batches


def find_training_loader(trainer: Any) -> Any:
    """Return the training loader that was passed to `fit`, before the trainer sets it up.

    `trainer.train_dataloader` is None until `fit_loop.setup_data()`. Calling that early would lose
    the loader's position in a resumed run, which Lightning loads when it sets the loader up.
    """
    return private(trainer.fit_loop, "_data_source").dataloader()


def ignore_harmless_warnings() -> None:
    """Ignore warnings of Lightning that appear in every run and ask nothing of the user."""
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message)


def remove_stock_progress_bar(trainer: Any) -> bool:
    """Remove Lightning's own progress bar, which counts the batches of an epoch.

    Called from `configure_callbacks`, when the trainer's list may still change. Subclasses of the
    two stock bars, and other bars, stay. Returns True if there was one.
    """
    # Exact types: a subclass was written on purpose.
    stock = [
        callback
        for callback in trainer.callbacks
        if type(callback) in (TQDMProgressBar, RichProgressBar)
    ]
    for bar in stock:
        trainer.callbacks.remove(bar)
    return bool(stock)
