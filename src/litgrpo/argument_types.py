"""Check the types of arguments when settings are constructed in Python.

The command line checks the types of options itself. In Python a wrong type would otherwise surface
much later, as an error about an attribute of a `dict`. What a recipe takes for an object is taken
in Python too: a mapping of its arguments, or the name of its class.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from os import PathLike
from typing import Any, TypeVar

from litgrpo import PUBLIC
from litgrpo.arguments import did_you_mean, import_by_path, require
from litgrpo.foreign_names import OTHER_NAMES, note_on

Class = TypeVar("Class")
SHOWN = 60  # characters of a value
# Packages whose classes no recipe names, although they are subclasses of torch's.
INTERNAL = ("accelerate", "transformers")
UNSET = inspect.Parameter.empty
# {first part of an option: what takes its other parts in Python}
TAKES = {"model": "GRPO", "data": "PromptData", "trainer": "Trainer"}


class WrongType(TypeError):
    """An argument is of a wrong type."""

    exit_code = 2  # of the program: the user can fix it


class UnknownArgument(WrongType):
    """There is no argument of this name."""


def check_field_types(kind: type[Class]) -> type[Class]:
    """Let a dataclass check the types of its arguments before its own checks.

    Example:
        >>> @check_field_types
        ... @dataclasses.dataclass
        ... class Size:
        ...     width: int
        >>> Size("8")
        Traceback (most recent call last):
        ...
        litgrpo.argument_types.WrongType: Size: width is '8' (str), expected int
    """
    checked: Any = kind
    checked.__init__ = _wrap_checks(checked.__init__, kind, ())
    return kind


def check_argument_types(
    *unchecked: str, before: Callable[[dict[str, Any]], None] | None = None
) -> Callable[[Any], Any]:
    """Let a constructor check the types of its arguments, and build objects from mappings."""
    # It checks `unchecked` arguments itself, as it takes more than it declares. `before` may change
    # {argument: value}, such as names that stand for objects.

    def wrap(constructor: Any) -> Any:
        return _wrap_checks(constructor, constructor, unchecked, before)

    return wrap


def _wrap_checks(
    constructor: Any,
    declared: Any,
    unchecked: Sequence[str],
    before: Callable[[dict[str, Any]], None] | None = None,
) -> Any:
    """Wrap a constructor whose types `declared` has: itself, or its dataclass."""
    signature = inspect.signature(constructor)
    parameters = signature.parameters

    @functools.wraps(constructor)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        owner = type(self).__name__
        check_names(owner, kwargs, parameters)
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:  # a required argument is missing, or there are too many
            raise WrongType(f"{owner}: {error}") from error
        if before is not None:
            before(bound.arguments)
        hints = argument_hints(declared)
        checked = [name for name in bound.arguments if name in hints and name not in unchecked]
        for name in checked:
            value, hint = bound.arguments[name], hints[name]
            if not matches(value, hint):
                default = default_of(declared, parameters[name])
                bound.arguments[name] = convert(f"{owner}: {name}", value, hint, default)
        constructor(*bound.args, **bound.kwargs)
        for name in checked:  # after the class's own checks
            check_choice(f"{owner}: {name}", bound.arguments[name], hints[name])

    return __init__


def check_choice(where: str, value: Any, hint: Any) -> None:
    """Reject a text that is none of the names that a type lists."""
    kinds = members(hint)
    lists = [typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is typing.Literal]
    names = [str(name) for names in lists for name in names]
    if names and isinstance(value, str) and str not in kinds and value not in names:
        raise WrongType(
            f"{where} is {value!r:.60}, expected {describe_type(hint)}{did_you_mean(value, names)}"
        )


def default_of(declared: Any, parameter: inspect.Parameter) -> Any:
    """Return the default of an argument, that of a dataclass's factory too."""
    field = getattr(declared, "__dataclass_fields__", {}).get(parameter.name)
    if field is None or field.default_factory is dataclasses.MISSING:
        return parameter.default
    return field.default_factory()


def check_names(owner: str, names: Iterable[str], parameters: Collection[str]) -> None:
    """Reject keywords that a class does not take, with litgrpo's name of one of TRL or verl."""
    arguments = [name for name in parameters if name not in ("self", "params")]
    for name in names:
        if name not in parameters:
            listed = f"it takes {', '.join(arguments) or 'none'}"
            near = did_you_mean(name, arguments).strip(" ()")
            instead = _in_python(name, arguments) or near or listed
            raise UnknownArgument(f"{owner} has no argument {name!r}: {instead}{note_on(name)}")


