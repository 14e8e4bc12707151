"""Checks of settings, whose errors name the value, the allowed range and the setting."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from typing import Any

MAX_ERROR_CHARS = 300
CLOSE = 0.5  # least similarity, of difflib, of a suggestion


def require(condition: bool, message: str) -> None:
    """Raise a ValueError with a message if the condition does not hold."""
    if not condition:
        raise ValueError(message)


def at_least(name: str, value: float | None, least: float) -> None:
    """Reject a number below `least`; None passes, as a setting that is not given."""
    require(value is None or value >= least, f"{name} is {value}; it must be at least {least}.")


def at_most(name: str, value: float | None, most: float) -> None:
    """Reject a number above `most`; None passes."""
    require(value is None or value <= most, f"{name} is {value}; it must be at most {most}.")


def above(name: str, value: float | None, bound: float) -> None:
    """Reject a number that is not above `bound`; None passes, NaN does not."""
    require(value is None or value > bound, f"{name} is {value}; it must be above {bound}.")


def require_folder_of(option: str, path: str | None) -> None:
    """Reject a file to write whose folder does not exist; None passes."""
    folder = os.path.dirname(path or "") or "."
    require(os.path.isdir(folder), f"the folder {folder} of --{option} {path} does not exist")


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Reject a value that is not among the allowed ones."""
    values = list(allowed)
    listed = ", ".join(map(str, values))
    require(value in values, f"{name} is {value!r}; it must be one of: {listed}.")


def as_list(value: Any) -> list[Any]:
    """Return the value of an option that takes one or several as a list; null is the empty one."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def without_repeats(items: Iterable[Any]) -> list[Any]:
    """Return the items in their order, each once; they need not be hashable.

    Example:
        >>> without_repeats([{"a": 1}, {"b": 2}, {"a": 1}])
        [{'a': 1}, {'b': 2}]
    """
    listed = list(items)
    return [item for number, item in enumerate(listed) if item not in listed[:number]]


def type_with_article(value: object) -> str:
    """Return the name of a value's type with its article.

    Example:
        >>> type_with_article(3), type_with_article("x")
        ('an int', 'a str')
    """
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the shortest known name that begins with the name, or the most similar, or ""."""
    known = list(names)
    longer = [word for word in known if name and word.lower().startswith(name.lower())]
    similar = difflib.get_close_matches(name, known, 1, CLOSE)
    return next(iter(sorted(longer, key=len) + similar), "")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` (did you mean 'x'?)` with the nearest known name, or nothing if none is near."""
    near = nearest(name, names)
    return f" (did you mean {near!r}?)" if near else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has none.

    Example:
        >>> first_line(ValueError("no such file")), first_line(KeyError())
        ('no such file', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def summarize_error(error: BaseException) -> str:
    r"""Return type and text of an error in one line; of a group of errors, its innermost cause.

    Example:
        >>> summarize_error(ValueError("no such\nfile")), summarize_error(TimeoutError())
        ('ValueError: no such file', 'TimeoutError')
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    words = " ".join(str(error).split())[:MAX_ERROR_CHARS]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def find_page(page: str) -> str:
    """Return where a page of the documentation is: in the current folder, or in the package."""
    if os.path.isfile(page.partition("#")[0]):
        return page
    return os.path.join(os.path.dirname(__file__), page)


def import_package(module: str, install: str) -> Any:
    """Import a module of an optional dependency; the ValueError says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"{error}; `pip install {install}` installs it.") from error


def import_by_path(path: str) -> Any:
    """Import the object of a path such as `package.module.name`; ValueError if that fails."""
    module_path, _, name = path.rpartition(".")
    words = path.split(".")
    require(
        len(words) > 1 and all(word.isidentifier() for word in words),
        f"{path!r} is not an import path such as 'package.module.name'",
    )
    try:
        module = import_module(module_path)
    except (Exception, SystemExit) as error:  # a user's module may raise or exit when it is read
        why = _why_not_imported(module_path, error)
        raise ValueError(f"cannot import module {module_path!r} of {path!r} ({why})") from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        public = [word for word in dir(module) if not word.startswith("_")]
        hint = did_you_mean(name, public)
        raise ValueError(f"module {module_path!r} has no {name!r}{hint}") from error


def import_object(what: str, value: Any) -> Any:
    """Import the object of a path; return any other object unchanged.

    The message of a ValueError begins with `what` and the path.
    """
    if not isinstance(value, str):
        return value
    try:
        return import_by_path(value)
    except ValueError as error:
        raise ValueError(f"{what} {value!r}: {error}") from error


def _why_not_imported(module_path: str, error: BaseException) -> str:
    """Explain a failed import: the folders searched, or the error of the module's code."""
    missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    if missing and f"{module_path}.".startswith(f"{missing}."):
        folders = ", ".join(own_folders()) or "no folder of yours"
        return f"{error}; looked in {folders} and among installed packages; PYTHONPATH adds folders"
    what = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "<" not in frame[0]]
    user_frames = [frame for frame in frames if not frame.filename.startswith(sys.base_prefix)]
    own_code = [frame for frame in user_frames if frame.filename != __file__]
    place = [f", {frame.filename} line {frame.lineno}" for frame in own_code[-1:]]
    return "".join([" ".join(what.split()), *place])


def own_folders() -> list[str]:
    """Folders of `sys.path` that are not part of an installation, without duplicates."""
    folders = [os.path.abspath(entry) for entry in sys.path]
    installed = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(__file__)))
    return [folder for folder in dict.fromkeys(folders) if not folder.startswith(installed)]


def add_folders(folders: Iterable[str]) -> None:
    """Append folders to `sys.path`; installed packages take precedence."""
    present = {os.path.abspath(entry) for entry in sys.path}
    new = [os.path.abspath(folder) for folder in folders]
    sys.path += [folder for folder in dict.fromkeys(new) if folder not in present]
