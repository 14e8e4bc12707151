"""Policies that play no game: what they say in each turn, without looking at what was asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from litgrpo.environments.base import Message, schemas_of
from litgrpo.environments.tool_calls import HermesFormat, TagFormat, format_of
from litgrpo.environments.tools import Tools

IDLE, ACTS, KNOWS, HOSTILE = "idle", "acts", "knows", "hostile"
LONG = 1_000_000  # characters of a hostile turn
TALK = "Let me think about it. I am sure that we can find out, if we go step by step."
CALLS = ('<tool_call>{"name": ', "<call>((", "[f(", '<tool_call>{"name": 7}</tool_call>')
# Values of JSON's types, as a policy would write them that knows the schema and nothing else.
VALUES = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}, "null": None}


@dataclass
class Game:
    """What a policy may look at: an episode as it went so far.

    Args:
        prompt: the prompt with what the environment added to it.
        sample: what the initial policy said in the best of its episodes, turn by turn.
        answer: the row's reference answer as a text; "" where there is none.
        heard: after each turn.
    """

    prompt: str
    sample: Sequence[str] = ()
    answer: str = ""
    heard: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Policy:
    """A way to speak.

    Args:
        name: for tables.
        kind: `idle` acts on nothing that it hears; `acts` does one thing again and again; `knows`
            says the reference answer; `hostile` must not break the environment.
        says: its next turn.
    """

    name: str
    kind: str
    says: Callable[[Game], str]


def scripted(environment: object, sampled: bool, answers: bool) -> list[Policy]:
    """The policies that an environment must not pay.

    Args:
        environment: which may show tools.
        sampled: there are episodes of the initial policy.
        answers: the rows have reference answers.
    """
    calls = call_texts(environment)
    return [
        Policy("says nothing", IDLE, lambda game: ""),
        Policy("only talks", IDLE, lambda game: TALK),
        Policy("loops", IDLE, lambda game: "and again " * 50),
        Policy("copies the prompt", IDLE, lambda game: game.prompt),
        Policy("copies what it hears", IDLE, lambda game: (game.heard or [game.prompt])[-1]),
        *[Policy("calls without end", ACTS, lambda game: calls)] * bool(calls),
        *[Policy("repeats a first turn", ACTS, lambda game: (*game.sample, "")[0])] * sampled,
        *[Policy("says the answer", KNOWS, lambda game: _told(game.answer))] * answers,
        *_hostile(),
    ]


def _hostile() -> list[Policy]:
    """Texts that no policy should be able to break an environment with."""
    texts = {
        "a million characters": "1 and (" * (LONG // 7),
        "a million digits": "7" * LONG,
        "strange characters": "\x00\u202e\ud800\U0001f600\u0661\u00b2\uff17\n\r\x1b[2J" * 20,
        "deep JSON": '<tool_call>{"name": "f", "arguments": ' + "[" * 5_000,
    }
    broken = [Policy("broken calls", HOSTILE, lambda game: CALLS[len(game.heard) % len(CALLS)])]
    return broken + [Policy(name, HOSTILE, _always(text)) for name, text in texts.items()]


def _always(text: str) -> Callable[[Game], str]:
    return lambda game: text


def _told(answer: str) -> str:
    return f"{answer} <answer>{answer}</answer>"


def call_texts(environment: object) -> str:
    """A call of each tool that fits its schema, in all three formats; "" where there are none.

    An environment reads one of the formats; the others are text around it.
    """
    calls = [_arguments(schema.get("function", schema)) for schema in schemas_of(environment)]
    own = format_of(environment.call_format) if isinstance(environment, Tools) else None
    json_tag = own.tag if isinstance(own, HermesFormat) else HermesFormat().tag
    short_tag = own.call_tag if isinstance(own, TagFormat) else TagFormat().call_tag
    as_json = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    as_python = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in calls
    ]
    texts = [f"<{json_tag}>{each}</{json_tag}>" for each in as_json]
    texts += [f"<{short_tag}>{each}</{short_tag}>" for each in as_python]
    fenced = f"\n```\n[{', '.join(as_python)}]\n```"
    return "".join([*texts, *[fenced] * bool(calls)])


def _arguments(function: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of a tool, and values for what it requires."""
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


def text_of(said: str | list[Message]) -> str:
    """What is heard, as one text."""
    if isinstance(said, str):
        return said
    return "\n".join(str(message.get("content", "")) for message in said)
