"""Parse tool calls from generated text, in three formats; malformed calls never raise."""

from __future__ import annotations

import ast
import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import one_of, require
from litgrpo.environments.base import Message
from litgrpo.environments.tool import Tool, ToolResult
from litgrpo.text.strict_json import parse_json, unique_keys

ARGUMENTS = ("arguments", "parameters")  # names of a call's arguments: Hermes, Llama 3
MAX_CALL_CHARS = 20_000  # limit of one call, which bounds the parser's time and memory
NAME = r"[A-Za-z_][\w.]*"
THOUGHTS_END = "</think>"
NOT_PYTHON = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


@dataclass(frozen=True)
class ToolCall:
    """One call as the policy wrote it."""

    name: str = ""  # name of the tool
    arguments: Mapping[str, Any] = field(default_factory=dict)  # {parameter: value}
    positional: Sequence[Any] = ()  # values without a name, in the order of the tool's parameters
    wrong: str = ""  # reason why the text is malformed; the other fields are empty then


class CallFormat(ABC):
    """Format of tool calls and of their results."""

    @abstractmethod
    def parse(self, text: str, tools: Mapping[str, Tool]) -> list[ToolCall]:
        """Return the calls of a turn in order, malformed ones included; [] without any.

        Args:
            text: text of the turn.
            tools: {name: tool}.
        """

    def parse_turn(self, turn: str, tools: Mapping[str, Tool]) -> list[ToolCall]:
        """Return the calls of a turn that are not in its thoughts, which end at `</think>`."""
        return self.parse(after_thoughts(turn), tools)

    @abstractmethod
    def example(self, tool: Tool) -> str:
        """Write an example call, with parameter names or dots as values."""

    def text_before_calls(self, turn: str) -> str:
        """Return the text of a turn in front of its calls, for formats that allow one."""
        return ""

    def format_results(self, results: Sequence[ToolResult]) -> str | list[Message]:
        """Return the observation: one message with the role `tool` per result."""
        return [{"role": "tool", "name": result.tool, "content": result.text} for result in results]


@check_field_types
@dataclass(frozen=True)
class HermesFormat(CallFormat):
    """JSON in tags: `<tool_call>{"name": "multiply", "arguments": {"a": 3, "b": 4}}</tool_call>`.

    A turn may contain several calls; text around them is ignored.

    Args:
        tag: name of the tags.

    Example:
        >>> HermesFormat().parse('<tool_call>{"name": "today"}</tool_call>', {})[0].name
        'today'
    """

    tag: str = "tool_call"

    def __post_init__(self) -> None:
        _check_tag("tag", self.tag)

    def parse(self, text: str, tools: Mapping[str, Tool]) -> list[ToolCall]:
        return _parse_tagged(text, self.tag, _from_json)

    def text_before_calls(self, turn: str) -> str:
        return turn.partition(f"<{self.tag}>")[0].strip()

    def example(self, tool: Tool) -> str:
        arguments = ", ".join(f'"{name}": ...' for name in tool.parameters)
        call = f'{{"name": "{tool.name}", "arguments": {{{arguments}}}}}'
        return f"<{self.tag}>{call}</{self.tag}>"


@check_field_types
@dataclass(frozen=True)
class TagFormat(CallFormat):
    """Short tags: `<call>multiply(347, 82)</call>` returns `<res>28454</res>`, inline.

    Args:
        call_tag: name of the tags around a call.
        result_tag: name of the tags around its result.
        shorthand: with one tool, whose first parameter is a text and the only one required,
            `<call>347*82</call>` calls it with this text.

    Example:
        >>> TagFormat(call_tag="c").parse("<c>multiply(3, b=4)</c>", {})[0].positional
        (3,)
    """

    call_tag: str = "call"
    result_tag: str = "res"
    shorthand: bool = True

    def __post_init__(self) -> None:
        _check_tag("call_tag", self.call_tag)
        _check_tag("result_tag", self.result_tag)

    def parse(self, text: str, tools: Mapping[str, Tool]) -> list[ToolCall]:
        only = self._short(tools)
        has_name = re.compile(rf"\s*({'|'.join(map(re.escape, tools))})\s*\(")
        how = f"write <{self.call_tag}>name(arguments)</{self.call_tag}>"

        def parse_one(call: str) -> ToolCall:
            if only and not has_name.match(call):
                return ToolCall(only, positional=(call,))
            return _one_expression(call, how)

        return _parse_tagged(text, self.call_tag, parse_one)

    def text_before_calls(self, turn: str) -> str:
        return turn.partition(f"<{self.call_tag}>")[0].strip()

    def example(self, tool: Tool) -> str:
        arguments = ", ".join(tool.parameters)
        call = arguments if self._short({tool.name: tool}) else f"{tool.name}({arguments})"
        return f"<{self.call_tag}>{call}</{self.call_tag}>"

    def format_results(self, results: Sequence[ToolResult]) -> str:
        """Return the observation: the results in tags, as one text."""
        return "".join(
            f"<{self.result_tag}>{result.text}</{self.result_tag}>" for result in results
        )

    def _short(self, tools: Mapping[str, Tool]) -> str:
        """Return the name of the only tool, if a bare text can call it; else ""."""
        names = [
            tool.name
            for tool in tools.values()
            if tool.required
            and tool.required == list(tool.parameters)[:1]
            and tool.parameters[tool.required[0]].get("type") == "string"
        ]
        return "".join(names) if self.shorthand and len(tools) == 1 else ""


