"""`--model.lora.help`: what is below a key, for every key of model, data, trainer and callbacks."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import FunctionType
from typing import Any

import yaml
from docstring_parser import parse

from litgrpo import PUBLIC
from litgrpo.arguments import did_you_mean, import_by_path, require
from litgrpo.cli.recipes import CLASSES, recipe_file

ASKED = re.compile(r"--([\w.]+)\.help(?:=(.*))?")
ROOT_FLAGS = {"-c": "recipe", "--config": "recipe", "--model": "model", "--data": "data"}
WIDTH = 100


@dataclass(frozen=True)
class Key:
    """A key, as its class declares it.

    Args:
        name: dotted.
        hint: the type.
        default: its value where nothing is given, or `inspect.Parameter.empty`.
        text: what it is.
    """

    name: str
    hint: Any
    default: Any
    text: str

    @property
    def classes(self) -> list[type]:
        """Classes with keys of their own that the type names."""
        return [c for c in dict.fromkeys(_classes(self.hint)) if _has_keys(c)]

    def title(self) -> str:
        """`name: type = default`."""
        default = "" if self.default is inspect.Parameter.empty else f" = {_short(self.default)}"
        return f"--{self.name}: {type_name(self.hint)}{default}"


def asked(words: Sequence[str]) -> tuple[str, str] | None:
    """The key and the class, or nothing, of the first `--KEY.help [CLASS]` on a command line."""
    for word, following in pairwise([*words, ""]):
        if found := ASKED.fullmatch(word):
            return found[1], found[2] or ("" if following.startswith("-") else following)
    return None


def roots_of(words: Sequence[str], others: Mapping[str, type]) -> dict[str, type]:
    """{first part of a key: class} of model and data, as the command line's recipes name them.

    Args:
        words: the command line.
        others: of trainer and callbacks.
    """
    paths = dict(CLASSES)
    for flag, value in pairwise(words):
        kind = ROOT_FLAGS.get(flag, "")
        given = {kind: {"class_path": value}}
        if kind == "recipe":
            given = yaml.safe_load(recipe_file(value).read_text(encoding="utf-8")) or {}
        named = {key: given[key].get("class_path") for key in paths if key in given}
        paths |= {key: path for key, path in named.items() if path}
    return {**others, **{key: class_named(path, [object]) for key, path in paths.items()}}


def explained(key: str, name: str, roots: Mapping[str, type]) -> Iterator[str]:
    """Lines of help for a key.

    Args:
        key: dotted.
        name: a class that it should be explained for, or nothing.
        roots: {first part of a key: its class}.

    Raises:
        ValueError: there is no such key or class.
    """
    first, *rest = key.split(".")
    require(first in roots, f"there is no key {first!r}{did_you_mean(first, roots)}")
    bases = [roots[first]]
    if not rest:
        shown = class_named(name, bases if name not in PUBLIC else [object]) if name else bases[0]
        yield from of_class(shown, key)
        return
    found = Key(first, roots[first], inspect.Parameter.empty, "")
    for part in rest:
        found = below(found, part)
    yield from of_key(found, name)


def below(above: Key, part: str) -> Key:
    """The key of this name under another; in a mapping any name is one.

    Raises:
        ValueError: there is none.
    """
    default = above.default
    own = [] if default is inspect.Parameter.empty or not _has_keys(type(default)) else [default]
    concrete = [type(each) for each in own] + [c for c in [default] if inspect.isclass(c)]
    known: dict[str, Key] = {}
    for owner in [*above.classes, *concrete, *(s for c in above.classes for s in subclasses(c))]:
        for each in keys_of(owner, above.name):
            known.setdefault(each.name.rpartition(".")[2], each)
    if part not in known and typing.get_origin(above.hint) is dict:
        return Key(f"{above.name}.{part}", above.hint, default, above.text)
    listed = f"it has {', '.join(known)}" if known else "it has no keys of its own"
    require(
        part in known,
        f"there is no key {f'{above.name}.{part}'!r}{did_you_mean(part, known)}: {listed}",
    )
    return known[part]


def keys_of(owner: type, prefix: str) -> list[Key]:
    """The arguments of a class, as keys."""
    constructor = vars(owner).get("__init__") or inspect.getattr_static(owner, "__init__")
    texts = {p.arg_name: p.description or "" for p in parse(owner.__doc__ or "").params}
    texts |= {p.arg_name: p.description or "" for p in parse(constructor.__doc__ or "").params}
    try:
        hints = typing.get_type_hints(constructor)
    except (NameError, TypeError):  # names that are imported for type checkers only
        hints = {}
    made = made_defaults(owner)
    found = inspect.signature(owner).parameters.values()
    return [
        Key(
            f"{prefix}.{p.name}",
            hints.get(p.name, p.annotation),
            made.get(p.name, p.default),
            texts.get(p.name, ""),
        )
        for p in found
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in ("params", "self")
    ]


def made_defaults(owner: type) -> dict[str, Any]:
    """{argument: default} of a dataclass's arguments whose default is made anew each time."""
    fields = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
    return {f.name: f.default_factory() for f in fields if callable(f.default_factory)}


