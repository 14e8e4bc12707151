"""Rewards for the format of a completion: tags and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from litgrpo.arguments import require
from litgrpo.text.answers import Completions, list_answers, text_of
from litgrpo.text.normalization import fold, normalize
from litgrpo.text.strict_json import parse_json


def reasoning_answer(
    prompts: Sequence[object],
    completions: Completions,
    *,
    reasoning_tag: str = "reasoning",
    answer_tag: str = "answer",
    partial_credit: bool = False,
    prompt_texts: Sequence[str] | None = None,
) -> list[float]:
    """Return 1 for `<reasoning>..</reasoning><answer>..</answer>`, else 0.

    Each tag must appear once and in this order, with only whitespace around and between the two
    elements. Neither may be empty. A first tag with which the prompt ends, as some chat templates
    write it, belongs to the completion.

    Args:
        reasoning_tag: name of the first tag.
        answer_tag: name of the second tag.
        partial_credit: give a malformed completion 0.1 for each of the four tags that appears
            exactly once. Use it if the model never finds the whole format by chance.

    Returns:
        N rewards in [0, 1].

    Example:
        >>> good = "<reasoning>3 + 4 = 7</reasoning><answer>7</answer>"
        >>> reasoning_answer(["3 + 4?"] * 2, [good, "7"])
        [1.0, 0.0]
    """
    tags = [f"<{reasoning_tag}>", f"</{reasoning_tag}>", f"<{answer_tag}>", f"</{answer_tag}>"]
    per_tag = 0.1 if partial_credit else 0.0
    rewards = []
    for text in _with_opening(prompts, prompt_texts, completions, tags[0]):
        num_once = sum(text.count(tag) == 1 for tag in tags)
        well_formed = num_once == len(tags) and _is_well_formed(text, tags)
        rewards.append(1.0 if well_formed else per_tag * num_once)
    return rewards


def _is_well_formed(text: str, tags: Sequence[str]) -> bool:
    """Return True if the four tags, each present once, enclose two texts in order."""
    pieces = []
    for tag in tags:
        piece, _, text = text.partition(tag)
        pieces.append(piece.strip())
    before, reasoning, between, answer = pieces
    # Tags out of order leave an empty element, or text behind the last tag.
    return bool(reasoning and answer) and not (before or between or text.strip())


def think_format(
    prompts: Sequence[object],
    completions: Completions,
    *,
    prompt_texts: Sequence[str] | None = None,
) -> list[float]:
    r"""Return 1 for a completion that starts with `<think>`, has it once and closes it, else 0.

    If the prompt ends with `<think>`, as the chat templates of some reasoning models write it, the
    tag belongs to the completion.

    Returns:
        N rewards in {0, 1}.

    Example:
        >>> think_format(["3 + 4?"] * 2, ["<think>3 + 4 = 7</think>7", "7"])
        [1.0, 0.0]
        >>> think_format(["3 + 4?<think>\n"], ["3 + 4 = 7</think>7"])
        [1.0]

    Source: TRL, `think_format_reward`.
    """
    texts = _with_opening(prompts, prompt_texts, completions, "<think>")
    return [
        float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text)
        for text in texts
    ]


def _with_opening(
    prompts: Sequence[object],
    prompt_texts: Sequence[str] | None,
    completions: Completions,
    tag: str,
) -> list[str]:
    """Return the completions, with the tag in front if the prompt ends with it."""
    asked = prompts if prompt_texts is None else prompt_texts
    return [
        tag * (isinstance(prompt, str) and prompt.rstrip().endswith(tag)) + text_of(completion)
        for prompt, completion in zip(asked, completions, strict=True)
    ]


def json_fields(
    prompts: Sequence[object],
    completions: Completions,
    answer: Sequence[Any],
    *,
    require_same_fields: bool = False,
) -> list[float | None]:
    """Return the fraction of correct fields of a completion that is exactly one JSON object.

    The fraction is over the union of both objects' fields, so that an additional field costs as
    much as a missing one. A number is not equal to its text. Texts are compared without case,
    surrounding whitespace and Unicode spelling. A completion that `json.loads` rejects or that
    repeats a field gets 0.

    Leaving a field out costs as much as an incorrect value, so a policy may learn to leave out
    fields that are difficult. `require_same_fields` prevents this.

    Args:
        answer: N reference objects: mappings, or their JSON; or lists of these, any of which is
            correct.
        require_same_fields: give 0 if the completion's fields are not exactly the reference's.

    Returns:
        N rewards in [0, 1]; None without a reference object.

    Raises:
        ValueError: an answer is not a JSON object, or the text of an empty one.

    Example:
        >>> json_fields(["?"] * 2, ['{"a": 1, "b": 2}', "none"], [{"a": 1, "b": 3}] * 2)
        [0.5, 0.0]
    """
    rewards = []
    for completion, reference in zip(completions, answer, strict=True):
        fields = _parse_object(text_of(completion))
        accepted = _parse_references(reference)
        shares = [_field_share(fields, one, require_same_fields) for one in accepted]
        rewards.append(max(shares, default=None))
    return rewards


def _parse_references(answer: Any) -> list[Mapping[str, Any]]:
    objects = [
        one if isinstance(one, Mapping) else _parse_object(str(one)) for one in list_answers(answer)
    ]
    require(all(objects), f"json_fields: answer {answer!r} is not a JSON object with a field")
    return objects


def _parse_object(text: str) -> dict[str, Any]:
    """Return the JSON object of a text, or an empty one if the text is not a JSON object."""
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _field_share(
    fields: Mapping[str, Any], reference: Mapping[str, Any], require_same_fields: bool
) -> float:
    fields, reference = _normalize_names(fields), _normalize_names(reference)
    if require_same_fields and fields.keys() != reference.keys():
        return 0.0
    shared = [name for name in reference if name in fields]
    correct = [name for name in shared if _equal(fields[name], reference[name])]
    return len(correct) / len(fields.keys() | reference.keys())


def _normalize_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {normalize(name): value for name, value in fields.items()}


def _equal(one: Any, other: Any) -> bool:
    match one, other:
        case str(), str():
            return fold(one).strip() == fold(other).strip()
        case bool(), bool():
            return one == other
        case (bool(), _) | (_, bool()):  # in Python True == 1
            return False
        case list(), list():
            return len(one) == len(other) and all(map(_equal, one, other))
        case dict(), dict():
            one, other = _normalize_names(one), _normalize_names(other)
            return one.keys() == other.keys() and all(_equal(one[n], other[n]) for n in one)
        case _:
            return bool(one == other)
