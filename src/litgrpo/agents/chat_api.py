"""Chat completions of the OpenAI API: read requests, write replies and streams."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from litgrpo.data.messages import Messages
from litgrpo.http import repr_of

MAX_CHOICES, MAX_STOPS = 128, 16
MAX_DEPTH = 64  # of lists and objects in each other
# Parameters that change the distribution from which tokens are drawn, and their neutral value. The
# policy is trained on what `model.sampling` draws, so they are ignored, with a warning.
SAMPLING_PARAMETERS: dict[str, Any] = {
    "temperature": None,  # compared with that of the run
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "seed": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "tool_choice": "auto",
}
TEXT_PARTS = ("text", "input_text", "output_text")


class ApiError(Exception):
    """Error that is returned to the agent, with an HTTP status and a machine-readable code.

    Example:
        >>> ApiError(404, "no such page", "not_found").body["error"]["code"]
        'not_found'
    """

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code

    @property
    def body(self) -> dict[str, Any]:
        """The error as the API returns it."""
        kind = "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "code": self.code, "param": None}}


def check(condition: bool, message: str, code: str = "invalid_request") -> None:
    """Reject a request if the condition does not hold."""
    if not condition:
        raise ApiError(400, message, code)


# --- the JSON of a request; fields that have no effect on the tokens are ignored ---


def _join_parts(content: Any) -> str:
    """Return the text of a content; parts that are images or audio are rejected."""
    content = "" if content is None else content
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    text = ""
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") in TEXT_PARTS
        if not is_text or not isinstance(part.get("text"), str):
            raise ValueError("must be a text or parts of type text")
        text += part["text"]
    return text


def _text(value: Any) -> str:
    return str(value or "")


class CalledFunction(BaseModel):
    """A called function: its name, and arguments as JSON."""

    name: str
    arguments: str = ""


class ToolCall(BaseModel):
    """A call of a function."""

    id: Annotated[str, BeforeValidator(_text)] = ""
    function: CalledFunction


class Message(BaseModel):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_join_parts)] = ""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Annotated[str, BeforeValidator(_text)] = ""

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates expect it."""
        # Templates know the older name of developers.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content}
        if role == "tool":
            message["tool_call_id"] = self.tool_call_id
        if role == "assistant" and self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.model_dump()}
                for call in self.tool_calls
            ]
        return message


class Parameters(BaseModel):
    """JSON schema of a function's arguments."""

    properties: dict[str, dict[str, Any]] = {}
    required: list[str] = []

    @model_validator(mode="after")
    def _check_required(self) -> Parameters:
        if not self.properties.keys() >= set(self.required):
            raise ValueError("required names must be properties")
        return self


class DeclaredFunction(BaseModel):
    """A function that the policy may call."""

    name: str
    description: str | None = None
    parameters: Parameters | None = None


class Tool(BaseModel):
    """A tool that the request declares."""

    function: DeclaredFunction