@check_field_types
@dataclass(frozen=True)
class PythonFormat(CallFormat):
    """Python literals: the turn is `[multiply(a=3, b=4), today()]`, or holds it in a fenced block.

    It is parsed and never evaluated. A block marked `tool_code` may also hold one bare call.

    Example:
        >>> PythonFormat().parse("[multiply(a=3, b=4)]", {})[0].arguments
        {'a': 3, 'b': 4}
    """

    def parse(self, text: str, tools: Mapping[str, Tool]) -> list[ToolCall]:
        return [call for calls in self._texts(text) for call in _expressions(calls)]

    def example(self, tool: Tool) -> str:
        return f"[{tool.name}({', '.join(f'{name}=...' for name in tool.parameters)})]"

    @staticmethod
    def _texts(turn: str) -> list[str]:
        """Return the parts of a turn that look like a list of calls."""
        fenced = re.findall(r"```(\w*)[ \t]*\n(.*?)```", turn, re.DOTALL)
        bare = [text.strip() for mark, text in fenced if mark == "tool_code"]
        singles = [f"[{text}]" for text in bare if re.match(rf"{NAME}\s*\(", text)]
        lists = [text.strip() for text in (turn, *(text for _, text in fenced))]
        return [text for text in lists if re.match(rf"\[\s*{NAME}\s*\(", text)] + singles


FORMATS: dict[str, type[CallFormat]] = {
    "hermes": HermesFormat,
    "tags": TagFormat,
    "python": PythonFormat,
}


def format_of(calls: str | CallFormat) -> CallFormat:
    """Return a call format by name."""
    if isinstance(calls, CallFormat):
        return calls
    one_of("call_format", calls, FORMATS)
    return FORMATS[calls]()


def after_thoughts(turn: str) -> str:
    """Return the text after the last `</think>`; calls inside thoughts are not executed."""
    return turn.rpartition(THOUGHTS_END)[2]


def _check_tag(name: str, tag: str) -> None:
    good = re.fullmatch(r"[\w.-]+", tag) is not None
    require(good, f"{name} is {tag!r}; it must be a word without brackets, such as 'call'.")


def _parse_tagged(text: str, tag: str, parse_one: Callable[[str], ToolCall]) -> list[ToolCall]:
    """Return the calls in these tags.

    The last one may be open: if the closing tag is a stop string, the turn ends without it.
    """
    # A call without its closing tag would otherwise be searched to the end of the text, again and
    # again.
    last_closing = text.rfind(f"</{tag}>")
    calls, start = [], text.find(f"<{tag}>")
    while start >= 0:
        start += len(f"<{tag}>")
        end = text.find(f"</{tag}>", start) if start <= last_closing else len(text)
        calls.append(parse_one(text[start:end]))
        start = text.find(f"<{tag}>", end)
    return calls


TOO_LONG = ToolCall(wrong=f"a call has at most {MAX_CALL_CHARS} characters")


def _from_json(text: str) -> ToolCall:
    """Parse a JSON object with `name` and `arguments`."""
    if len(text) > MAX_CALL_CHARS:
        return TOO_LONG
    try:
        call = parse_json(text)
    except (ValueError, RecursionError):
        return ToolCall(wrong="the call is not JSON")
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]  # OpenAI's format, in which the call is inside
    malformed = ToolCall(wrong='a call is {"name": ..., "arguments": {...}}')
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return malformed
    keys = [key for key in ARGUMENTS if key in call]
    if len(keys) > 1:
        return ToolCall(wrong=f"a call has both {keys[0]} and {keys[1]}")
    arguments = call[keys[0]] if keys else {}
    if isinstance(arguments, str):  # OpenAI's format: an object as text
        try:
            arguments = parse_json(arguments)
        except (ValueError, RecursionError):
            return ToolCall(wrong="the arguments are not JSON")
    # A call without arguments may give null.
    arguments = {} if arguments is None else arguments
    return ToolCall(call["name"], arguments) if isinstance(arguments, dict) else malformed


def _one_expression(text: str, how: str) -> ToolCall:
    """Parse exactly one call; on failure the message is `how` to write it."""
    calls = _expressions(f"[{text.strip()}]", how)
    return calls[0] if len(calls) == 1 else ToolCall(wrong=how)


def _expressions(text: str, how: str = "write [name(argument=value), ...]") -> list[ToolCall]:
    """Parse the calls of a Python list."""
    if len(text) > MAX_CALL_CHARS:
        return [TOO_LONG]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes in generated strings
            body = ast.parse(text.strip(), mode="eval").body
        return list(_calls_of(body))
    except NOT_PYTHON:
        return [ToolCall(wrong=f"the call is not plain Python; {how}")]


def _calls_of(body: ast.expr) -> Iterator[ToolCall]:
    """Yield calls with literal arguments; ValueError for any other element."""
    require(isinstance(body, ast.List), "not a list")
    assert isinstance(body, ast.List)
    for call in body.elts:
        require(isinstance(call, ast.Call), "not a call")
        assert isinstance(call, ast.Call)
        name = ast.unparse(call.func)
        require(re.fullmatch(NAME, name) is not None, "not a name")
        keywords = [(keyword.arg or "**", _plain(keyword.value)) for keyword in call.keywords]
        yield ToolCall(name, unique_keys(keywords), tuple(map(_plain, call.args)))


def _plain(node: ast.expr) -> Any:
    """Return a literal in JSON types; tuples become lists."""
    return json.loads(json.dumps(ast.literal_eval(node), allow_nan=False))
