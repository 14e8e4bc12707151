"""Conversations of agents as token ids, and the calls that the policy writes in its replies."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from litgrpo.agents.chat_api import ApiError
from litgrpo.data.messages import Messages
from litgrpo.data.rendering import TEMPLATE_ERRORS, build_prompt_format
from litgrpo.environments.tool import Tool, ToolResult
from litgrpo.environments.tool_calls import CallFormat, ToolCall
from litgrpo.rollout.chat_format import describe_template_error
from litgrpo.rollout.turn_format import InlineFormat, TemplateFormat, TurnFormat

MAX_TOOL_SETS = 64  # turn formats that are cached, one for each list of tools
ID_CHARS = 9  # of the id of a tool call; Mistral's templates want exactly nine
Schemas = list[dict[str, Any]]
# Returns the text that the policy wrote for a message of the assistant; None: it did not write it.
WrittenText = Callable[[dict[str, Any]], str | None]


class ConversationFormat(ABC):
    """Encodes the messages of requests; `call_format` is how the policy writes tool calls."""

    def __init__(self, call_format: CallFormat) -> None:
        self.call_format = call_format

    @abstractmethod
    def encode_opening(self, messages: Messages, tools: Schemas, written: WrittenText) -> list[int]:
        """Return the tokens of a conversation, up to where the next reply begins.

        Raises:
            ApiError: 400, the conversation cannot be expressed.
        """

    @abstractmethod
    def encode_following(
        self, messages: Messages, tools: Schemas, *, turn_has_end: bool, truncated: bool
    ) -> list[int] | None:
        """Return the tokens of messages between a reply of the policy and its next one.

        None if these messages cannot follow a reply, so that the conversation has to be encoded
        from its beginning. A reply `turn_has_end` if its last token is an end token of the policy,
        and is `truncated` if a token limit ended it.
        """


class InlineConversations(ConversationFormat):
    """Concatenates texts, for policies without a chat template.

    Results of tools are written by the call format; `tools` themselves are not shown. `closing` is
    the token that ends a reply which a token limit cut.
    """

    def __init__(self, turn_format: InlineFormat, call_format: CallFormat, closing: int) -> None:
        super().__init__(call_format)
        self.turn_format, self.closing = turn_format, closing
        self.prompt_format = build_prompt_format(None, False)

    def encode_opening(self, messages: Messages, tools: Schemas, written: WrittenText) -> list[int]:
        texts = []
        for run in self._runs(messages):
            if run[0]["role"] != "assistant":
                texts.append(self._text(run))
                continue
            for message in run:
                text = written(message)
                if text is None and "tool_calls" in message:
                    raise ApiError(
                        400,
                        "a message has tool_calls that the policy did not write; with "
                        "model.episode.turn_format inline they have no text",
                    )
                texts.append(message["content"] if text is None else text)
        tokenizer, split = self.turn_format.tokenizer, self.turn_format.split_special_tokens
        text = "".join(texts)
        if not text:
            raise ApiError(400, "the messages have no text")
        return self.prompt_format.encode_opening("", {}, text, tokenizer, split)

    def encode_following(
        self, messages: Messages, tools: Schemas, *, turn_has_end: bool, truncated: bool
    ) -> list[int] | None:
        if not messages or any(message["role"] == "assistant" for message in messages):
            return None
        text = "".join(self._text(run) for run in self._runs(messages))
        closing = [self.closing] if truncated else []
        return closing + self.turn_format.encode(text, turn_has_end)

    def _runs(self, messages: Messages) -> list[Messages]:
        """Return messages in runs of one role."""
        runs: list[Messages] = []
        for message in messages:
            if runs and runs[-1][0]["role"] == message["role"]:
                runs[-1].append(message)
            else:
                runs.append([message])
        return runs

    def _text(self, run: Messages) -> str:
        observation: str | Messages = run
        if run[0]["role"] == "tool":
            results = [
                ToolResult(message.get("name", "tool"), message["content"]) for message in run
            ]
            observation = self.call_format.format_results(results)
        if isinstance(observation, str):
            return observation
        return "".join(message["content"] for message in observation)


class TemplateConversations(ConversationFormat):
    """Renders conversations with the chat template of the run."""

    def __init__(self, turn_format: TemplateFormat, call_format: CallFormat) -> None:
        super().__init__(call_format)
        self.turn_format = turn_format
        self.with_tools: dict[str, TemplateFormat] = {}

    def _format(self, tools: Schemas) -> TemplateFormat:
        """Return the turn format for a list of tools, which is checked like that of the run."""
        if not tools:
            return self.turn_format
        key = json.dumps(tools)
        if key not in self.with_tools:
            if len(self.with_tools) >= MAX_TOOL_SETS:
                self.with_tools.clear()
            chat_format = self.turn_format.chat_format
            chat = replace(chat_format.chat, tools=tools)
            turn_format = TemplateFormat(replace(chat_format, chat=chat))
            try:
                turn_format.check(tools=True)
            except ValueError as error:
                raise ApiError(400, str(error), "template_error") from error
            self.with_tools[key] = turn_format
        return self.with_tools[key]

    def encode_opening(self, messages: Messages, tools: Schemas, written: WrittenText) -> list[int]:
        chat_format = self._format(tools).chat_format
        prepared = chat_format.to_messages([_for_template(message) for message in messages])
        try:
            safe, placeholders = chat_format.hide(prepared)
            text = chat_format.render(safe)
        except (*TEMPLATE_ERRORS, RecursionError) as error:  # arguments of a call that are deep
            raise ApiError(400, describe_template_error(error), "template_error") from error
        return chat_format.encode(text, placeholders)

    def encode_following(
        self, messages: Messages, tools: Schemas, *, turn_has_end: bool, truncated: bool
    ) -> list[int] | None:
        observed = [
            {name: value for name, value in message.items() if name != "tool_call_id"}
            for message in messages
        ]
        try:
            return self._format(tools).encode(observed, turn_has_end)
        except ValueError:
            return None


def build_conversation_format(
    turn_format: TurnFormat, call_format: CallFormat, closing: int
) -> ConversationFormat:
    """Build the conversation format of a turn format; see `InlineConversations` for `closing`."""
    if isinstance(turn_format, TemplateFormat):
        return TemplateConversations(turn_format, call_format)
    assert isinstance(turn_format, InlineFormat)
    return InlineConversations(turn_format, call_format, closing)


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with arguments of calls as objects, as chat templates take them."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = call["function"]["arguments"]
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls}


def with_tool_names(messages: Messages) -> Messages:
    """Give results of tools the name of the tool, which the API leaves to the id of the call."""
    names: dict[str, str] = {}
    with_names = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        name = names.get(message.get("tool_call_id", ""))
        with_names.append(message if name is None else message | {"name": name})
    return with_names


@dataclass(frozen=True)
class ParsedReply:
    """A reply of the policy as a message of the API, and the names of the tools that it calls."""

    message: dict[str, Any]
    calls: list[str] = field(default_factory=list)


def parse_reply(text: str, tools: Schemas, call_format: CallFormat, name: str) -> ParsedReply:
    """Return a reply as a message; malformed calls stay in its text.

    Args:
        text: what the policy generated, without its end token.
        tools: JSON schemas of the request; [] parses no calls.
        call_format: how the policy writes calls.
        name: of the reply, from which the ids of its calls are made.
    """
    plain = ParsedReply({"role": "assistant", "content": text})
    if not tools:
        return plain
    functions = {schema["function"]["name"]: schema for schema in tools}
    tool_of = {tool: Tool(tool, print, schema) for tool, schema in functions.items()}
    parsed = call_format.parse_turn(text, tool_of)
    if not parsed or any(call.wrong for call in parsed):
        return plain
    calls = []
    for number, call in enumerate(parsed):
        arguments = _name_arguments(call, tool_of)
        if arguments is None:
            return plain
        digest = hashlib.sha256(f"{name} {number}".encode()).hexdigest()[:ID_CHARS]
        function = {"name": call.name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": digest, "type": "function", "function": function})
    before = call_format.text_before_calls(text)
    message = {"role": "assistant", "content": before or None, "tool_calls": calls}
    return ParsedReply(message, [call.name for call in parsed])


def _name_arguments(call: ToolCall, tools: Mapping[str, Tool]) -> dict[str, Any] | None:
    """Return the arguments of a call by name; None if positions have no names."""
    if not call.positional:
        return dict(call.arguments)
    names: Sequence[str] = list(tools[call.name].parameters) if call.name in tools else ()
    if len(call.positional) > len(names):
        return None
    by_position = dict(zip(names, call.positional, strict=False))
    if by_position.keys() & call.arguments.keys():
        return None
    return by_position | dict(call.arguments)
