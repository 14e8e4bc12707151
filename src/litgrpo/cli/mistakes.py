"""The option at which a parse failed, in one line with the nearest valid option.

jsonargparse names a wrong option inside a tree of every type that it tried. Instead of reading that
text, the settings are checked again from the top, one option at a time, as soon as a parse failed.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from types import FunctionType
from typing import Any, get_args

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from litgrpo.argument_types import (
    UNSET,
    classes_in,
    find_class,
    members,
    nearest,
    subclasses,
    values_of_mapping,
)
from litgrpo.arguments import import_by_path
from litgrpo.callbacks.trainer_options import describe_rejected_callback
from litgrpo.cli.options import (
    Option,
    is_list_of_texts,
    is_text,
    options_of,
    takes_any_option,
    type_name,
)
from litgrpo.cli.recipes import OBJECT_KEYS, describe, without_init_args
from litgrpo.foreign_names import other_name
from litgrpo.text.yaml_limits import check_limits

# {option of another command: that command}
OTHER_COMMANDS = {
    **dict.fromkeys(("chip", "chips", "model_config"), "plan"),
    **dict.fromkeys(
        ("problems", "limit", "success_reward", "success_threshold", "answer_format"), "audit"
    ),
    **dict.fromkeys(("algorithms", "tokens", "seeds", "jobs", "fit_options"), "compare"),
}
RECIPE_OPTIONS = (
    "model",
    "data",
    "trainer",
    "checkpoint",
    "run_dir",
    "ckpt_path",
    "seed_everything",
)
PENALTY = (
    "penalties change the distribution that is sampled, and the gradient assumes the policy's own. "
    "In training use the reward litgrpo.rewards.repetition; for text of a trained model give the "
    "penalty to transformers' generate on final_model"
)
LEFT_OUT = ("repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram_size")
MOST_LISTED = 20


def find_mistake(
    settings: Mapping[str, Any], roots: Mapping[str, type], others: Collection[str]
) -> str:
    """Return what is wrong with the first wrong option, in one line; "" if nothing is found.

    Args:
        settings: of recipes and command line; `init_args` left out.
        roots: {first part of an option: class that takes the rest}.
        others: options without parts.
    """
    for key, value in settings.items():
        found = ""
        if key in roots:
            root = Option(key, roots[key], UNSET, "")
            found = mistake_in(root, value)
        elif key not in others:
            whole = ".".join([key, *first_path(value)])
            found = unknown_option(whole, [*others, *roots], recipe="model" in roots)
        if found:
            return found
    return ""


def first_path(value: Any) -> list[str]:
    """Return the keys down to the first leaf of nested mappings."""
    path = []
    while isinstance(value, Mapping) and value:
        path.append(str(next(iter(value))))
        value = value[path[-1]]
    return path


def mistake_in(option: Option, value: Any) -> str:
    """Return what is wrong with an option's value or with an option below it; "" if nothing is."""
    value, problem = read_nested(option, value)
    if problem or value is None or option.hint in (Any, object, UNSET):
        return problem
    classes = classes_in(option.hint)
    values = values_of_mapping(option.hint)
    if isinstance(value, Mapping) and classes and (values is UNSET or "class_path" in value):
        return mistake_in_object(option, value, classes)
    if isinstance(value, Mapping) and values is not UNSET:
        inner = (
            mistake_in(Option(f"{option.key}.{name}", values, UNSET, ""), each)
            for name, each in value.items()
        )
        return next(filter(None, inner), "") or mistake_in_value(option, value)
    if isinstance(value, Mapping) and "class_path" in value:
        return mistake_in_object(option, value, [])
    takes_text = any(each is str or value in get_args(each) for each in members(option.hint))
    if isinstance(value, str) and classes and not takes_text:
        return unknown_class(option, value, classes) or mistake_in_value(option, value)
    return mistake_in_value(option, value)


def read_nested(option: Option, value: Any) -> tuple[Any, str]:
    """Return a value with lists and mappings read from YAML, and what is wrong with the YAML."""
    takes_text = is_text(option.hint) or is_list_of_texts(option.hint)
    if takes_text or not isinstance(value, str) or value[:1] not in ("{", "["):
        return value, ""
    try:
        check_limits(value)
        return without_init_args(yaml.safe_load(value)), ""
    except (yaml.YAMLError, ValueError, TypeError) as error:
        return value, f"{option.key} is not valid YAML: {describe(error)}"


def mistake_in_object(option: Option, value: Mapping[str, Any], classes: Sequence[type]) -> str:
    """Return what is wrong with the settings of an object; "" if nothing is."""
    named = value.get("class_path")
    if named is not None and (found := unknown_class(option, str(named), classes)):
        return found
    owner = find_class(str(named), classes) if named is not None else default_class(option, classes)
    if named is None and inspect.isabstract(owner):
        known = ", ".join(sorted(each.__name__ for each in subclasses(owner)))
        return (
            f"{option.key} has options but no class: give --{option.key} CLASS before them "
            f"(in a recipe: class_path), with CLASS one of {known}"
        )
    known_options = options_of(owner, option.key)
    for name, each in value.items():
        plain_name = str(name).removesuffix("+")  # `key+` appends to a list
        if plain_name in known_options:
            found = mistake_in(known_options[plain_name], each)
        elif plain_name in OBJECT_KEYS or takes_any_option(owner):
            continue
        else:
            found = unknown_option_of(option.key, plain_name, owner, list(known_options))
        if found:
            return found
    required = {name: each.key for name, each in known_options.items() if each.default is UNSET}
    missing = [key for name, key in required.items() if name not in value]
    # A factory, such as of an optimizer, gets its required arguments later.
    if missing and "dict_kwargs" not in value and not callable_hint(option.hint):
        hint = "; give a recipe, such as -c quickstart" if option.key == "model" else ""
        return f"missing: {', '.join(missing)} (of {owner.__name__}){hint}"
    return refusal_of(option, owner, value)


