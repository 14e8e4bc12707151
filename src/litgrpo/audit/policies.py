"""Scripted policies that do not solve the task; environments must not reward them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from litgrpo.environments.base import Message, schemas_of
from litgrpo.environments.tool_caller import ToolCaller
from litgrpo.environments.tool_calls import HermesFormat, TagFormat, format_of

IDLE, ACTS, KNOWS, HOSTILE = "idle", "acts", "knows", "hostile"
TALK = "Let me think about it. I am sure that we can find out, if we go step by step."
CALLS = ('<tool_call>{"name": ', "<call>((", "[f(", '<tool_call>{"name": 7}</tool_call>')
# NUL, a reversed direction, half an emoji, an emoji, digits that `int` rejects, a cleared screen.
STRANGE = "\x00\u202e\ud800\U0001f600\u0661\u00b2\uff17\n\r\x1b[2J" * 20
# Arguments of each JSON type that fit a schema and carry no meaning.
VALUES = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}, "null": None}


@dataclass
class Game:
    """Episode so far, as a scripted policy sees it.

    Args:
        prompt: the prompt with what the environment added to it.
        sample: turns of the initial policy in its best episode.
        answer: reference answer of the row as a text; "" if it has none.
        observations: the observation after each turn.
    """

    prompt: str
    sample: Sequence[str] = ()
    answer: str = ""
    observations: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ScriptedPolicy:
    """Policy that computes its next turn from the episode so far, without a model.

    Args:
        name: for tables.
        kind: `idle` ignores all observations; `acts` repeats one action; `knows` gives the
            reference answer; `hostile` sends text that must not break the environment.
        respond: returns the next turn.
    """

    name: str
    kind: str
    respond: Callable[[Game], str]


def list_policies(
    environment: object, has_samples: bool, has_answers: bool
) -> list[ScriptedPolicy]:
    """Return the policies that an environment must not reward.

    Args:
        environment: its tools, if any, are called by one of the policies.
        has_samples: True if there are episodes of the initial policy.
        has_answers: True if the rows have reference answers.
    """
    calls = call_texts(environment)
    policies = [
        ScriptedPolicy("gives empty turns", IDLE, lambda game: ""),
        ScriptedPolicy("only talks", IDLE, lambda game: TALK),
        ScriptedPolicy("loops", IDLE, lambda game: "and again " * 50),
        ScriptedPolicy("copies the prompt", IDLE, lambda game: game.prompt),
        ScriptedPolicy("copies the observation", IDLE, copy_observation),
        ScriptedPolicy("calls without end", ACTS, lambda game: calls) if calls else None,
        ScriptedPolicy("repeats a first turn", ACTS, repeat_first_turn) if has_samples else None,
        ScriptedPolicy("gives the reference answer", KNOWS, give_answer) if has_answers else None,
        ScriptedPolicy("broken calls", HOSTILE, break_call),
        ScriptedPolicy("strange characters", HOSTILE, lambda game: STRANGE),
    ]
    return [policy for policy in policies if policy is not None]


def copy_observation(game: Game) -> str:
    """Return the last observation; at first the prompt."""
    return (game.observations or [game.prompt])[-1]


def repeat_first_turn(game: Game) -> str:
    """Return the first turn of the initial policy."""
    return game.sample[0] if game.sample else ""


def give_answer(game: Game) -> str:
    """Return the reference answer, also in tags."""
    return f"{game.answer} <answer>{game.answer}</answer>"


def break_call(game: Game) -> str:
    """Return one of the calls that cannot be parsed."""
    return CALLS[len(game.observations) % len(CALLS)]


def call_texts(environment: object) -> str:
    """Return a valid call of each tool in all three formats; "" if there are no tools.

    An environment parses one of the formats; to it, the others are ordinary text.
    """
    calls = [_arguments(schema.get("function", schema)) for schema in schemas_of(environment)]
    call_format = (
        format_of(environment.call_format) if isinstance(environment, ToolCaller) else None
    )
    json_tag = call_format.tag if isinstance(call_format, HermesFormat) else HermesFormat().tag
    short_tag = call_format.call_tag if isinstance(call_format, TagFormat) else TagFormat().call_tag
    as_json = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    as_python = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    texts = [f"<{json_tag}>{call}</{json_tag}>" for call in as_json]
    texts += [f"<{short_tag}>{call}</{short_tag}>" for call in as_python]
    if as_python:
        texts.append(f"\n```\n[{', '.join(as_python)}]\n```")
    return "".join(texts)


def _arguments(function: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a tool, and values of its required parameters."""
    parameters = function.get("parameters", {})
    properties = parameters.get("properties", {})
    return function["name"], {
        name: _value(properties.get(name, {})) for name in parameters.get("required", ())
    }


def _value(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    return VALUES.get(kind[0] if isinstance(kind, list) else str(kind), "1")


def text_of(observation: str | list[Message]) -> str:
    """Return an observation as one text."""
    if isinstance(observation, str):
        return observation
    return "\n".join(str(message.get("content", "")) for message in observation)
