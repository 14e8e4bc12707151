"""Serialize plain data between untrusted code and the code that tests it.

Not pickle: loading a pickle runs code that its author chose. This module is also sent into
sandboxes as text, so it imports the standard library only.
"""

from __future__ import annotations

import json
from typing import Any

ATOMS = (str, bool, int, float)
LISTS = {"tuple": tuple, "set": set, "frozenset": frozenset, "list": list}


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


def encode(value: Any) -> Any:
    """Encode a value in JSON types; instances of subclasses become the plain type.

    A subclass could override `__eq__` and so pass every test.

    Raises:
        TypeError: it contains an object that is not plain data.
    """
    if value is None:
        return None
    atom = next((kind for kind in ATOMS if isinstance(value, kind)), None)
    if atom is not None:
        return bool(value) if atom is bool else atom(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": list(value)}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    name = next((name for name, kind in LISTS.items() if isinstance(value, kind)), None)
    if name is None:
        raise TypeError(f"{type(value).__name__} is not plain data")
    items = [encode(item) for item in value]
    return items if name == "list" else {name: items}


def decode(node: Any) -> Any:
    """Decode a value that `encode` returned."""
    if isinstance(node, list):
        return [decode(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((name, items),) = node.items()
    if name == "dict":
        return {decode(key): decode(item) for key, item in items}
    if name in LISTS:
        return LISTS[name](decode(item) for item in items)
    return {"complex": lambda: complex(*items), "bytes": lambda: bytes(list(items))}[name]()
