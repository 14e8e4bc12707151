"""Construct environments and sources from `class_path` and `init_args` of a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from litgrpo import PUBLIC
from litgrpo.arguments import did_you_mean, import_by_path, require

OBJECT_KEYS = ("class_path", "init_args", "dict_kwargs")


def instantiate_environment(environment: Any) -> Any:
    """Return the environment that a recipe or a Python caller gives.

    It may be an object, the import path of a class that takes no arguments, or
    {class_path, init_args}. Any object may be an environment. So the command line's parser does not
    check the class, and leaves one that it could not construct as it was written, without an error.
    It is constructed here, where the error of the class is raised.
    """
    if isinstance(environment, str):
        environment = {"class_path": environment}
    if isinstance(environment, Namespace | list | Mapping):
        require(
            "class_path" in environment,
            f"environment is {environment!r:.80}, without class_path. A config override that "
            "changes its arguments names the class again: environment: {class_path: ..., "
            "init_args: ...}.",
        )
    return instantiate_class(environment, "environment")


def instantiate_class(node: Any, role: str) -> Any:
    """Construct the object of {class_path, init_args}; return anything else unchanged.

    `role` says in messages what the object is.
    """
    settings = node.as_dict() if isinstance(node, Namespace) else node
    if not (isinstance(settings, Mapping) and "class_path" in settings):
        return node
    path = str(settings["class_path"])
    arguments = {name: value for name, value in settings.items() if name not in OBJECT_KEYS}
    arguments |= settings.get("init_args") or {}
    try:
        kind = import_by_path(f"{PUBLIC[path]}.{path}" if path in PUBLIC else path)
    except ValueError as error:
        raise ValueError(f"{role}: {error}") from error
    require(inspect.isclass(kind), f"{role} {path} is not a class, but {kind!r:.80}")
    parameters = list(inspect.signature(kind).parameters)
    unknown = [key for key in arguments if key not in parameters]
    if unknown:
        raise ValueError(
            f"{role} {path} has no argument {unknown[0]!r}{did_you_mean(unknown[0], parameters)}; "
            f"it takes {', '.join(parameters) or 'none'}."
        )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "init_args")
    try:
        parsed = parser.parse_object({"init_args": arguments})
    except ArgumentError as error:
        raise ValueError(f"{role} {path}: {' '.join(str(error).split())}") from error
    return parser.instantiate(parsed).init_args