def of_key(key: Key, name: str) -> Iterator[str]:
    """A key: its type, default and text, and what is below it."""
    yield key.title()
    yield from wrapped(key.text, 4)
    yield from functions_beside(key.default)
    default = key.default if inspect.isclass(key.default) else type(key.default)
    for base in key.classes:
        kinds = subclasses(base)
        chosen = class_named(name, [base]) if name else base
        chosen = default if not name and issubclass(default, base) else chosen
        if inspect.isabstract(chosen) or (len(kinds) > 1 and not name and default not in kinds):
            yield from listed(kinds, key.name)
            continue
        yield ""
        yield from of_class(chosen, key.name)
        if not name and len(kinds) > 1:
            yield from listed(kinds, key.name)


def listed(kinds: Sequence[type], key: str) -> Iterator[str]:
    """The classes that a key takes, each with its first sentence."""
    yield ""
    yield f"classes, each with keys of its own (--{key}.help CLASS):"
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        summary = (parse(kind.__doc__ or "").short_description or "").replace("\n", " ")
        yield from wrapped(f"{kind.__name__}: {summary}", 2)


def of_class(owner: type, prefix: str) -> Iterator[str]:
    """A class: what it is, and its keys."""
    described = parse(owner.__doc__ or "")
    yield from wrapped(f"{owner.__name__}: {described.short_description or ''}", 0)
    for key in keys_of(owner, prefix):
        yield ""
        yield key.title()
        yield from wrapped(key.text, 4)
        if key.classes:
            yield f"    keys below it: --{key.name}.help"


def functions_beside(default: Any) -> Iterator[str]:
    """The functions that could be given in place of a function: its neighbors."""
    if not isinstance(default, FunctionType):
        return
    module = default.__module__
    found = vars(import_by_path(module))
    yield f"a function, by its import path; {module} has:"
    for name, each in found.items():
        if isinstance(each, FunctionType) and each.__module__ == module and name[0] != "_":
            summary = (parse(each.__doc__ or "").short_description or "").replace("\n", " ")
            yield from wrapped(f"{module}.{name}: {summary}", 2)


def class_named(name: str, bases: Sequence[type]) -> type:
    """A class by its short name or import path.

    Raises:
        ValueError: there is no such class.
    """
    if "." in name and name.rpartition(".")[2] in PUBLIC:
        name = name.rpartition(".")[2]
    if name in PUBLIC:
        return import_by_path(f"{PUBLIC[name]}.{name}")
    if "." in name:
        return import_by_path(name)
    known = {kind.__name__: kind for base in bases for kind in [base, *subclasses(base)]}
    require(name in known, f"there is no class {name!r}{did_you_mean(name, known)}")
    return known[name]


def subclasses(base: type) -> list[type]:
    """Concrete classes under a base that are imported here, the base included."""
    found: list[type] = [base]
    for each in found:  # grows while it is read
        below_it: list[type] = type.__subclasses__(each)
        found += [c for c in below_it if c not in found and not wraps(c)]
    return [c for c in found if not inspect.isabstract(c) and not c.__name__.startswith("_")]


def wraps(kind: type) -> bool:
    """Whether a class is an internal one of a library that nobody names in a recipe."""
    return kind.__module__.partition(".")[0] in ("accelerate", "transformers")


def _classes(hint: Any) -> Iterator[type]:
    if inspect.isclass(hint) and not typing.get_args(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes(part)


def _has_keys(kind: type) -> bool:
    """Whether a class is no plain value: ours, or one that torch or Lightning builds."""
    return kind.__module__.partition(".")[0] not in sys.stdlib_module_names


def type_name(hint: Any) -> str:
    """A type as one would say it."""
    text = hint.__name__ if inspect.isclass(hint) and not typing.get_args(hint) else str(hint)
    text = "any" if hint is inspect.Parameter.empty else text
    text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)
    return text.replace("NoneType", "null").replace("None", "null")


def _short(value: Any) -> str:
    if inspect.isclass(value) or isinstance(value, FunctionType):
        return str(value.__name__)
    if _has_keys(type(value)):
        return f"{type(value).__name__}()"
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def wrapped(text: str, indent: int) -> list[str]:
    """A text in lines of a width."""
    space = " " * indent
    whole = " ".join(text.split())
    return textwrap.wrap(whole, WIDTH, initial_indent=space, subsequent_indent=space + "  ")
