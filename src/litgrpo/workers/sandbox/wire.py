"""Serialize plain data between untrusted code and the code that tests it.

Not pickle: loading a pickle runs code that its author chose. This module is also sent into
sandboxes as text, so it imports the standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

ATOMS = (str, bool, int, float)
LISTS = {"tuple": tuple, "set": set, "frozenset": frozenset, "list": list}
# {name: (types, value to list, list to value)}
WRITTEN: dict[str, tuple[Any, Callable[[Any], list[Any]], Callable[[Any], Any]]] = {
    "complex": (complex, lambda value: [value.real, value.imag], lambda items: complex(*items)),
    "bytes": ((bytes, bytearray), list, lambda items: bytes(list(items))),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda of: range(*of)),
}
NOTHING: Mapping[str, Any] = MappingProxyType({})


def dumps(value: Any) -> str:
    """Write a value as one line of JSON; types that JSON does not have are named.

    Example:
        >>> dumps((1, {2: "x"}))
        '{"tuple": [1, {"dict": [[2, "x"]]}]}'
    """
    return json.dumps(encode(value))


def loads(text: str) -> Any:
    """Read a value that `dumps` wrote; any text creates plain data only.

    Example:
        >>> loads(dumps({(1, 2): {3.5}}))
        {(1, 2): {3.5}}

    Raises:
        ValueError: the text was not written by `dumps`.
    """
    try:
        return decode(json.loads(text))
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"not plain data: {error}") from error


def encode(value: Any, foreign: Callable[[Any], Any] | None = None) -> Any:
    """Encode a value in JSON types; instances of subclasses become the plain type.

    A subclass could override `__eq__` and so pass every test.

    Args:
        value: the value.
        foreign: returns the node `{name: ...}` of an object that is not plain data.

    Raises:
        TypeError: it contains an object that is not plain data.
    """
    if value is None:
        return None
    atom = next((kind for kind in ATOMS if isinstance(value, kind)), None)
    if atom is not None:
        return bool(value) if atom is bool else atom(value)
    for name, (kinds, write, _) in WRITTEN.items():
        if isinstance(value, kinds):
            return {name: write(value)}
    if isinstance(value, dict):
        pairs = value.items()
        return {"dict": [[encode(key, foreign), encode(item, foreign)] for key, item in pairs]}
    for name, kind in LISTS.items():
        if isinstance(value, kind):
            items = [encode(item, foreign) for item in value]
            return items if name == "list" else {name: items}
    if foreign is None:
        raise TypeError(f"{type(value).__name__} is not plain data")
    return foreign(value)


def decode(node: Any, foreign: Mapping[str, Callable[[Any], Any]] = NOTHING) -> Any:
    """Decode a value that `encode` returned.

    Args:
        node: the value in JSON types.
        foreign: {name: function that returns the object of a node `{name: ...}`}.
    """
    if isinstance(node, list):
        return [decode(item, foreign) for item in node]
    if not isinstance(node, dict):
        return node
    ((name, items),) = node.items()
    if name == "dict":
        return {decode(key, foreign): decode(item, foreign) for key, item in items}
    if name in LISTS:
        return LISTS[name](decode(item, foreign) for item in items)
    return foreign[name](items) if name in foreign else WRITTEN[name][2](items)
