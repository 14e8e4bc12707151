"""Options that a class or function takes: read from its signature, hints and docstring.

Shared by the help of one option (`--model.lora.help`), the reading of the command line
(`settings.py`), and the search for the option that a parse failed at (`mistakes.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from docstring_parser import parse

from litgrpo.argument_types import (
    UNSET,
    argument_hints,
    classes_in,
    members,
    subclasses,
    values_of_mapping,
)
from litgrpo.arguments import did_you_mean, require

# Kinds of parameters that can be given by name.
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Option:
    """An option, as a signature declares it.

    Args:
        key: dotted name.
        hint: its type.
        default: value if nothing is given; `inspect.Parameter.empty` if it is required.
        text: its description.
    """

    key: str
    hint: Any
    default: Any
    text: str


def options_of(owner: Any, key: str = "") -> dict[str, Option]:
    """Return {name: option} of a class or function.

    Args:
        owner: the class or function.
        key: dotted name that it is configured under.
    """
    constructor = getattr(owner, "__init__", owner) if inspect.isclass(owner) else owner
    # A dataclass takes the arguments of those that it inherits from, too.
    bases = reversed(owner.__mro__) if inspect.isclass(owner) else ()
    explained = [kind for kind in bases if dataclasses.is_dataclass(kind)] or [owner]
    documented = [
        parameter
        for part in (*explained, constructor)
        for parameter in parse(part.__doc__ or "").params
    ]
    texts = {
        parameter.arg_name: " ".join((parameter.description or "").split())
        for parameter in documented
    }
    hints = argument_hints(owner)
    factories: dict[str, Any] = {
        field.name: field.default_factory()
        if field.default_factory in (list, dict)
        # The class, which is the default as much as an object of it.
        else field.default_factory
        for field in (dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ())
        if inspect.isclass(field.default_factory)
        and field.default_factory is not type(dataclasses.MISSING)
    }
    return {
        name: Option(
            ".".join(filter(None, [key, name])),
            hints.get(name, parameter.annotation),
            factories.get(name, parameter.default),
            texts.get(name, ""),
        )
        for name, parameter in inspect.signature(owner).parameters.items()
        if parameter.kind in NAMED and name not in ("params", "self")
    }


def takes_any_option(owner: Any) -> bool:
    """Return True for a signature with `**kwargs`, whose options are not known."""
    parameters = inspect.signature(owner).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def is_text(hint: Any) -> bool:
    """Return True for a type whose values are texts, or null.

    Example:
        >>> is_text(str | None), is_text(str | int), is_text(None)
        (True, False, False)
    """
    kinds = set(members(hint))
    return str in kinds and kinds <= {str, type(None)}


def takes_text(hint: Any, text: Any) -> bool:
    """Return True if a type takes a text as it is: it takes any, or lists this one.

    Example:
        >>> takes_text(str | int, "4"), takes_text(typing.Literal["a"], "4")
        (True, False)
    """
    return any(kind is str or text in typing.get_args(kind) for kind in members(hint))


def is_list_of_texts(hint: Any) -> bool:
    """Return True for a type whose values are lists of texts, or null.

    Example:
        >>> is_list_of_texts(list[str] | None), is_list_of_texts(list[str] | str)
        (True, False)
    """
    kinds = set(members(hint)) - {type(None)}
    return bool(kinds) and kinds <= {list[str], Sequence[str]}


def find_option(key: str, roots: Mapping[str, Any]) -> Option:
    """Return the option of a dotted name.

    Args:
        key: dotted name, with or without `init_args`.
        roots: {first part of a name: type}.

    Raises:
        ValueError: there is no such option; the message has the nearest.
    """
    first, *rest = [part for part in key.split(".") if part != "init_args"]
    require(first in roots, f"unknown option {first!r}{did_you_mean(first, roots)}")
    option = Option(first, roots[first], UNSET, "")
    for part in rest:
        below: dict[str, Option] = {}
        for owner in owners_of(option):
            below = options_of(owner, option.key) | below
        if part in below:
            option = below[part]
            continue
        values = values_of_mapping(option.hint)
        allowed = f"it takes {', '.join(below)}" if below else "it has no options"
        require(
            values is not UNSET,
            f"unknown option {option.key}.{part}{did_you_mean(part, below)}: {allowed}",
        )
        option = Option(f"{option.key}.{part}", values, UNSET, option.text)
    return option


def owners_of(option: Option) -> Iterator[type]:
    """Yield the classes whose options an option has: of its default first, then of its type."""
    bases = classes_in(option.hint)
    default = option.default if inspect.isclass(option.default) else type(option.default)
    if any(issubclass(default, base) for base in bases):
        yield default
    for base in bases:
        yield base
        yield from subclasses(base)


def type_name(hint: Any) -> str:
    """Return a type as a user writes it.

    Example:
        >>> type_name(int | None), type_name(typing.Literal["a", "b"]), type_name(list[int | str])
        ('int or null', "'a' or 'b'", 'list[int or str]')
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    for special, name in ((UNSET, "any value"), (type(None), "null"), (..., "...")):
        if hint is special:
            return name
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if len(members(hint)) > 1:
        return " or ".join(dict.fromkeys(type_name(member) for member in members(hint)))
    if origin is Callable:
        return "function"
    if inspect.isclass(origin or hint):
        below = ", ".join(map(type_name, inner))
        return (origin or hint).__name__ + (f"[{below}]" if below else "")
    return str(hint).replace("typing.", "").replace("collections.abc.", "")
