"""Read the messages of a row: OpenAI's and ShareGPT's fields, parts of text, calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from litgrpo.arguments import require, type_with_article

Messages = list[dict[str, Any]]  # {"role": ..., "content": text}, as chat templates take them
EXPECTED = "expected [{role: user, content: text}, ...]"
ASSISTANT = "assistant"
# Names that ShareGPT, LangChain and Gemini use for the roles of chat templates.
ROLES = {
    **{role: role for role in ("system", "user", ASSISTANT, "tool")},
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "ai": ASSISTANT,
    "bot": ASSISTANT,
    "model": ASSISTANT,
    "function_call": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
}
TEXT_PARTS = {"text", "input_text", "output_text"}
PART_FIELDS = {"type", "text", "annotations", "cache_control", "citations", "index", "logprobs"}
# Fields that say with 0 or 1 whether a message is trained on: `weight` of OpenAI and Mistral,
# `train` and `training` of axolotl, `loss` of ms-swift, `loss_mask` and `trainable` of verl.
TRAINED = {
    *("weight", "train", "training", "train_on", "train_on_turn", "trainable"),
    *("loss", "loss_mask", "loss_scale", "loss_weight"),
}
MASKED = "masked"  # of torchtune, which says the opposite
# Fields that only some chat templates read, or nothing, and that do not change what a message is.
HARMLESS = {
    *("name", "id", "tool_calls", "tool_call_id", "function_call", "reasoning_content"),
    *("reasoning", "thinking", "tool_plan", "citations", "annotations", "channel", "recipient"),
    *("author", "message_id", "parent_id", "turn_id", "turn_identifier", "turn", "index"),
    *("end_turn", "timestamp", "time", "date", "created_at", "updated_at", "create_time"),
    *("update_time", "metadata", "meta", "model", "source", "language", "lang", "status"),
    *("state", "finish_reason", "stop_reason", "usage", "logprobs", "country", "hashed_ip"),
    *("header", "toxic", "redacted"),
}


def read_messages(messages: Any, place: str) -> Messages:
    """Return the messages of a row as chat templates take them: a role, and a text as content."""
    # Fields `from` and `value` (ShareGPT) become `role` and `content`, parts of text are joined,
    # and the content of a message that only calls tools becomes "". Fields that are null are left
    # out, and a message of the assistant that is not to be trained on, by one of the fields of
    # `TRAINED`, gets `weight` 0. Older `datasets` return {field: one value per message}.
    rows = as_rows(messages)
    require(
        isinstance(rows, list) and all(isinstance(message, Mapping) for message in rows),
        f"{place}: messages are {messages!r:.60}; {EXPECTED}",
    )
    return [
        _read_message(message, f"{place}, message {n}") for n, message in enumerate(rows, start=1)
    ]


def ends_with_assistant(messages: Messages) -> bool:
    """True if the last message of a prompt is the assistant's, which may be its answer."""
    return bool(messages) and messages[-1]["role"] == ASSISTANT


def with_system(messages: Messages, system: str | None) -> Messages:
    """Return messages with a system message at the start, unless they begin with one."""
    if system is None or has_system(messages):
        return messages
    return [{"role": "system", "content": system}, *messages]


def has_system(messages: Messages) -> bool:
    """True if messages begin with a system message."""
    return bool(messages) and messages[0]["role"] in ("system", "developer")


def looks_like_messages(value: Any) -> bool:
    """True for a list of messages, also as JSON, which is how a .csv file holds them."""
    rows = as_rows(value)
    return (
        isinstance(rows, list)
        and bool(rows)
        and all(isinstance(row, Mapping) and ("role" in row or "from" in row) for row in rows)
    )


def without_nulls(value: Any) -> Any:
    """Return messages without fields that are null, at any depth; other values unchanged.

    Columns of Parquet and Arrow give every message and every call the fields of all of them.

    Example:
        >>> call = {"name": "add", "arguments": {"a": 1, "b": None}}
        >>> without_nulls([{"role": "assistant", "content": None, "tool_calls": [call]}])
        [{'role': 'assistant', 'tool_calls': [{'name': 'add', 'arguments': {'a': 1}}]}]
        >>> without_nulls({"least": None})
        {'least': None}
    """
    return _drop_nulls(value) if looks_like_messages(value) else value


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _drop_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_drop_nulls(inner) for inner in value] if isinstance(value, list) else value


