"""From an import path to a reward function, and what it wants to be given."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

SHIPPED = [
    f"litgrpo.rewards.library.{name}"
    for name in (
        "math",
        "format",
        "length",
        "reasoning",
        "quality",
        "dialogue",
        "diversity",
        "safety",
        "verify",
    )
]


def resolved(
    name: str, given: str | Callable[..., Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """The function of a part, imported if it is a path, and with kwargs that fit it.

    Raises:
        ValueError: there is no such function, or it does not take the kwargs.
    """
    function = _imported(name, given) if isinstance(given, str) else given
    if inspect.isclass(function) or not callable(function):
        raise ValueError(f"reward '{name}' must be a function, got {given!r}")
    named, takes_all = parameters(function)
    unknown = [] if takes_all else [key for key in kwargs if key not in named]
    if unknown:
        allowed = [key for key in named if key not in ("prompts", "completions")]
        raise ValueError(
            f"reward '{name}' has no argument '{unknown[0]}'{nearest(unknown[0], allowed)};"
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


def _imported(name: str, path: str) -> Callable[..., Any]:
    """What an import path names; the error says what was not found and what is near it."""
    module_path, _, attribute = path.rpartition(".")
    if not module_path or not all(word.isidentifier() for word in path.split(".")):
        raise ValueError(
            f"reward '{name}': '{path}' is not an import path such as"
            f" 'litgrpo.rewards.library.math.correctness'{nearest(path, _shipped())}"
        )
    try:
        module = import_module(module_path)
    except ImportError as error:
        # A module of that path exists but itself imports something that does not.
        own = isinstance(error, ModuleNotFoundError) and (module_path + ".").startswith(
            f"{error.name}."
        )
        hint = nearest(path, _shipped()) if own else ""
        raise ValueError(
            f"reward '{name}': cannot import module '{module_path}' of '{path}' ({error}){hint}"
        ) from error
    if attribute not in vars(module):
        hint = nearest(attribute, _functions(module))
        raise ValueError(f"reward '{name}': module '{module_path}' has no '{attribute}'{hint}")
    return vars(module)[attribute]  # type: ignore[no-any-return]


def _functions(module: ModuleType) -> list[str]:
    """Names of the public functions that a module defines."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
    ]


def _shipped() -> list[str]:
    return [f"{path}.{name}" for path in SHIPPED for name in _functions(import_module(path))]


def nearest(word: str, known: Sequence[str]) -> str:
    """` (did you mean 'x'?)`, compared by the last component, or nothing if nothing is near."""
    by_end = {path.rpartition(".")[2]: path for path in known}
    near = difflib.get_close_matches(word.rpartition(".")[2], by_end, n=1)
    return f" (did you mean '{by_end[near[0]]}'?)" if near else ""
