"""An environment, or a source of a set with a name, from what a recipe gives."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from litgrpo.arguments import did_you_mean, import_by_path, require


def given_environment(given: Any) -> Any:
    """The environment that is given.

    Any object may be one, so the command line leaves a class that it could not make as it was
    written, and keeps to itself why: here it is made, so that the class itself says it.

    Args:
        given: an object; or the import path of a class that takes no arguments; or
            {class_path, init_args}.

    Raises:
        ValueError: there is no such class, or it refuses its arguments.
    """
    if isinstance(given, str):
        return import_by_path(given)()
    keys = [*vars(given)] if isinstance(given, Namespace) else given
    nameless = isinstance(keys, list | Mapping) and "class_path" not in keys
    require(
        not nameless,
        f"environment is {given!r:.80}, without class_path. An overlay that changes its arguments "
        "names the class again: environment: {class_path: ..., init_args: ...}.",
    )
    return made(given, "environment")


def given_sets(given: Any) -> Any:
    """The sources of sets with names, of which some may be {class_path, init_args}; else `given`.

    Raises:
        ValueError: there is no such class, or it refuses its arguments.
    """
    if not isinstance(given, Mapping):
        return given
    return {
        name: [made(one, f"set {name!r}:") for one in source]
        if isinstance(source, list)
        else made(source, f"set {name!r}:")
        for name, source in given.items()
    }


def made(given: Any, what: str) -> Any:
    """The object of {class_path, init_args}; anything else as it is.

    Args:
        given: what a recipe holds.
        what: it is, for messages.

    Raises:
        ValueError: there is no such class, or it refuses its arguments.
    """
    settings = given.as_dict() if isinstance(given, Namespace) else given
    if not (isinstance(settings, Mapping) and "class_path" in settings):
        return given
    path, arguments = settings["class_path"], settings.get("init_args") or {}
    kind = import_by_path(path)
    known = list(inspect.signature(kind).parameters)
    unknown = [key for key in arguments if key not in known]
    first = "".join(unknown[:1])
    hint = f"{did_you_mean(first, known)}; it takes {', '.join(known) or 'none'}."
    require(not unknown, f"{what} {path} has no argument '{first}'{hint}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "init_args")
    try:
        parsed = parser.parse_object({"init_args": arguments})
    except ArgumentError as error:
        raise ValueError(f"{what} {path}: {' '.join(str(error).split())}") from error
    return parser.instantiate(parsed).init_args
