"""From an import path to a reward function, and what it wants to be given."""

from __future__ import annotations

import difflib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from litgrpo.arguments import did_you_mean, import_by_path, require
from litgrpo.rewards.public import FUNCTIONS

log = logging.getLogger(__name__)

SHIPPED = [f"litgrpo.rewards.{module}" for module in FUNCTIONS]
PUBLIC = {name: f"litgrpo.rewards.{name}" for names in FUNCTIONS.values() for name in names}


def resolved(
    name: str, given: str | Callable[..., Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """The function of a part, imported if it is a path, and with kwargs that fit it.

    Raises:
        ValueError: there is no such function, or it does not take the kwargs.
    """
    function = _imported(name, given) if isinstance(given, str) else given
    require(
        callable(function) and not inspect.isclass(function),
        f"reward '{name}' must be a function, got {given!r}",
    )
    named, takes_all = parameters(function)
    unknown = [key for key in kwargs if not takes_all and key not in named]
    if unknown:
        allowed = [key for key in named if key not in ("prompts", "completions")]
        raise ValueError(
            f"reward '{name}' has no argument '{unknown[0]}'{did_you_mean(unknown[0], allowed)};"
            f" it takes {', '.join(allowed) or 'none'}"
        )
    return function


def parameters(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """{parameter given by name: whether it is required}, and whether there is a `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    named = {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _imported(name: str, path: str) -> Any:
    """What an import path names; the error says what was not found and what is near it."""
    try:
        return import_by_path(path)
    except ValueError as error:
        module_path, _, word = path.rpartition(".")
        own = _functions(module_path) if module_path not in SHIPPED else []
        known = {one: f"{module_path}.{one}" for one in own}
        if not known and module_path.partition(".")[0] in ("", "litgrpo"):  # else it would mislead
            known = PUBLIC
        near = difflib.get_close_matches(word, known, n=1)
        hint = f" (did you mean {known[near[0]]!r}?)" if near else ""
        raise ValueError(f"reward '{name}': {error}{hint}") from error


def _functions(module_path: str) -> list[str]:
    """Names of the public functions that a module defines; none if it is not imported."""
    members = inspect.getmembers(sys.modules.get(module_path), inspect.isfunction)
    return [name for name, value in members if value.__module__ == module_path and name[0] != "_"]
