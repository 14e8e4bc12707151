"""Options that a class or function takes: read from its signature, hints and docstring.

Two readers share this: the help of one option (`--model.lora.help`), and the search for the option
that a parse failed at (`mistakes.py`).
"""

from __future__ import annotations

import difflib
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from docstring_parser import parse

from litgrpo import PUBLIC
from litgrpo.argument_types import argument_hints
from litgrpo.arguments import did_you_mean, import_by_path, require

# Packages whose classes no recipe names, although they are subclasses of torch's.
INTERNAL = ("accelerate", "transformers")
UNSET = inspect.Parameter.empty
CLOSE = 0.5  # least similarity, of difflib, of a suggestion


@dataclass(frozen=True)
class Option:
    """An option, as a signature declares it.

    Args:
        key: dotted name.
        hint: its type.
        default: value if nothing is given; `inspect.Parameter.empty` if it is required.
        text: its description.

    Example:
        >>> from litgrpo.models.adapters import LoRA
        >>> option = options_of(LoRA, "model.lora")["rank"]
        >>> option.key, option.hint, option.default
        ('model.lora.rank', <class 'int'>, 16)
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
    documented = [*parse(owner.__doc__ or "").params, *parse(constructor.__doc__ or "").params]
    texts = {each.arg_name: " ".join((each.description or "").split()) for each in documented}
    hints = argument_hints(owner)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name: Option(
            ".".join(filter(None, [key, name])),
            hints.get(name, each.annotation),
            each.default,
            texts.get(name, ""),
        )
        for name, each in inspect.signature(owner).parameters.items()
        if each.kind not in variadic and name not in ("params", "self")
    }


def takes_any_option(owner: Any) -> bool:
    """Return True for a signature with `**kwargs`, whose options are not known."""
    parameters = inspect.signature(owner).parameters.values()
    return any(each.kind is each.VAR_KEYWORD for each in parameters)


def classes_in(hint: Any) -> list[type]:
    """Return the classes with options that a type mentions.

    Example:
        >>> from litgrpo.models.adapters import LoRA
        >>> classes_in(LoRA | None), classes_in(dict[str, int])
        ([<class 'litgrpo.models.adapters.LoRA'>], [])
    """
    arguments = typing.get_args(hint)
    if inspect.isclass(hint) and not arguments:
        # Enums, paths and the like are plain values; object and Any say nothing.
        return [] if hint.__module__.partition(".")[0] in sys.stdlib_module_names else [hint]
    if arguments and isinstance(arguments[0], list):  # Callable[[...], X]: a factory of X
        arguments = arguments[1:]
    return list(dict.fromkeys(each for inner in arguments for each in classes_in(inner)))


def members(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union; of another type, the type alone."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def is_text(hint: Any) -> bool:
    """Return True for a type whose values are texts, or null.

    Example:
        >>> is_text(str | None), is_text(str | int), is_text(None)
        (True, False, False)
    """
    kinds = set(members(hint))
    return str in kinds and kinds <= {str, type(None)}


def is_text_or_list(hint: Any) -> bool:
    """Return True for a type whose values are a text or a list of texts, or null.

    Example:
        >>> is_text_or_list(list[str] | str | None), is_text_or_list(list[str])
        (True, False)
    """
    kinds = set(members(hint))
    return is_text(hint) or (str in kinds and kinds <= {str, list[str], Sequence[str], type(None)})


def is_list_of_texts(hint: Any) -> bool:
    """Return True for a type whose values are lists of texts, or null.

    Example:
        >>> is_list_of_texts(list[str] | None), is_list_of_texts(list[str] | str)
        (True, False)
    """
    kinds = set(members(hint)) - {type(None)}
    return bool(kinds) and kinds <= {list[str], Sequence[str]}


def values_of_mapping(hint: Any) -> Any:
    """Return the type of a mapping's values, `UNSET` if the type allows no mapping."""
    for each in members(hint):
        if typing.get_origin(each) in (dict, Mapping) and len(typing.get_args(each)) > 1:
            return typing.get_args(each)[1]
    return UNSET


def subclasses(base: type) -> list[type]:
    """Return the public concrete classes under a base that are imported, with the base."""
    found = [base]
    for each in found:  # grows while it is read
        below: list[type] = type.__subclasses__(each)
        found += [kind for kind in below if kind not in found]
    return [
        kind
        for kind in found
        if not inspect.isabstract(kind)
        and not kind.__name__.startswith("_")
        and (kind.__module__ or "").partition(".")[0] not in INTERNAL
    ]


def find_class(name: str, bases: Sequence[type]) -> type:
    """Return a class by its short name or import path.

    Args:
        name: of the class.
        bases: classes of which it is a subclass; a public class may be of any other base.

    Raises:
        ValueError: there is no such class.
    """
    package, _, last = name.rpartition(".")
    if last in PUBLIC and package in ("", "litgrpo"):
        return typing.cast("type", import_by_path(f"{PUBLIC[last]}.{last}"))
    if package:
        return typing.cast("type", import_by_path(name))
    known = {kind.__name__: kind for base in bases for kind in subclasses(base)}
    listed = f": use one of {', '.join(sorted(known))}, or an import path"
    near = nearest(name, list(known))
    require(
        name in known, f"unknown class {name!r}" + (near and f", did you mean {near!r}?") + listed
    )
    return known[name]


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the known name that begins with the name or is most similar; "" if none is near.

    Example:
        >>> nearest("kl", ["eps", "kl_coef"]), nearest("rnak", ["rank"]), nearest("x", ["rank"])
        ('kl_coef', 'rank', '')
    """
    longer = [each for each in known if each.startswith(name)]
    return next(iter(longer + difflib.get_close_matches(name, known, 1, CLOSE)), "")


def find_option(key: str, roots: Mapping[str, type]) -> Option:
    """Return the option of a dotted name.

    Args:
        key: dotted name, with or without `init_args`.
        roots: {first part of a name: class}.

    Raises:
        ValueError: there is no such option; the message has the nearest.
    """
    first, *rest = [part for part in key.split(".") if part != "init_args"]
    require(first in roots, f"unknown option {first!r}{did_you_mean(first, roots)}")
    option = Option(first, roots[first], UNSET, "")
    for part in rest:
        known: dict[str, Option] = {}
        for owner in owners_of(option):
            known = options_of(owner, option.key) | known
        if part in known:
            option = known[part]
            continue
        values = values_of_mapping(option.hint)
        listed = f"it takes {', '.join(known)}" if known else "it has no options"
        require(
            values is not UNSET,
            f"unknown option {option.key}.{part}{did_you_mean(part, known)}: {listed}",
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
        >>> type_name(int | None), type_name(typing.Literal["a", "b"]), type_name(dict[str, int])
        ('int or null', "'a' or 'b'", 'dict[str, int]')
    """
    if hint is UNSET:
        return "any value"
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    if len(members(hint)) > 1:
        return " or ".join(dict.fromkeys(type_name(each) for each in members(hint)))
    if hint is type(None):
        return "null"
    if inspect.isclass(hint) and not typing.get_args(hint):
        return hint.__name__
    return str(hint).replace("typing.", "").replace("collections.abc.", "")