def _in_python(foreign_name: str, arguments: Sequence[str]) -> str:
    """Return how a class that takes `known` is given an option of TRL or verl; "" if it is none."""
    root, *path = OTHER_NAMES.get(foreign_name, "").split(".")
    start = next((number for number, part in enumerate(path) if part in arguments), None)
    start = start if root in ("model", "data") else None
    keys = path[start or 0 :]
    if not keys:
        return f"it is --{root} on the command line" if root else ""
    value = "..."
    for key in reversed(keys[1:]):
        value = f"{{{key!r}: {value}}}"
    written = f"{keys[0]}={value}"
    if start is not None:
        return f"use {written}"
    option = ".".join([root, *path])
    return f"use {TAKES[root]}({written})" if root in TAKES else f"it is --{option} in a recipe"


def convert(where: str, value: Any, hint: Any, default: Any = UNSET) -> Any:
    """Return a value of a type, built from a mapping of arguments or the name of a class.

    If the mapping names no class, that of the default is built. Another type is a WrongType.
    """
    if matches(value, hint):
        return value
    if isinstance(value, list | tuple) and (kind := _elements(hint)) is not UNSET:
        return [convert(f"{where}[{number}]", inner, kind) for number, inner in enumerate(value)]
    kinds, kind = classes_in(hint), values_of_mapping(hint)
    if isinstance(value, Mapping) and kind is not UNSET and classes_in(kind):
        return {key: convert(f"{where}[{key!r}]", inner, kind) for key, inner in value.items()}
    if kinds and isinstance(value, str | Mapping) and kind is UNSET:
        return _construct(where, value, hint, kinds, default)
    raise WrongType(
        f"{where} is {_shorten(value)} ({type(value).__name__}), expected "
        f"{describe_type(hint)}{_suggest(hint)}"
    )


def _elements(hint: Any) -> Any:
    """Return the class whose objects a list holds, `UNSET` for other types."""
    for member in members(hint):
        origin, inner = typing.get_origin(member), typing.get_args(member)
        is_list = inspect.isclass(origin) and issubclass(origin, Sequence)
        if is_list and len(inner) == 1 and classes_in(inner[0]):
            return inner[0]
    return UNSET


def _construct(
    where: str, value: str | Mapping[str, Any], hint: Any, kinds: list[type], default: Any
) -> Any:
    """Build the object of a class name, of {argument: value} or of {class_path, init_args}."""
    settings: dict[str, Any] = {"class_path": value} if isinstance(value, str) else dict(value)
    settings.update(settings.pop("init_args", None) or {})
    path = settings.pop("class_path", None)
    try:
        kind = find_class(str(path), kinds) if path else default_class(default, kinds)
    except ValueError as error:
        raise WrongType(f"{where} is {_shorten(value)}: {error}") from error
    if inspect.isabstract(kind):
        names = ", ".join(sorted({sub.__name__ for base in kinds for sub in subclasses(base)}))
        raise WrongType(f"{where} has arguments but no class_path: give one of {names}")
    if not (inspect.isclass(kind) and issubclass(kind, tuple(kinds))):
        raise WrongType(f"{where} is {path}, expected {describe_type(hint)}{_suggest(hint)}")
    if not any(_is_factory(member) for member in members(hint)):
        return kind(**settings)
    # A factory, such as of an optimizer, gets its first argument later.
    parameters = inspect.signature(kind).parameters
    check_names(f"{where} ({kind.__name__})", settings, parameters)
    owner: Any = kind
    hints = argument_hints(owner)
    for name, setting in settings.items():
        convert(f"{where}[{name!r}]", setting, hints.get(name, Any))
    return functools.partial(kind, **settings) if settings else kind


def _is_factory(hint: Any) -> bool:
    return typing.get_origin(hint) is Callable


def default_class(default: Any, kinds: Sequence[type]) -> type:
    """Return the class of a default, or the first of the classes that a type names."""
    kind: type = default if inspect.isclass(default) else type(default)
    return kind if issubclass(kind, tuple(kinds)) else kinds[0]


@functools.cache
def argument_hints(owner: Any) -> dict[str, Any]:
    """Return {argument: type} of a class or function; {} if a type is unknown at run time."""
    # Inherited fields of a dataclass are looked up in the module of the class that declares them.
    if inspect.isclass(owner) and not dataclasses.is_dataclass(owner):
        owner = owner.__init__
    try:
        return typing.get_type_hints(owner)
    except (NameError, TypeError):
        return {}


