"""Chat completions of the OpenAI API: read requests, write replies and streams."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from litgrpo.data.messages import Messages

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
ROLES = {"developer": "system"}  # chat templates know the older name
TEXT_PARTS = ("text", "input_text", "output_text")


class ApiError(Exception):
    """Error that is returned to the agent.

    Args:
        status: HTTP status.
        message: what was wrong, in one line.
        code: machine-readable name.

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
    """Reject a request.

    Raises:
        ApiError: 400, if the condition does not hold.
    """
    if not condition:
        raise ApiError(400, message, code)


@dataclass(frozen=True)
class ChatRequest:
    """A checked request for chat completions.

    Args:
        messages: with texts as contents.
        tools: JSON schemas.
        model: name that the agent gave; any.
        max_tokens: limit that the agent set; None: that of the run.
        stop: texts at which the reply ends; they are not part of it.
        num_choices: replies to the same messages.
        parse_tools: False if the agent forbids calls (`tool_choice: none`).
        logprobs: return the log-probability of each token.
        stream: send the reply as events.
        include_usage: end the stream with the numbers of tokens.
        ignored: {name: value} of sampling parameters that have no effect.

    Example:
        >>> asked = {"messages": [{"role": "user", "content": "6*7?"}], "max_tokens": 8}
        >>> ChatRequest.read(asked).max_tokens
        8
    """

    messages: Messages
    tools: list[dict[str, Any]] = field(default_factory=list)
    model: str = "policy"
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    parse_tools: bool = True
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    ignored: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(body: Any) -> ChatRequest:
        """Check the JSON of a request.

        Raises:
            ApiError: 400, it is malformed or asks for something that is not supported.
        """
        check(isinstance(body, dict), "the body must be a JSON object")
        body = _clean(body)
        given = {name: value for name, value in body.items() if value is not None}
        messages = given.get("messages")
        check(isinstance(messages, list) and bool(messages), "messages must be a list of messages")
        for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
            check(name not in given, f"{name} is not supported; use {instead}")
        check(not given.get("top_logprobs"), "top_logprobs is not supported; use logprobs")
        check(given.get("modalities", ["text"]) == ["text"], "only text is supported")
        stop = given.get("stop", [])
        stop = [stop] if isinstance(stop, str) else stop
        valid = isinstance(stop, list) and all(isinstance(each, str) and each for each in stop)
        check(
            valid and len(stop) <= MAX_STOPS,
            f"stop must be a text or a list of at most {MAX_STOPS} texts",
        )
        max_tokens = given.get("max_completion_tokens", given.get("max_tokens"))
        check(
            max_tokens is None or (type(max_tokens) is int and max_tokens >= 1),
            "max_tokens must be a whole number of at least 1",
        )
        choices = given.get("n", 1)
        check(
            type(choices) is int and 1 <= choices <= MAX_CHOICES,
            f"n must be a whole number from 1 to {MAX_CHOICES}",
        )
        options = given.get("stream_options")
        return ChatRequest(
            messages=[_read_message(each, number) for number, each in enumerate(messages or ())],
            tools=_read_tools(given.get("tools", [])),
            model=str(given.get("model", "policy")),
            max_tokens=max_tokens,
            stop=tuple(stop),
            num_choices=choices,
            parse_tools=given.get("tool_choice") != "none",
            logprobs=given.get("logprobs") is True,
            stream=given.get("stream") is True,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
            ignored={
                name: given[name]
                for name, neutral in SAMPLING_PARAMETERS.items()
                if name in given and given[name] != neutral and given[name] != "none"
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
        return [_clean(each, depth + 1) for each in value]
    if isinstance(value, dict):
        return {_clean(name): _clean(each, depth + 1) for name, each in value.items()}
    return value


def _read_message(given: Any, number: int) -> dict[str, Any]:
    """Return role, content and calls of a message; other fields have no effect on the tokens."""
    place = f"messages[{number}]"
    check(isinstance(given, dict), f"{place} must be an object")
    role = given.get("role")
    known = ("system", "developer", "user", "assistant", "tool")
    check(role in known, f"{place}.role is {role!r:.40}; it must be one of {', '.join(known)}")
    message = {"role": ROLES.get(role, role), "content": _read_content(given, place)}
    if role == "tool":
        message["tool_call_id"] = str(given.get("tool_call_id") or "")
    calls = given.get("tool_calls") or []
    check(isinstance(calls, list), f"{place}.tool_calls must be a list")
    if role == "assistant" and calls:
        message["tool_calls"] = [_read_call(call, place) for call in calls]
    return message


def _read_content(given: dict[str, Any], place: str) -> str:
    content = given.get("content")
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [_read_part(part) for part in parts]
    check(None not in texts, f"{place}.content must be a text or parts of type text")
    return "".join(filter(None, texts))


def _read_part(part: Any) -> str | None:
    """Return the text of a part of a message; None for images, audio and malformed parts."""
    if not (isinstance(part, dict) and part.get("type") in TEXT_PARTS):
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None


def _read_call(given: Any, place: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    valid = (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", ""), str)
    )
    check(valid, f"{place}.tool_calls must be calls of functions with arguments as JSON texts")
    assert isinstance(function, dict)
    called = {"name": function["name"], "arguments": function.get("arguments", "")}
    return {"id": str(given.get("id") or ""), "type": "function", "function": called}


def _read_tools(given: Any) -> list[dict[str, Any]]:
    check(isinstance(given, list), "tools must be a list")
    tools = []
    for number, each in enumerate(given):
        place = f"tools[{number}]"
        function = each.get("function") if isinstance(each, dict) else None
        check(
            isinstance(function, dict) and isinstance(function.get("name"), str),
            f"{place} must be a function with a name",
        )
        assert isinstance(function, dict)
        parameters = function.get("parameters") or {}
        text = function.get("description") or ""
        check(
            isinstance(parameters, dict) and isinstance(text, str),
            f"{place}.function needs a text as description and an object as parameters",
        )
        parameters = {"type": "object", "properties": {}} | parameters
        properties, required = parameters["properties"], parameters.get("required", [])
        check(
            isinstance(properties, dict)
            and all(isinstance(one, dict) for one in properties.values())
            and isinstance(required, list)
            and all(isinstance(name, str) and name in properties for name in required),
            f"{place}.function.parameters must be a JSON schema of an object",
        )
        described = {**function, "description": text, "parameters": parameters}
        tools.append({"type": "function", "function": described})
    return tools


@dataclass(frozen=True)
class Choice:
    """One reply of the policy.

    Args:
        message: as the API returns it.
        finish_reason: `stop`, `length` or `tool_calls`.
        num_tokens: number of its tokens.
        tokens: their texts, if log-probabilities were asked for.
        logprobs: log-probability of each token.

    Example:
        >>> Choice({"role": "assistant", "content": "42"}, "stop", 2).finish_reason
        'stop'
    """

    message: dict[str, Any]
    finish_reason: str
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
    """Replies to a request.

    Args:
        request: the request.
        choices: its replies.
        prompt_tokens: tokens of the messages.
        name: its id.

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

    @property
    def body(self) -> dict[str, Any]:
        """The whole reply as one JSON object."""
        choices = [
            {
                "index": number,
                "message": choice.message,
                "logprobs": choice.logprobs_body if self.request.logprobs else None,
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
                delta["tool_calls"] = [{"index": place, **call} for place, call in calls]
            logprobs = choice.logprobs_body if self.request.logprobs else None
            for part, reason in ((delta, None), ({}, choice.finish_reason)):
                one = {"index": number, "delta": part, "finish_reason": reason}
                one["logprobs"] = None if reason else logprobs
                yield json.dumps(envelope | {"choices": [one]})
        if self.request.include_usage:
            yield json.dumps(envelope | {"choices": [], "usage": self.usage})
        yield "[DONE]"
