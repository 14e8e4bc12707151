"""The tool calls that a turn's text holds, in three formats; any text is read, and none raises."""

from __future__ import annotations

import ast
import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from litgrpo.arguments import one_of, require
from litgrpo.environments.base import Message
from litgrpo.environments.tool import Tool, ToolResult

MOST_CHARS = 20_000  # of one call; what a parser takes for it stays small
NAME = r"[A-Za-z_][\w.]*"
THOUGHTS_END = "</think>"
NOT_PYTHON = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


@dataclass(frozen=True)
class ToolCall:
    """One call as it was written.

    Args:
        name: of the tool.
        arguments: {parameter: value}.
        positional: values without a name, in the order of the tool's parameters.
        wrong: why the text is no call; then the rest is empty.
    """

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    positional: Sequence[Any] = ()
    wrong: str = ""


class CallFormat(ABC):
    """How calls are written, and how their answers are heard."""

    @abstractmethod
    def parse(self, text: str, tools: Mapping[str, Tool]) -> list[ToolCall]:
        """The calls of a turn, in order; none where it does not try to call.

        Args:
            text: of the turn.
            tools: that there are, by name.
        """

    @abstractmethod
    def example(self, tool: Tool) -> str:
        """A call of the tool, with its parameters in place of values."""

    def format_results(self, results: Sequence[ToolResult]) -> str | list[Message]:
        """What the policy hears: a message of the role `tool` for each answer."""
        return [{"role": "tool", "name": each.tool, "content": each.text} for each in results]


@dataclass(frozen=True)
class HermesFormat(CallFormat):
    """JSON in tags: `<tool_call>{"name": "multiply", "arguments": {"a": 3, "b": 4}}</tool_call>`.

    Several calls may stand in a turn. What stands around them is read by nobody.

    Args:
        tag: the name of the tags.
    """

    tag: str = "tool_call"

    def __post_init__(self) -> None:
        """Check the tag."""
        _check_tag("tag", self.tag)

    def parse(self, text: str, tools: Mapping[str, Tool]) -> list[ToolCall]:
        """See `CallFormat.parse`."""
        return [_from_json(each) for each in _tagged(text, self.tag)]

    def example(self, tool: Tool) -> str:
        """See `CallFormat.example`."""
        arguments = ", ".join(f'"{name}": ...' for name in tool.parameters)
        call = f'{{"name": "{tool.name}", "arguments": {{{arguments}}}}}'
        return f"<{self.tag}>{call}</{self.tag}>"


@dataclass(frozen=True)
class TagFormat(CallFormat):
    """Short tags: `<call>multiply(347, 82)</call>` is answered by `<res>28454</res>`, inline.

    Args:
        call_tag: the name of the tags around a call.
        result_tag: the name of the tags around its answer.
        shorthand: with one tool, whose first parameter is a text and the only one required,
            `<call>347*82</call>` calls it with this text.
    """

    call_tag: str = "call"
    result_tag: str = "res"
    shorthand: bool = True

    def __post_init__(self) -> None:
        """Check the tags."""
        _check_tag("call_tag", self.call_tag)
        _check_tag("result_tag", self.result_tag)

    def parse(self, text: str, tools: Mapping[str, Tool]) -> list[ToolCall]:
        """See `CallFormat.parse`."""
        only = self._short(tools)
        known = re.compile(rf"\s*({'|'.join(map(re.escape, tools))})\s*\(")
        return [
            ToolCall(only, positional=(each,))
            if only and not known.match(each)
            else _one_expression(each, f"write <{self.call_tag}>name(arguments)</{self.call_tag}>")
            for each in _tagged(text, self.call_tag)
        ]

    def example(self, tool: Tool) -> str:
        """See `CallFormat.example`."""
        arguments = ", ".join(tool.parameters)
        call = arguments if self._short({tool.name: tool}) else f"{tool.name}({arguments})"
        return f"<{self.call_tag}>{call}</{self.call_tag}>"

    def format_results(self, results: Sequence[ToolResult]) -> str:
        """What the policy hears: the answers in tags, in one text."""
        return "".join(f"<{self.result_tag}>{each.text}</{self.result_tag}>" for each in results)

    def _short(self, tools: Mapping[str, Tool]) -> str:
        """The name of the only tool, if a bare text can call it; else nothing."""
        names = [
            tool.name
            for tool in tools.values()
            if list(tool.required) == list(tool.parameters)[:1]
            and tool.parameters[tool.required[0]].get("type") == "string"
        ]
        return "".join(names) if self.shorthand and len(tools) == 1 else ""


