"""Format of a completion."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from litgrpo.arguments import require
from litgrpo.text.answers import Completions, text_of


def reasoning_answer(
    prompts: Sequence[object],
    completions: Completions,
    *,
    reasoning_tag: str = "reasoning",
    answer_tag: str = "answer",
    partial: bool = False,
) -> list[float]:
    """1 for `<reasoning>..</reasoning><answer>..</answer>`, each tag once, in this order, else 0.

    Nothing but whitespace may stand around and between the two, and neither may be empty.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        reasoning_tag: name of the first tag.
        answer_tag: name of the second tag.
        partial: give a text that fails 0.1 for each of the four tags that it has exactly once: a
            slope for a policy that never finds the whole form by chance.

    Returns:
        N rewards in [0, 1].
    """
    tags = [f"<{reasoning_tag}>", f"</{reasoning_tag}>", f"<{answer_tag}>", f"</{answer_tag}>"]
    per_tag = 0.1 if partial else 0.0
    return [_tags_reward(text_of(completion), tags, per_tag) for completion in completions]


def _tags_reward(text: str, tags: Sequence[str], per_tag: float) -> float:
    once = sum(text.count(tag) == 1 for tag in tags)
    return 1.0 if once == len(tags) and _in_form(text, tags) else per_tag * once


def _in_form(text: str, tags: Sequence[str]) -> bool:
    """Whether the four tags, each of which is there once, stand in order around two texts."""
    pieces = []
    for tag in tags:
        piece, _, text = text.partition(tag)
        pieces.append(piece.strip())
    before, reasoning, between, answer = pieces
    # Tags out of order leave a piece of the wrong kind, or text behind the last tag.
    return bool(reasoning and answer) and not (before or between or text.strip())


def think_format(prompts: Sequence[object], completions: Completions) -> list[float]:
    """1 for a completion that starts with `<think>`, has it once and closes it, else 0.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.

    Returns:
        N rewards in {0, 1}.

    Source: TRL, `think_format_reward`.
    """
    texts = [text_of(completion) for completion in completions]
    return [
        float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text)
        for text in texts
    ]


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
