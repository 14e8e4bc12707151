"""Checks of settings: one sentence with what was given and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module
from typing import Any


def require(condition: bool, message: str) -> None:
    """Refuse what a user gave.

    Raises:
        ValueError: with this message, if the condition does not hold.
    """
    if not condition:
        raise ValueError(message)


def at_least(name: str, value: float | None, least: float) -> None:
    """Refuse a number below `least`; None passes, as a setting that is not given."""
    require(value is None or value >= least, f"{name} is {value}; it must be at least {least}.")


def at_most(name: str, value: float | None, most: float) -> None:
    """Refuse a number above `most`; None passes."""
    require(value is None or value <= most, f"{name} is {value}; it must be at most {most}.")


def above(name: str, value: float | None, bound: float) -> None:
    """Refuse a number that is not above `bound`; None passes, NaN does not."""
    require(value is None or value > bound, f"{name} is {value}; it must be above {bound}.")


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Refuse a value that is not among the allowed ones."""
    known = list(allowed)
    listed = ", ".join(map(str, known))
    require(value in known, f"{name} is {value!r}; it must be one of: {listed}.")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` with the nearest known word, or nothing if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def import_by_path(path: str) -> Any:
    """What an import path such as `package.module.name` names.

    Raises:
        ValueError: it is no such path, its module cannot be imported, or has no such name.
    """
    module_path, _, name = path.rpartition(".")
    words = path.split(".")
    require(
        len(words) > 1 and all(word.isidentifier() for word in words),
        f"{path!r} is not an import path such as 'package.module.name'",
    )
    try:
        module = import_module(module_path)
    except ImportError as error:
        raise ValueError(f"cannot import module {module_path!r} of {path!r} ({error})") from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise ValueError(f"module {module_path!r} has no {name!r}") from error
