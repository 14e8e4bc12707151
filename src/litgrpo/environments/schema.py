"""JSON schemas of functions, and whether a value fits one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from litgrpo.arguments import require

HOW = (
    "a tool is `def f(x: int) -> str` with a docstring that says what it does and, under `Args:`,"
    " has a line `x: what it is` for each argument"
)
MOST_CHARS = 200  # of why a function cannot be described
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
Schema = Mapping[str, Any]
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "string": ("a string", lambda value: isinstance(value, str)),
    "integer": ("an integer", lambda value: type(value) is int),
    "number": ("a number", lambda value: type(value) is int or _is_finite(value)),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "array": ("a list", lambda value: isinstance(value, list)),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "null": ("null", lambda value: value is None),
}


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema that chat templates show, by `transformers.utils.get_json_schema`.

    Raises:
        ValueError: the function says too little about itself; what to write.
    """
    from transformers.utils import get_json_schema  # slow

    name = name_of(function)
    parameters = inspect.signature(function).parameters.values()
    odd = [str(each) for each in parameters if each.kind not in NAMED]
    require(not odd, f"tool '{name}' has an argument without a name ({''.join(odd[:1])}); {HOW}.")
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # by whatever the annotations of a user raise when they are read
        words = " ".join(str(error).split()).partition(". ")[0].rstrip("!.")
        why = words.removeprefix(f"Cannot generate JSON schema for {name} because ")[:MOST_CHARS]
        raise ValueError(f"tool '{name}' cannot be described: {why}; {HOW}.") from error
    says = schema["function"]["description"]
    require(bool(says), f"tool '{name}' cannot be described: its docstring is empty; {HOW}.")
    return schema


def name_of(given: Any) -> str:
    """The name of a class, function or method; of anything else, that of its class."""
    routine = isinstance(given, type) or inspect.isroutine(given)
    return str(given.__name__ if routine else type(given).__name__)


def unfit(name: str, value: Any, schema: Schema) -> str:
    """Why a value does not fit its schema, for the policy; "" where it does.

    Types are exact: "3" and 3.0 are no integers, true is no number; an integer is a number.
    """
    choices = ", ".join(map(repr, schema.get("enum", ())))
    wanted = f"one of {choices}" if choices else _kinds(schema)
    return "" if _fits(value, schema) else f"'{name}' must be {wanted}"


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and isfinite(value)


def _kinds(schema: Schema) -> str:
    """The types that a schema allows, in words."""
    alternatives = schema.get("anyOf") or [schema]
    names = [name for each in alternatives for name in _names(each)]
    items = [_kinds(each["items"]) for each in alternatives if "items" in each]
    of = f", each item {items[0]}" if items else ""
    return " or ".join(KINDS[name][0] for name in names) + of if names else "of another kind"


def _names(schema: Schema) -> list[str]:
    kind = schema.get("type", [])
    return [kind] if isinstance(kind, str) else list(kind)


def _fits(value: Any, schema: Schema) -> bool:
    """Whether it fits every keyword that `get_json_schema` writes."""
    if value is None and schema.get("nullable", False):
        return True
    return all(check(value, schema[key]) for key, check in CHECKS.items() if key in schema)


def _is_of(value: Any, kinds: str | list[str]) -> bool:
    return any(KINDS[each][1](value) for each in _names({"type": kinds}))


def _in_enum(value: Any, choices: list[Any]) -> bool:
    return any(type(value) is type(each) and value == each for each in choices)


def _each_place(value: Any, schemas: list[Schema]) -> bool:
    same = len(value) == len(schemas)
    return same and all(map(_fits, value, schemas))


CHECKS: dict[str, Callable[[Any, Any], bool]] = {
    "type": _is_of,
    "enum": _in_enum,
    "anyOf": lambda value, schemas: any(_fits(value, each) for each in schemas),
    "items": lambda value, schema: all(_fits(each, schema) for each in value),
    "prefixItems": _each_place,
    "additionalProperties": lambda value, schema: all(
        _fits(each, schema) for each in value.values()
    ),
}
