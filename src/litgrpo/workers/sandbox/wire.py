"""Plain data as text: what may pass between code that is judged and code that judges it.

Also sent into sandboxes as text, so it imports the standard library only.
"""

from __future__ import annotations

import json
from typing import Any

ATOMS = (str, bool, int, float)
LISTS = {"tuple": tuple, "set": set, "frozenset": frozenset, "list": list}


def dumps(value: Any) -> str:
    """One line of text; types that JSON has not are named.

    Example:
        >>> dumps((1, {2: "x"}))
        '{"tuple": [1, {"dict": [[2, "x"]]}]}'
    """
    return json.dumps(tagged(value))


def loads(text: str) -> Any:
    """The value of a text that `dumps` wrote; whatever the text is, only plain data are made.

    Example:
        >>> loads(dumps({(1, 2): {3.5}}))
        {(1, 2): {3.5}}

    Raises:
        ValueError: the text is not of that kind.
    """
    try:
        return untagged(json.loads(text))
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"no plain data: {error}") from error


def tagged(value: Any) -> Any:
    """The value in JSON's types. Subtypes become their plain type.

    Raises:
        TypeError: it holds something that is not plain.
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
        return {"dict": [[tagged(key), tagged(item)] for key, item in value.items()]}
    name = next((name for name, kind in LISTS.items() if isinstance(value, kind)), None)
    if name is None:
        raise TypeError(f"{type(value).__name__} is no plain data")
    items = [tagged(item) for item in value]
    return items if name == "list" else {name: items}


def untagged(node: Any) -> Any:
    """The value of what `tagged` made."""
    if isinstance(node, list):
        return [untagged(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((name, items),) = node.items()
    if name == "dict":
        return {untagged(key): untagged(item) for key, item in items}
    if name in LISTS:
        return LISTS[name](untagged(item) for item in items)
    return {"complex": lambda: complex(*items), "bytes": lambda: bytes(list(items))}[name]()
