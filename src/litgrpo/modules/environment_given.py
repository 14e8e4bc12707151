"""An environment from what a recipe gives: a path, a class with its arguments, or an object."""

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
    settings = given.as_dict() if isinstance(given, Namespace) else given
    if not (isinstance(settings, Mapping) and "class_path" in settings):
        return given
    path, arguments = settings["class_path"], settings.get("init_args") or {}
    made = import_by_path(path)
    known = list(inspect.signature(made).parameters)
    unknown = [key for key in arguments if key not in known]
    first = "".join(unknown[:1])
    hint = f"{did_you_mean(first, known)}; it takes {', '.join(known) or 'none'}."
    require(not unknown, f"environment {path} has no argument '{first}'{hint}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(made, "environment")
    try:
        parsed = parser.parse_object({"environment": arguments})
    except ArgumentError as error:
        raise ValueError(f"environment {path}: {' '.join(str(error).split())}") from error
    return parser.instantiate(parsed).environment