def default_class(option: Option, classes: Sequence[type]) -> type:
    """Return the class of an option's default, or the first that its type names."""
    default = option.default if inspect.isclass(option.default) else type(option.default)
    return default if any(issubclass(default, each) for each in classes) else classes[0]


def refusal_of(option: Option, owner: type, value: Mapping[str, Any]) -> str:
    """Return why a reward class or a setting group rejects its settings; "" if it does not."""
    if callable_hint(option.hint) and not classes_in(option.hint):
        given = {name: each for name, each in value.items() if name != "class_path"}
        try:
            parser = ArgumentParser(exit_on_error=False)
            parser.add_class_arguments(owner, "value")
            parser.instantiate(parser.parse_object({"value": given}))
        except (ValueError, ImportError, ArgumentError) as error:  # others are bugs
            return f"{option.key}: {root_cause(error)}"
    return ""


def callable_hint(hint: Any) -> bool:
    """Return True if a type allows a function."""
    return any("Callable" in str(each) for each in members(hint))


def mistake_in_value(option: Option, value: Any) -> str:
    """Return what is expected of a value that the parser rejects; "" if it is accepted."""
    if option.key == "trainer.callbacks" and (rejected := describe_rejected_callback(value)):
        return rejected
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=option.hint)
    except ValueError:  # a type that only a class argument may have
        return ""
    try:
        parser.parse_object({"value": value})
    except (ArgumentError, TypeError, ValueError) as error:
        if isinstance(option.default, FunctionType) and isinstance(value, str):
            return unknown_function(option, value)
        if classes_in(option.hint) or callable_hint(option.hint):
            return f"{option.key}: {last_line(str(error))}"
        return f"{option.key} is {value!r}, expected {type_name(option.hint)}"
    return ""


def unknown_class(option: Option, name: str, classes: Sequence[type]) -> str:
    """Return that there is no such name or class and which there are; "" if it exists."""
    try:
        find_class(name, classes)
    except ValueError as error:
        names = [each for hint in members(option.hint) for each in get_args(hint)]
        known = ", ".join(each for each in names if isinstance(each, str))
        return f"{option.key}: {error}" + (known and f"; or a name: {known}")
    return ""


def unknown_function(option: Option, name: str) -> str:
    """Return how a function is given, with the nearest of those beside the default."""
    module = option.default.__module__
    found = inspect.getmembers(import_by_path(module), inspect.isfunction)
    known = [each for each, f in found if f.__module__ == module and not each.startswith("_")]
    near = nearest(name, known) or option.default.__name__
    return (
        f"{option.key} is {name!r}; a function is given by its import path: {module}.{near} "
        f"(functions there: {', '.join(known)})"
    )


def unknown_option(key: str, known: Sequence[str], *, recipe: bool) -> str:
    """Return that there is no such option at the top, and what to use instead.

    Args:
        key: the option.
        known: every option without parts, and the first parts of the others.
        recipe: True if the command reads recipes.
    """
    unknown = f"unknown option {key!r}"
    first, last = key.partition(".")[0], key.rpartition(".")[2]
    if last in LEFT_OUT:
        return f"{unknown}: {PENALTY}"
    other = other_name(key)
    if recipe and other and other.partition(".")[0] in known:
        return f"{unknown}: use {other!r}"
    if key in OTHER_COMMANDS:
        return f"{unknown}: it belongs to {OTHER_COMMANDS[key]!r} ({OTHER_COMMANDS[key]} --help)"
    if not recipe and first in RECIPE_OPTIONS:
        if "fit_options" in known:
            return f"{unknown}: 'fit' takes it; pass it as --fit_options='[\"--{key}\", \"VALUE\"]'"
        return f"{unknown}: 'fit' takes it; options here: {', '.join(known)}"
    near = nearest(first, known)
    return unknown + (f": did you mean {near!r}?" if near else "; see --help")


def unknown_option_of(key: str, name: str, owner: type, known: Sequence[str]) -> str:
    """Return that an object has no such option, and the nearest that it has.

    Args:
        key: of the object.
        name: of the option.
        owner: class of the object.
        known: the options of that class.
    """
    unknown = f"unknown option {f'{key}.{name}'!r} (of {owner.__name__})"
    if name in LEFT_OUT:
        return f"{unknown}: {PENALTY}"
    other = other_name(f"{key}.{name}")
    if other and other != f"{key}.{name}":  # before names that only look alike
        return f"{unknown}: use {other!r}"
    if near := nearest(name, known):
        return f"{unknown}: did you mean {f'{key}.{near}'!r}?"
    return f"{unknown}: it takes {', '.join(known[:MOST_LISTED])}"


def last_line(message: str) -> str:
    """Return the last line of a message of the parser that is not about the given value."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    # That null was tried as well says nothing.
    told = [line for line in lines if line and "NoneType" not in line]
    told = [line for line in told if not line.startswith("Given value")]
    return (told or [" ".join(message.split())])[-1]


def root_cause(error: BaseException) -> str:
    """Return the message of the exception that an error was raised from, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__
