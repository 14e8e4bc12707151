"""Check the types of arguments when settings are constructed in Python.

The command line checks the types of options itself. In Python a wrong type would otherwise surface
much later, as an error about an attribute of a `dict`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeVar

Class = TypeVar("Class")
SHOWN = 60  # characters of a value


class WrongType(TypeError):
    """An argument is of a wrong type."""

    exit_code = 2  # of the program: the user can fix it


def check_field_types(kind: type[Class]) -> type[Class]:
    """Let a dataclass check the types of its fields before its own checks.

    Example:
        >>> @dataclasses.dataclass
        ... @check_field_types
        ... class Size:
        ...     width: int
        >>> Size("8")
        Traceback (most recent call last):
        ...
        litgrpo.argument_types.WrongType: Size: width is '8' (str), expected int
    """
    own = kind.__dict__.get("__post_init__")

    def __post_init__(self: Any) -> None:
        owner: Any = type(self)
        hints = argument_hints(owner)
        for field in dataclasses.fields(self):
            if field.init:
                _check(type(self).__name__, field.name, getattr(self, field.name), hints)
        if own is not None:
            own(self)
        elif hasattr(super(kind, self), "__post_init__"):
            super(kind, self).__post_init__()

    kind.__post_init__ = __post_init__  # type: ignore[attr-defined]
    return kind


def check_argument_types(*others: str) -> Callable[[Any], Any]:
    """Let a constructor check the types of its arguments.

    Args:
        others: arguments that the constructor checks itself, as it takes more than it declares.
    """

    def wrap(constructor: Any) -> Any:
        signature = inspect.signature(constructor)

        @functools.wraps(constructor)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(self, *args, **kwargs).arguments
            hints = argument_hints(constructor)
            for name, value in list(given.items())[1:]:
                if name not in others:
                    _check(type(self).__name__, name, value, hints)
            constructor(self, *args, **kwargs)

        return __init__

    return wrap


@functools.cache
def argument_hints(owner: Any) -> dict[str, Any]:
    """Return {argument: type} of a class or function.

    Inherited fields of a dataclass are looked up in the module of the class that declares them.

    Returns:
        the types; empty if they contain names that are imported for type checkers only.
    """
    if inspect.isclass(owner) and not dataclasses.is_dataclass(owner):
        owner = owner.__init__
    try:
        return typing.get_type_hints(owner)
    except (NameError, TypeError):
        return {}


def _check(owner: str, name: str, value: Any, hints: Mapping[str, Any]) -> None:
    hint = hints.get(name, Any)
    if not matches(value, hint):
        raise WrongType(
            f"{owner}: {name} is {_shorten(value)} ({type(value).__name__}), expected "
            f"{describe_type(hint)}{_suggest(value, hint)}"
        )


def matches(value: Any, hint: Any) -> bool:
    """Return True if a value is of a type, as a user means it.

    A tuple passes for a list and a list for a tuple, an integer for a float, but a text does not
    pass for a sequence, and True does not for a number.

    Example:
        >>> matches((1, 2), list[int]), matches("12", list[int]), matches(True, int)
        (True, False, False)
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, each) for each in inner)
    if origin is typing.Literal:
        return any(isinstance(value, type(each)) for each in inner)  # classes check the words
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
            matches(key, inner[0]) and matches(each, inner[1]) for key, each in value.items()
        )
    if issubclass(origin, Sequence | Collection):
        # A fixed-length tuple declares each element, others one type for all.
        kinds = [each for each in inner if each is not ...]
        is_list = isinstance(value, Sequence | frozenset | set) and not isinstance(value, str)
        return is_list and all(any(matches(each, kind) for kind in kinds) for each in value)
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
    """Return a type as a user writes it.

    Example:
        >>> describe_type(int | None), describe_type(typing.Literal["a", "b"])
        ('int or None', "'a' or 'b'")
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe_type(each) for each in inner))
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if hint is type(None):
        return "None"
    if origin is not None and not (inspect.isclass(origin) and issubclass(origin, Collection)):
        return "a class" if origin is type else "a function"
    if inspect.isclass(hint) and origin is None:
        return str(hint.__name__)
    return str(hint).replace("typing.", "").replace("collections.abc.", "")


def _suggest(value: Any, hint: Any) -> str:
    """Return how to write a mapping or the name of a class as an object."""
    kinds = [each for each in (*typing.get_args(hint), hint) if dataclasses.is_dataclass(each)]
    if not kinds:
        return ""
    name = kinds[0].__name__  # type: ignore[union-attr]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return f": {name}({', '.join(f'{key}={_shorten(x)}' for key, x in value.items())})"
    return f": {name}(...)"


def _shorten(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of a foreign object
        text = f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
