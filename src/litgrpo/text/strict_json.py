"""JSON as its standard defines it, for texts that litgrpo did not write."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, without the extensions of Python's parser.

    NaN, Infinity and a repeated key, of which parsers take different values, raise ValueError;
    lists and objects that are nested some thousand levels deep raise RecursionError.

    Example:
        >>> parse_json('{"a": [1, null]}')
        {'a': [1, None]}
        >>> parse_json('{"a": 1, "a": 2}')
        Traceback (most recent call last):
        ...
        ValueError: the key 'a' occurs twice in an object
    """
    return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_reject_constant)


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dictionary; a key that occurs twice is a ValueError."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {key!r} occurs twice in an object")
    return fields


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value; write null or a number")