@dataclass(frozen=True)
class PythonFormat(CallFormat):
    """Python literals: the turn is `[multiply(a=3, b=4), today()]`, or holds it in a fenced block.

    It is parsed and never evaluated. A block marked `tool_code` may also hold one bare call.
    """

    def parse(self, text: str, tools: Mapping[str, Tool]) -> list[ToolCall]:
        """See `CallFormat.parse`."""
        return [call for each in self._texts(text) for call in _expressions(each)]

    def example(self, tool: Tool) -> str:
        """See `CallFormat.example`."""
        return f"[{tool.name}({', '.join(f'{name}=...' for name in tool.parameters)})]"

    @staticmethod
    def _texts(said: str) -> list[str]:
        """The texts that try to be a list of calls."""
        fenced = re.findall(r"```(\w*)[ \t]*\n(.*?)```", said, re.DOTALL)
        bare = [text.strip() for mark, text in fenced if mark == "tool_code"]
        singles = [f"[{text}]" for text in bare if re.match(rf"{NAME}\s*\(", text)]
        lists = [text.strip() for text in (said, *(text for _, text in fenced))]
        return [text for text in lists if re.match(rf"\[\s*{NAME}\s*\(", text)] + singles


FORMATS: dict[str, type[CallFormat]] = {
    "hermes": HermesFormat,
    "tags": TagFormat,
    "python": PythonFormat,
}


def format_of(calls: str | CallFormat) -> CallFormat:
    """The format that a recipe names.

    Raises:
        ValueError: there is no such format.
    """
    if isinstance(calls, CallFormat):
        return calls
    one_of("call_format", calls, FORMATS)
    return FORMATS[calls]()


def after_thoughts(said: str) -> str:
    """What follows the last `</think>`: a call that is only thought of is none."""
    return said.rpartition(THOUGHTS_END)[2]


def _check_tag(name: str, tag: str) -> None:
    good = re.fullmatch(r"[\w.-]+", tag) is not None
    require(good, f"{name} is {tag!r}; it must be a word without brackets, such as 'call'.")


def _tagged(said: str, tag: str) -> list[str]:
    """What stands in these tags; the last may be open, because its end can end the turn."""
    return re.findall(rf"<{re.escape(tag)}>(.*?)(?:</{re.escape(tag)}>|\Z)", said, re.DOTALL)


def _too_long(text: str) -> list[ToolCall]:
    return [ToolCall(wrong=f"a call has at most {MOST_CHARS} characters")] * (
        len(text) > MOST_CHARS
    )


def _from_json(text: str) -> ToolCall:
    """A call from a JSON object with `name` and `arguments`."""
    how = ToolCall(wrong='a call is {"name": ..., "arguments": {...}}')
    try:
        found = _too_long(text) or json.loads(text, object_pairs_hook=_once, parse_constant=_none)
    except (ValueError, RecursionError):
        return ToolCall(wrong="the call is not JSON")
    match found:
        case [ToolCall() as long]:
            return long
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, arguments)
        case {"name": str(name)} if "arguments" not in found:
            return ToolCall(name)
    return how


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are distinct: of two values it would be open which one counts."""
    found = dict(pairs)
    require(len(found) == len(pairs), "a key is given twice")
    return found


def _none(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _one_expression(text: str, how: str) -> ToolCall:
    """The one call that a text is; `how` to write it, where it is none."""
    found = _expressions(f"[{text.strip()}]", how)
    return found[0] if len(found) == 1 else ToolCall(wrong=how)


def _expressions(text: str, how: str = "write [name(argument=value), ...]") -> list[ToolCall]:
    """The calls of a Python list."""
    wrong = _too_long(text)
    if wrong:
        return wrong
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what the model writes, such as "\d"
            body = ast.parse(text.strip(), mode="eval").body
        return list(_calls_of(body))
    except NOT_PYTHON:
        return [ToolCall(wrong=f"the call is not plain Python; {how}")]


def _calls_of(body: ast.expr) -> Iterator[ToolCall]:
    """Calls with literal arguments.

    Raises:
        ValueError: something else is among them.
    """
    require(isinstance(body, ast.List), "no list")
    assert isinstance(body, ast.List)
    for each in body.elts:
        require(isinstance(each, ast.Call), "no call")
        assert isinstance(each, ast.Call)
        name = ast.unparse(each.func)
        require(re.fullmatch(NAME, name) is not None, "no name")
        named = [(keyword.arg or "**", _plain(keyword.value)) for keyword in each.keywords]
        yield ToolCall(name, _once(named), tuple(map(_plain, each.args)))


def _plain(node: ast.expr) -> Any:
    """A literal as JSON has it: a tuple is a list.

    Raises:
        ValueError: it is no literal, or one that JSON does not have.
    """
    return json.loads(json.dumps(ast.literal_eval(node), allow_nan=False))