def matches(value: Any, hint: Any) -> bool:
    """Return True if a value is of a type, as a user means it.

    A tuple passes for a list and a list for a tuple, an integer for a float, but a text does not
    pass for a sequence, and True does not for a number.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, member) for member in inner)
    if origin is typing.Literal:
        return any(isinstance(value, type(member)) for member in inner)  # classes check the words
    if hint is None or hint is type(None):
        return value is None
    if origin is not None:
        return _matches_generic(value, origin, inner)
    return _matches_class(value, hint)


def _matches_generic(value: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    if origin is type:
        return inspect.isclass(value)
    if not inspect.isclass(origin) or origin is Callable:
        return callable(value)
    if issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            matches(key, inner[0]) and matches(item, inner[1]) for key, item in value.items()
        )
    if issubclass(origin, Sequence | Collection):
        # A fixed-length tuple declares each element, others one type for all.
        kinds = [item for item in inner if item is not ...]
        is_list = isinstance(value, Sequence | frozenset | set) and not isinstance(value, str)
        return is_list and all(any(matches(item, kind) for kind in kinds) for item in value)
    if issubclass(origin, Iterable):
        return isinstance(value, Iterable)
    return isinstance(value, origin)


def _matches_class(value: Any, hint: Any) -> bool:
    if not inspect.isclass(hint):  # Any, a type variable
        return True
    if hint is str:
        return isinstance(value, str | PathLike)  # a path is as good as its text
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    try:
        return isinstance(value, hint)
    except TypeError:  # a protocol that cannot be checked
        return True


def describe_type(hint: Any) -> str:
    """Return a type as a user writes it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe_type(member) for member in inner))
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if hint is type(None):
        return "None"
    if origin is not None and not (inspect.isclass(origin) and issubclass(origin, Collection)):
        return "a class" if origin is type else "a function"
    if inspect.isclass(hint) and origin is None:
        return str(hint.__name__)
    return str(hint).replace("typing.", "").replace("collections.abc.", "")


def _suggest(hint: Any) -> str:
    """Return how an object is written."""
    kinds = [member for member in members(hint) if dataclasses.is_dataclass(member)]
    return f": {kinds[0].__name__}(...)" if kinds else ""  # type: ignore[union-attr]


def _shorten(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of a foreign object
        text = f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def classes_in(hint: Any) -> list[type]:
    """Return the classes with options that a type mentions."""
    arguments = typing.get_args(hint)
    if inspect.isclass(hint) and not arguments:
        # Enums, paths, tensors and the like are plain values; object and Any say nothing.
        package = hint.__module__.partition(".")[0]
        is_plain = package in sys.stdlib_module_names or hint.__name__ == "Tensor"
        return [] if is_plain else [hint]
    if arguments and isinstance(arguments[0], list):  # Callable[[...], X]: a factory of X
        arguments = arguments[1:]
    return list(dict.fromkeys(kind for inner in arguments for kind in classes_in(inner)))


def members(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union; of another type, the type alone."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def values_of_mapping(hint: Any) -> Any:
    """Return the type of a mapping's values, `UNSET` if the type allows no mapping."""
    for member in members(hint):
        if typing.get_origin(member) in (dict, Mapping) and len(typing.get_args(member)) > 1:
            return typing.get_args(member)[1]
    return UNSET


def subclasses(base: type) -> list[type]:
    """Return the public concrete classes under a base that are imported, with the base."""
    kinds, seen = [base], {base}
    for parent in kinds:  # grows while it is read
        below: list[type] = type.__subclasses__(parent)
        kinds += [kind for kind in below if kind not in seen]
        seen.update(below)
    return [
        kind
        for kind in kinds
        if not inspect.isabstract(kind)
        and not kind.__name__.startswith("_")
        and (kind.__module__ or "").partition(".")[0] not in INTERNAL
    ]


def find_class(name: str, bases: Sequence[type]) -> type:
    """Return a class by its import path, or by its short name if it is public or below a base."""
    package, _, short_name = name.rpartition(".")
    if short_name in PUBLIC and package in ("", "litgrpo"):
        return typing.cast("type", import_by_path(f"{PUBLIC[short_name]}.{short_name}"))
    if package:
        return typing.cast("type", import_by_path(name))
    kinds = _names_below(bases)
    if name not in kinds:  # public classes are imported when they are first used
        for module in {*PUBLIC.values()}:
            import_module(module)
        kinds = _names_below(bases)
    listed = f"use one of {', '.join(sorted(kinds))}, or an import path"
    require(name in kinds, f"unknown class {name!r}{did_you_mean(name, kinds)}: {listed}")
    return kinds[name]


def _names_below(bases: Sequence[type]) -> dict[str, type]:
    """{short name: class} of what is imported; of torch's SGD and bitsandbytes', the first."""
    pairs = [(kind.__name__, kind) for base in bases for kind in subclasses(base)]
    return dict(reversed(pairs))
