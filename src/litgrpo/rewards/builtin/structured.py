"""Answers that a program reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from litgrpo.arguments import require
from litgrpo.text.answers import Completions, text_of


def json_fields(
    prompts: Sequence[object],
    completions: Completions,
    answer: Sequence[Any],
    *,
    same_fields: bool = False,
) -> list[float]:
    """Share of fields that a completion has right, where it is one JSON object and nothing else.

    The share is of the fields of either object, so that a field too many costs as much as one that
    is missing. A number is a number and not a text; texts are compared without case and outer
    spaces. What `json.loads` refuses earns 0, as do fields that stand twice.

    To leave a field out costs as much as to get it wrong, so a policy may learn to leave out what
    it seldom gets right; with `same_fields` it earns nothing then.

    Args:
        prompts: N prompts; not read.
        completions: N completions.
        answer: N objects that are right: mappings, or their JSON; of a list of them any one is.
        same_fields: an object with other fields than the right one's, whatever their values, earns
            nothing.

    Returns:
        N rewards in [0, 1].

    Raises:
        ValueError: an answer is no JSON object, or an empty one.
    """
    right = [_wanted(each) for each in answer]
    said = [_read(text_of(each)) for each in completions]
    pairs = zip(said, right, strict=True)
    return [max(_share(one, other, same_fields) for other in accepted) for one, accepted in pairs]


def _wanted(answer: Any) -> list[Mapping[str, Any]]:
    given = answer if isinstance(answer, list) and answer else [answer]
    wanted = [each if isinstance(each, Mapping) else _read(str(each)) for each in given]
    require(all(wanted), f"json_fields: answer {answer!r} is no JSON object with a field.")
    return wanted


def _read(text: str) -> dict[str, Any]:
    """The object that a text is; an empty one if it is none."""
    try:
        found = json.loads(text, object_pairs_hook=_each_once, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    require(len(pairs) == len(dict(pairs)), "a field stands twice")
    return dict(pairs)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _share(said: Mapping[str, Any], right: Mapping[str, Any], same_fields: bool) -> float:
    if same_fields and said.keys() != right.keys():
        return 0.0
    same = [name for name in right if name in said and _equal(said[name], right[name])]
    return len(same) / len(said.keys() | right.keys())


def _equal(one: Any, other: Any) -> bool:
    match one, other:
        case str(), str():
            return one.strip().casefold() == other.strip().casefold()
        case bool(), bool():
            return one == other
        case (bool(), _) | (_, bool()):  # which Python takes for numbers
            return False
        case list(), list():
            return len(one) == len(other) and all(map(_equal, one, other))
        case dict(), dict():
            return one.keys() == other.keys() and all(_equal(one[n], other[n]) for n in one)
        case _:
            return bool(one == other)
