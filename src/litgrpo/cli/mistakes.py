"""The option at which a parse failed, in one line with the nearest valid option.

jsonargparse names a wrong option inside a tree of every type that it tried. Instead of reading that
text, the merged settings are checked from the top, one option at a time, as soon as a parse failed.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from litgrpo.argument_types import (
    UNSET,
    classes_in,
    default_class,
    find_class,
    members,
    subclasses,
    values_of_mapping,
)
from litgrpo.arguments import import_by_path, nearest
from litgrpo.callbacks.trainer_options import describe_rejected_callback
from litgrpo.cli.options import (
    Option,
    find_option,
    options_of,
    takes_any_option,
    takes_text,
    type_name,
)
from litgrpo.cli.recipes import OBJECT_KEYS, with_init_args
from litgrpo.foreign_names import OTHER_NAMES, REMARKS, note_on

RECIPE_OPTIONS = (
    "model",
    "data",
    "trainer",
    "checkpoint",
    "run_dir",
    "ckpt_path",
    "seed_everything",
)
MOST_LISTED = 20
MOST_LEVELS = 4  # of options in options, in which a name is looked up
MISSING = "missing: "
NEAR = 0.8  # least similarity, of difflib, of a typing mistake


def find_mistake(settings: Mapping[str, Any], options: Mapping[str, Option]) -> str:
    """Return what is wrong with the first wrong option, in one line; "" if nothing is found.

    Args:
        settings: of recipes and command line; `init_args` left out.
        options: {name: option} without parts; sections such as `model` have a class as type.
    """
    unknown = [
        unknown_option(".".join([key, *first_path(value)]), options)
        for key, value in settings.items()
        if key not in options
    ]
    wrong = [
        mistake_in(options[key], value, options)
        for key, value in settings.items()
        if key in options
    ]
    mistakes = filter(None, [*unknown, *wrong])
    # What is missing may have been given in the wrong place, so that is reported last.
    return next(iter(sorted(mistakes, key=lambda mistake: mistake.startswith(MISSING))), "")


def first_path(value: Any) -> list[str]:
    """Return the keys down to the first leaf of nested mappings."""
    path = []
    while isinstance(value, Mapping) and value:
        path.append(str(next(iter(value))))
        value = value[path[-1]]
    return path


def mistake_in(option: Option, value: Any, top: Mapping[str, Option]) -> str:
    """Return what is wrong with an option's value or with an option below it; "" if nothing is.

    Args:
        option: the option.
        value: plain, as in the merged settings.
        top: {name: option} of the command, for suggestions.
    """
    classes = classes_in(option.hint)
    # Where null is not an option of an object, it takes back what a recipe sets.
    is_taken_back = value is None and (classes or callable_hint(option.hint))
    if is_taken_back or option.hint in (Any, object, UNSET):
        return ""
    values = values_of_mapping(option.hint)
    if isinstance(value, Mapping) and classes and (values is UNSET or "class_path" in value):
        return mistake_in_object(option, value, classes, top)
    if isinstance(value, Mapping) and values is not UNSET:
        inner = (
            mistake_in_value(Option(f"{option.key}.{name}", values, UNSET, ""), item)
            if item is None
            else mistake_in(Option(f"{option.key}.{name}", values, UNSET, ""), item, top)
            for name, item in value.items()
        )
        return next(filter(None, inner), "") or mistake_in_value(option, value)
    if isinstance(value, Mapping) and "class_path" in value:
        return mistake_in_object(option, value, [], top)
    if isinstance(value, str) and classes and not takes_text(option.hint, value):
        mistake = unknown_class(option, value, classes)
        mistake = mistake or mistake_in_object(option, {"class_path": value}, classes, top)
        return mistake or mistake_in_value(option, value)
    return mistake_in_value(option, value)


def mistake_in_object(
    option: Option, value: Mapping[str, Any], classes: Sequence[type], top: Mapping[str, Option]
) -> str:
    """Return what is wrong with the settings of an object; "" if nothing is."""
    class_path = value.get("class_path")
    if class_path is not None and (mistake := unknown_class(option, str(class_path), classes)):
        return mistake
    default = option.default
    owner = (
        default_class(default, classes)
        if class_path is None
        else find_class(str(class_path), classes)
    )
    is_named = class_path is not None or isinstance(default, owner) or default is owner
    if not is_named and (inspect.isabstract(owner) or callable_hint(option.hint)):
        names = ", ".join(sorted(kind.__name__ for kind in subclasses(owner)))
        return (
            f"{option.key} has options but no class: give --{option.key} CLASS "
            f"(in a recipe: class_path), with CLASS one of {names}"
        )
    known_options = options_of(owner, option.key)
    for name, inner in value.items():
        if name in known_options:
            mistake = mistake_in(known_options[name], inner, top)
        elif name in OBJECT_KEYS or takes_any_option(owner):
            continue
        else:
            mistake = unknown_option_of(option.key, str(name), owner, top)
        if mistake:
            return mistake
    required = {name: inner.key for name, inner in known_options.items() if inner.default is UNSET}
    missing = [key for name, key in required.items() if value.get(name) is None]
    # A factory, such as of an optimizer, gets its required arguments later.
    if missing and "dict_kwargs" not in value and not callable_hint(option.hint):
        hint = "; give a recipe, such as -c quickstart" if option.key == "model" else ""
        return f"{MISSING}{', '.join(missing)} (of {owner.__name__}){hint}"
    return refusal_of(option, owner, value)


def refusal_of(option: Option, owner: type, value: Mapping[str, Any]) -> str:
    """Return why a reward class or a setting group rejects its settings; "" if it does not."""
    if callable_hint(option.hint) and not classes_in(option.hint):
        arguments = {name: inner for name, inner in value.items() if name != "class_path"}
        try:
            parser = ArgumentParser(exit_on_error=False)
            parser.add_class_arguments(owner, "value")
            parser.instantiate(parser.parse_object({"value": arguments}))
        except (ValueError, ImportError, ArgumentError) as error:  # others are bugs
            return f"{option.key}: {root_cause(error)}"
    return ""


def callable_hint(hint: Any) -> bool:
    """Return True if a type allows a function."""
    return any("Callable" in str(member) for member in members(hint))


def mistake_in_value(option: Option, value: Any) -> str:
    """Return what is expected of a value that the parser rejects; "" if it is accepted."""
    if option.key == "trainer.callbacks" and (rejected := describe_rejected_callback(value)):
        return rejected
    if is_accepted(option.hint, value):
        return ""
    if isinstance(value, str) and isinstance(option.default, FunctionType):
        return unknown_function(option, value)
    if isinstance(value, str) and callable_hint(option.hint) and "." in value:
        try:
            import_by_path(value)
        except ValueError as error:
            return f"{option.key}: {error}"
    near = suggest_value(option, value)
    return f"{option.key} is {as_written(value)}, expected {type_name(option.hint)}" + (
        f": did you mean {near}?" if near else ""
    )


def is_accepted(hint: Any, value: Any) -> bool:
    """Return True if the parser accepts a value of a type, or does not know the type."""
    if hint in (Any, object, UNSET):
        return True
    if classes_in(hint) == [hint] and not isinstance(value, Mapping | str):
        return isinstance(value, hint)  # the parser takes a number for an empty group of options
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=hint)
    except ValueError:  # a type that only a class argument may have
        return True
    try:
        parser.parse_object({"value": with_init_args(value)})
    except (ArgumentError, TypeError, ValueError):
        return False
    return True


def suggest_value(option: Option, value: Any) -> str:
    """Return how to write a value that is meant for an option below, or for a list; else ""."""
    if isinstance(value, Mapping | list) or value is None:
        return ""
    if isinstance(value, bool):
        near = "{}" if value else "null"
        return near if is_accepted(option.hint, yaml.safe_load(near)) else ""
    kinds = [get_origin(member) for member in members(option.hint)]
    if {list, tuple, Sequence} & {*kinds} and is_accepted(option.hint, [value]):
        return f"[{as_written(value)}]"
    classes = classes_in(option.hint)
    below = options_of(default_class(option.default, classes)) if classes else {}
    for name, inner in below.items():
        plain = not isinstance(value, str) and not classes_in(inner.hint)
        if plain and is_accepted(inner.hint, value) and is_accepted(option.hint, {name: value}):
            return f"{{{name}: {value}}}"
    return ""


def as_written(value: Any) -> str:
    """Return a value as YAML writes it.

    Example:
        >>> as_written(None), as_written(True), as_written("a"), as_written([1])
        ('null', 'true', "'a'", '[1]')
    """
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def unknown_class(option: Option, name: str, classes: Sequence[type]) -> str:
    """Return that there is no such name or class and which there are; "" if it exists."""
    try:
        find_class(name, classes)
    except ValueError as error:
        names = [name for hint in members(option.hint) for name in get_args(hint)]
        listed_names = ", ".join(name for name in names if isinstance(name, str))
        return f"{option.key}: {error}" + (listed_names and f"; or a name: {listed_names}")
    return ""


def unknown_function(option: Option, name: str) -> str:
    """Return how a function is given, with the nearest of those beside the default."""
    module = option.default.__module__
    functions = inspect.getmembers(import_by_path(module), inspect.isfunction)
    function_names = [
        function_name
        for function_name, f in functions
        if f.__module__ == module and not function_name.startswith("_")
    ]
    near = nearest(name, function_names) or option.default.__name__
    return (
        f"{option.key} is {name!r}; a function is given by its import path: {module}.{near} "
        f"(functions there: {', '.join(function_names)})"
    )


def unknown_option(key: str, top: Mapping[str, Option]) -> str:
    """Return that there is no such option at the top, and what to use instead."""
    unknown, top_names = f"unknown option {key!r}", list(top)
    first, name = key.partition(".")[0], key.rpartition(".")[2]
    is_recipe = "model" in top
    if is_recipe and name in REMARKS:
        return f"{unknown}; in litgrpo: {REMARKS[name]}"
    if is_recipe and (other := other_name(key, top) or find_name(name, top)):
        return f"{unknown}: use {other!r}{note_on(name)}"
    if not is_recipe and first in RECIPE_OPTIONS:
        if "fit_options" in top_names:
            return f"{unknown}: 'fit' takes it; pass it as --fit_options='[\"--{key}\", \"VALUE\"]'"
        return f"{unknown}: 'fit' takes it; options here: {', '.join(top_names)}"
    near = nearest(first, top_names)
    return unknown + (f": did you mean {near!r}?" if near else "; see --help")


def unknown_option_of(key: str, name: str, owner: type, top: Mapping[str, Option]) -> str:
    """Return that an object has no such option, and the nearest that it has.

    Args:
        key: of the object.
        name: of the option.
        owner: class of the object.
        top: {name: option} without parts.
    """
    unknown = f"unknown option {f'{key}.{name}'!r} (of {owner.__name__})"
    option_names = list(options_of(owner))
    if name in REMARKS:
        return f"{unknown}; in litgrpo: {REMARKS[name]}"
    if name in top:
        return f"{unknown}: {name!r} stands at the top of a recipe, not below {key!r}"
    other = other_name(f"{key}.{name}", top)
    if other and other != f"{key}.{name}":  # before names that only look alike
        return f"{unknown}: use {other!r}{note_on(name)}"
    near, elsewhere = nearest(name, option_names), find_name(name, top)
    is_typo = near.startswith(name) or difflib.get_close_matches(name, [near], 1, NEAR)
    if elsewhere and not is_typo:
        return f"{unknown}: use {elsewhere!r}"
    if near:
        return f"{unknown}: did you mean {f'{key}.{near}'!r}?"
    return f"{unknown}: it takes {', '.join(option_names[:MOST_LISTED])}"


def find_name(name: str, top: Mapping[str, Option]) -> str:
    """Return the option of this name with the fewest levels above it; "" if there is none."""
    level = [option for option in top.values() if classes_in(option.hint)]
    for _ in range(MOST_LEVELS):
        below = [
            inner
            for option in level
            for inner in options_of(
                default_class(option.default, classes_in(option.hint)), option.key
            ).values()
        ]
        matching = [inner.key for inner in below if inner.key.rpartition(".")[2] == name]
        if matching:
            return matching[0]
        # Below options of other libraries' classes, such as torch's optimizers, names are theirs.
        level = [
            inner
            for inner in below
            if any(c.__module__.startswith("litgrpo.") for c in classes_in(inner.hint))
        ]
    return ""


def exists(key: str, top: Mapping[str, Option]) -> bool:
    """Return True if a dotted name is an option of the command, with its model and data."""
    first, _, rest = key.partition(".")
    if first not in top or not rest:
        return first in top
    try:
        return bool(find_option(key, {first: top[first].hint}))
    except ValueError:
        return False


def other_name(key: str, top: Mapping[str, Option] | None = None) -> str:
    """Return the name in litgrpo of an option of TRL, verl or transformers; "" if it is none.

    Args:
        key: the option.
        top: {name: option} of the command, which has the option; None: of any command.
    """
    parts = key.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    names = (OTHER_NAMES[end] for end in ends if end in OTHER_NAMES)
    return next((name for name in names if top is None or exists(name, top)), "")


def last_line(message: str) -> str:
    """Return the last line of a message of the parser that is not about the given value."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    # That null was tried as well says nothing.
    lines = [line for line in lines if line and "NoneType" not in line]
    lines = [line for line in lines if not line.startswith("Given value")]
    return (lines or [" ".join(message.split())])[-1]


def root_cause(error: BaseException) -> str:
    """Return the message of the exception that an error was raised from, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__
