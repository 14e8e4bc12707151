"""Serialize plain data between untrusted code and the code that tests it.

Not pickle: loading a pickle runs code that its author chose. This module is also sent into
sandboxes as text, so it imports the standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

ATOMS = (str, bool, int, float)
# {name in JSON: (types, value to list, list to value)}, for types that JSON does not have.
NAMED: dict[str, tuple[Any, Callable[[Any], list[Any]], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "iterator": (Iterator, list, iter),  # its values are computed when it is written
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda of: range(*of)),
    "bytes": ((bytes, bytearray), list, bytes),
    "complex": (complex, lambda value: [value.real, value.imag], lambda of: complex(*of)),
}


def dumps(value: Any) -> str:
    """Write a value as one line of JSON; types that JSON does not have are named."""
    return json.dumps(encode(value))


def loads(text: str) -> Any:
    """Read a value that `dumps` wrote; any text creates plain data only."""
    try:
        return decode(json.loads(text))
    except (TypeError, KeyError, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"not plain data: {error}") from error


def encode(value: Any) -> Any:
    """Encode plain data in JSON types; instances of subclasses become the plain type."""
    # A subclass could override `__eq__` and so pass every test.
    if value is None:
        return None
    atom = next((kind for kind in ATOMS if isinstance(value, kind)), None)
    if atom is not None:
        return bool(value) if atom is bool else atom(value)
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for name, (kinds, write, _) in NAMED.items():
        if isinstance(value, kinds):
            return {name: [encode(item) for item in write(value)]}
    raise TypeError(f"{type(value).__name__} is not plain data")


def decode(node: Any) -> Any:
    """Decode a value that `encode` returned."""
    if isinstance(node, list):
        return [decode(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((name, items),) = node.items()
    if name == "dict":
        return {decode(key): decode(item) for key, item in items}
    return NAMED[name][2](decode(item) for item in items)