def as_rows(value: Any) -> Any:
    """Return JSON, one message, and {field: one value per message} as lists of messages.

    Other values are returned unchanged.
    """
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if isinstance(value, Mapping) and value and all(isinstance(v, list) for v in value.values()):
        lengths = set(map(len, value.values()))
        if len(lengths) == 1:
            return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    if isinstance(value, Mapping) and ("role" in value or "from" in value):
        return [value]
    return list(value) if isinstance(value, tuple) else value


def _read_message(fields: Mapping[str, Any], place: str) -> dict[str, Any]:
    message = {name: value for name, value in fields.items() if value is not None}
    for name, foreign_name in (("role", "from"), ("content", "value")):
        if name not in message and foreign_name in message:
            message = {
                name if key == foreign_name else key: value for key, value in message.items()
            }
    role = message.get("role")
    require(
        isinstance(role, str) and bool(role.strip()),
        f"{place}: has no role ({fields!r:.60}); {EXPECTED}",
    )
    role = str(role).strip()
    message["role"] = ROLES.get(role.lower(), role)
    if "content" not in message:
        calls = message.get("tool_calls") or message.get("function_call")
        require(bool(calls), f"{place}: has no content ({fields!r:.60}); {EXPECTED}")
    content = _read_content(message.get("content", ""), place)
    trained = _pop_marks(message, place)
    message = {"role": message["role"], **message, "content": content}
    return message if trained else message | {"weight": 0}


def _pop_marks(message: dict[str, Any], place: str) -> bool:
    """Remove the marks of training from a message; return False if it is not to be trained on."""
    marks = {name: message.pop(name) for name in [*message] if name in TRAINED or name == MASKED}
    trained = set()
    for name, value in marks.items():
        require(
            value in (0, 1),
            f"{place}: {name} is {value!r}; it says whether the message is trained on: set 0 or 1",
        )
        trained.add(bool(value) != (name == MASKED))
    require(len(trained) <= 1, f"{place}: {marks} contradict each other; keep one of them")
    is_answer = message["role"] == ASSISTANT
    require(
        is_answer or True not in trained,
        f"{place}: {marks} trains on a message of {message['role']!r}; only those of the assistant "
        "are trained on: leave it out",
    )
    return not is_answer or False not in trained


def is_trained(message: Mapping[str, Any]) -> bool:
    """Return True for a message of the assistant that is not excluded from training."""
    return message["role"] == ASSISTANT and bool(message.get("weight", 1))


def check_fields(messages: Messages, place: str, template: Any = "") -> None:
    """Check that each field of messages has a known meaning, or is named by the chat template."""
    for message in messages:
        for name in ("meta", "metadata"):
            about = message.get(name)
            marks = {MASKED, *TRAINED} & about.keys() if isinstance(about, Mapping) else set()
            require(
                not marks,
                f"{place}: {name} of a message has {', '.join(sorted(marks))}, which litgrpo reads "
                "beside the content only: write it there, or leave it out",
            )
        for name in sorted(message.keys() - HARMLESS - {"role", "content", "weight"}):
            is_empty = message[name] in ("", [], {})
            require(
                is_empty or re.search(rf"\b{re.escape(name)}\b", str(template)) is not None,
                f"{place}: a message of {message['role']!r} ({message['content']!r:.40}) has the "
                f"field {name!r} ({message[name]!r:.40}), which neither litgrpo nor a chat "
                "template reads: leave it out; `weight: 0` excludes a message from training",
            )


def _read_content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    parts = [content] if isinstance(content, Mapping) else content
    kind = type_with_article(content)
    readable = isinstance(parts, Sequence) and all(isinstance(part, Mapping) for part in parts)
    require(
        readable and bool(parts), f"{place}: content is {content!r:.60} ({kind}), expected a text"
    )
    texts = []
    for part in parts:
        kind = str(part.get("type") or "text")
        text = part.get("text")
        require(
            kind in TEXT_PARTS and isinstance(text, str),
            f"{place}: content has a part of type {kind!r} ({dict(part)!r:.60}); litgrpo reads "
            "texts only",
        )
        unread = sorted(name for name in part.keys() - PART_FIELDS if part[name] is not None)
        require(
            not unread,
            f"{place}: a part of the content has the field {', '.join(unread[:1])!r}, which is not "
            "read: leave it out; `weight: 0` excludes a whole message from training",
        )
        texts.append(str(text))
    return "".join(texts)