class RequestBody(BaseModel):
    """Fields of a request that are used unchanged."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] = []
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
        Field(max_length=MAX_STOPS),
    ] = []
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1


@dataclass(frozen=True)
class ChatRequest:
    """A checked request for chat completions.

    Example:
        >>> asked = {"messages": [{"role": "user", "content": "6*7?"}], "max_tokens": 8}
        >>> ChatRequest.read(asked).max_tokens
        8
    """

    messages: Messages  # with texts as contents
    tools: list[dict[str, Any]] = field(default_factory=list)
    model: str = "policy"  # any name
    max_tokens: int | None = None  # None: as many as the run allows
    stop: tuple[str, ...] = ()  # texts at which the reply ends; they are not part of it
    num_choices: int = 1
    parse_tools: bool = True  # False if the agent forbids calls (`tool_choice: none`)
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False  # end the stream with the numbers of tokens
    ignored: dict[str, Any] = field(default_factory=dict)  # sampling parameters without an effect

    @staticmethod
    def read(body: Any) -> ChatRequest:
        """Check the JSON of a request.

        Raises:
            ApiError: 400, it is malformed or asks for something that is not supported.
        """
        check(isinstance(body, dict), "the body must be a JSON object")
        fields = {name: value for name, value in _clean(body).items() if value is not None}
        for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
            check(name not in fields, f"{name} is not supported; use {instead}")
        check(not fields.get("top_logprobs"), "top_logprobs is not supported; use logprobs")
        check(fields.get("modalities", ["text"]) == ["text"], "only text is supported")
        try:
            read = RequestBody.model_validate(fields, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            location = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in first["loc"])
            problem = first["msg"].removeprefix("Value error, ")
            got = "" if first["type"] == "missing" else f", got {repr_of(first['input'])}"
            raise ApiError(400, f"{location[1:]}: {problem}{got}") from error
        options = fields.get("stream_options")
        return ChatRequest(
            messages=[message.plain() for message in read.messages],
            tools=[_describe_tool(tool["function"]) for tool in fields.get("tools", [])],
            model=str(fields.get("model", "policy")),
            max_tokens=read.max_completion_tokens or read.max_tokens,
            stop=tuple(read.stop),
            num_choices=read.n,
            parse_tools=fields.get("tool_choice") != "none",
            logprobs=fields.get("logprobs") is True,
            stream=fields.get("stream") is True,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
            ignored={
                name: fields[name]
                for name, neutral in SAMPLING_PARAMETERS.items()
                if name in fields and fields[name] != neutral and fields[name] != "none"
            },
        )


def _clean(value: Any, depth: int = 0) -> Any:
    """Replace halves of surrogate pairs, which no tokenizer accepts, in all texts of a value.

    Raises:
        ApiError: 400, it is nested too deeply for templates, which call themselves.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    check(depth <= MAX_DEPTH, f"the body is nested more than {MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_clean(part, depth + 1) for part in value]
    if isinstance(value, dict):
        return {_clean(name): _clean(part, depth + 1) for name, part in value.items()}
    return value


def _describe_tool(function: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as templates expect it; the order of names is part of the prompt."""
    parameters = {"type": "object", "properties": {}} | (function.get("parameters") or {})
    described = {"description": function.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function | described}


@dataclass(frozen=True)
class Choice:
    """One reply of the policy; `tokens` and `logprobs` are listed if the agent asks for them.

    Example:
        >>> Choice({"role": "assistant", "content": "42"}, "stop", 2).finish_reason
        'stop'
    """

    message: dict[str, Any]  # as the API returns it
    finish_reason: str  # `stop`, `length` or `tool_calls`
    num_tokens: int
    tokens: Sequence[str] = ()
    logprobs: Sequence[float] = ()

    @property
    def logprobs_body(self) -> dict[str, Any]:
        """Log-probabilities as the API returns them."""
        pairs = zip(self.tokens, self.logprobs, strict=True)
        return {
            "content": [
                {
                    "token": token,
                    "logprob": logprob,
                    "bytes": list(token.encode("utf-8", "replace")),
                    "top_logprobs": [],
                }
                for token, logprob in pairs
            ],
        }


@dataclass(frozen=True)
class ChatReply:
    """Replies to a request, as one object or as a stream.

    Example:
        >>> request = ChatRequest([{"role": "user", "content": "6*7?"}])
        >>> choice = Choice({"role": "assistant", "content": "42"}, "stop", num_tokens=1)
        >>> ChatReply(request, [choice], prompt_tokens=4).body["usage"]["total_tokens"]
        5
    """

    request: ChatRequest
    choices: list[Choice]
    prompt_tokens: int
    name: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens."""
        sampled = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": kind,
            "created": int(time.time()),
            "model": self.request.model,
        }

    def _list_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        return choice.logprobs_body if self.request.logprobs else None

    @property
    def body(self) -> dict[str, Any]:
        """The whole reply as one JSON object."""
        choices = [
            {
                "index": number,
                "message": choice.message,
                "logprobs": self._list_logprobs(choice),
                "finish_reason": choice.finish_reason,
            }
            for number, choice in enumerate(self.choices)
        ]
        return self._envelope("chat.completion") | {"choices": choices, "usage": self.usage}

    def events(self) -> Iterator[str]:
        """Yield the reply as the data of server-sent events."""
        envelope = self._envelope("chat.completion.chunk")
        for number, choice in enumerate(self.choices):
            delta: dict[str, Any] = {**choice.message}
            if "tool_calls" in delta:
                calls = enumerate(delta["tool_calls"])
                delta["tool_calls"] = [{"index": index, **call} for index, call in calls]
            for part, reason in ((delta, None), ({}, choice.finish_reason)):
                logprobs = None if reason else self._list_logprobs(choice)
                chunk = {"index": number, "delta": part, "logprobs": logprobs}
                chunk["finish_reason"] = reason
                yield json.dumps(envelope | {"choices": [chunk]})
        if self.request.include_usage:
            yield json.dumps(envelope | {"choices": [], "usage": self.usage})
        yield "[DONE]"
