"""A resumed run keeps its moments; optimizer and schedule are set by the recipe."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Callback, Trainer

from litgrpo.arguments import require
from litgrpo.distributed.messages import rank_zero_info

KEY = "optimizers"
PARAMS = "params"


class RecipeSettings(Callback):
    """Lets the recipe say how a resumed run goes on learning.

    Lightning restores an optimizer with its learning rate, weight decay and so on, and a schedule
    with its length. Here moments alone come from the checkpoint. Every option of every parameter
    group is the recipe's; the recipe's schedule is stepped to where the run stands, so that it goes
    on as if the run had had it from the start. The state of another class of optimizer means
    nothing to this one, which then begins anew, and says so.
    """

    def __init__(self) -> None:
        """Nothing is resumed yet."""
        self.checkpoint: dict[str, Any] = {}
        self.fresh: list[list[dict[str, Any]]] = []

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Note the optimizers' classes."""
        checkpoint[KEY] = classes_of(trainer)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Keep Lightning from restoring schedules; see `on_train_start`."""
        if trainer.state.fn == "fit":
            self.checkpoint = checkpoint
            checkpoint["lr_schedulers"] = []
            self._drop_what_is_foreign(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Note the recipe's options, as no checkpoint has changed them."""
        self.fresh = [options_of(optimizer) for optimizer in trainer.optimizers]
        self._drop_what_is_foreign(trainer)

    def _drop_what_is_foreign(self, trainer: Trainer) -> None:
        """Once both are known, whichever came first: the recipe's optimizer and the state."""
        if not (self.checkpoint and self.fresh):
            return
        ours = classes_of(trainer)
        theirs = self.checkpoint.get(KEY, ours)  # files of earlier versions do not tell
        if ours != theirs:
            rank_zero_info(
                f"The checkpoint's optimizer is {', '.join(map(_name, theirs))}, the recipe's "
                f"{', '.join(map(_name, ours))}: its state (moments) begins anew."
            )
            self.checkpoint["optimizer_states"] = []
        for state, groups in zip(self.checkpoint["optimizer_states"], self.fresh, strict=False):
            check_groups(state["param_groups"], groups)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Put the recipe's options back, and step its schedules to the run's position."""
        if not self.checkpoint:
            return
        stored, fresh = self.checkpoint["optimizer_states"], self.fresh
        self.checkpoint, self.fresh = {}, []
        for optimizer, groups in zip(trainer.optimizers, fresh, strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                params = group[PARAMS]
                group.clear()
                group.update(options, **{PARAMS: params})
        for config in trainer.lr_scheduler_configs:
            advance(config.scheduler, trainer.global_step)
        for optimizer, state in zip(trainer.optimizers, stored, strict=False):
            say_what_differs(state["param_groups"], options_of(optimizer))


def classes_of(trainer: Any) -> list[str]:
    """Import paths of the optimizers' classes."""
    kinds = [type(optimizer) for optimizer in trainer.optimizers]
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """What each parameter group says besides its parameters."""
    groups = optimizer.param_groups
    return [{name: value for name, value in g.items() if name != PARAMS} for g in groups]


def advance(scheduler: Any, steps: int) -> None:
    """Step a new schedule so many times, as a run would have.

    Raises:
        ValueError: it is shorter than that.
    """
    with warnings.catch_warnings():
        # It asks for an optimizer step before the first of its own.
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step")
        try:
            for _ in range(steps):
                scheduler.step()
        except ValueError as error:
            raise ValueError(
                f"lr_scheduler {type(scheduler).__name__} cannot be where this run is, after "
                f"{steps} optimizer steps: {error}. Give it a length beyond that."
            ) from error


def check_groups(stored: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Refuse an optimizer that divides the parameters into another number of groups.

    Raises:
        ValueError: it does.
    """
    require(
        len(stored) == len(groups),
        f"The checkpoint's optimizer has {len(stored)} groups of parameters, the recipe's "
        f"{len(groups)}: give the optimizer that it was made with.",
    )


def say_what_differs(stored: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """One line where the recipe changes what the checkpoint's optimizer had."""
    changes = {
        f"{name} {before.get(name)} -> {now[name]}": None
        for before, now in zip(stored, groups, strict=True)
        for name in now
        if before.get(name) != now[name]
    }
    if changes:
        rank_zero_info(f"The optimizer now, by the recipe: {', '.join(changes)}")


def _name(path: str) -> str:
    return path.rpartition(".")[2]
