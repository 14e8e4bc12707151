"""Hooks in which litgrpo's modules do part of their work: a subclass extends them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# Lightning's own are empty, so users of Lightning override them without a call of super().
HOOKS = (
    "configure_callbacks",
    "configure_model",
    "on_before_optimizer_step",
    "on_fit_start",
    "on_load_checkpoint",
    "on_save_checkpoint",
    "on_test_epoch_end",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_start",
    "on_validation_epoch_end",
    "setup",
    "teardown",
)


def check_super_is_called(kind: type) -> None:
    """Let each hook of a class raise an error if litgrpo's hook of this name did not run in it."""
    for name in HOOKS:
        owner = next(base for base in kind.__mro__ if name in vars(base))
        hook = vars(owner)[name]
        if owner is kind and _is_own(kind):
            setattr(kind, name, _record(hook, name))
        if _is_own(owner) or hasattr(hook, "is_checked"):
            continue
        if any(_is_own(base) and name in vars(base) for base in kind.__mro__):
            setattr(kind, name, _check(hook, name))


def _is_own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "litgrpo"


def _record(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(hook)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.hooks_that_ran.add(name)
        return hook(self, *args, **kwargs)

    return recorded


def _check(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(hook)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.hooks_that_ran.discard(name)
        result = hook(self, *args, **kwargs)
        if name not in self.hooks_that_ran:
            raise RuntimeError(
                f"{type(self).__name__}.{name} replaces part of the training: call "
                f"super().{name}(...) in it."
            )
        return result

    checked.is_checked = True  # type: ignore[attr-defined]
    return checked
