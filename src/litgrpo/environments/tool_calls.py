"""Parse tool calls from generated text, in three formats; malformed calls never raise."""

from __future__ import annotations

import ast
import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import one_of, require
from litgrpo.environments.base import Message
from litgrpo.environments.tool import Tool, ToolResult
from litgrpo.text.strict_json import parse_json, unique_keys

ARGUMENTS = ("arguments", "parameters")  # names of a call's arguments: Hermes, Llama 3
MAX_CALL_CHARS = 20_000  # limit of one call, which bounds the parser's time and memory
MAX_TRIED = 8  # closing tags up to which a call is tried; more are not in its texts
NAME = r"[A-Za-z_][\w.]*"
THOUGHTS_END = "</think>"
NOT_PYTHON = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


@dataclass(frozen=True)
class ToolCall:
    """One call as the policy wrote it.

    Args:
        name: name of the tool.
        arguments: {parameter: value}.
        positional: values without a name, in the order of the tool's parameters.
        wrong: reason why the text is malformed; the other fields are empty then.

    Example:
        >>> ToolCall("multiply", {"b": 4}, positional=(3,)).wrong
        ''
    """

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    positional: Sequence[Any] = ()
    wrong: str = ""


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
        """Return the calls of a turn that are not in its thoughts.

        Thoughts end with the last `</think>` that is not in an argument of a call.

        Args:
            turn: what the policy generated.
            tools: {name: tool}.
        """
        starts = [0, *(match.end() for match in re.finditer(THOUGHTS_END, turn))]
        for start in starts[:MAX_TRIED]:
            calls = self.parse(turn[start:], tools)
            if turn.count(THOUGHTS_END, start) <= sum(map(_count_thought_ends, calls)):
                return calls
        return self.parse(turn[starts[-1] :], tools)

    @abstractmethod
    def example(self, tool: Tool) -> str:
        """Write an example call, with parameter names or dots as values."""

    def text_before_calls(self, turn: str) -> str:
        """Return the text of a turn in front of its calls, for formats that allow one."""
        return ""

    def format_results(self, results: Sequence[ToolResult]) -> str | list[Message]:
        """Return the observation: one message with the role `tool` per result."""
        return [{"role": "tool", "name": each.tool, "content": each.text} for each in results]


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
        """Check the tag."""
        _check_tag("tag", self.tag)

    def parse(self, text: str, tools: Mapping[str, Tool]) -> list[ToolCall]:
        """See `CallFormat.parse`."""
        return _parse_tagged(text, self.tag, _from_json)

    def text_before_calls(self, turn: str) -> str:
        """See `CallFormat.text_before_calls`."""
        return turn.partition(f"<{self.tag}>")[0].strip()

    def example(self, tool: Tool) -> str:
        """See `CallFormat.example`."""
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
        """Check the tags."""
        _check_tag("call_tag", self.call_tag)
        _check_tag("result_tag", self.result_tag)

    def parse(self, text: str, tools: Mapping[str, Tool]) -> list[ToolCall]:
        """See `CallFormat.parse`."""
        only = self._short(tools)
        known = re.compile(rf"\s*({'|'.join(map(re.escape, tools))})\s*\(")
        how = f"write <{self.call_tag}>name(arguments)</{self.call_tag}>"

        def parse_one(each: str) -> ToolCall:
            if only and not known.match(each):
                return ToolCall(only, positional=(each,))
            return _one_expression(each, how)

        return _parse_tagged(text, self.call_tag, parse_one)

    def text_before_calls(self, turn: str) -> str:
        """See `CallFormat.text_before_calls`."""
        return turn.partition(f"<{self.call_tag}>")[0].strip()

    def example(self, tool: Tool) -> str:
        """See `CallFormat.example`."""
        arguments = ", ".join(tool.parameters)
        call = arguments if self._short({tool.name: tool}) else f"{tool.name}({arguments})"
        return f"<{self.call_tag}>{call}</{self.call_tag}>"

    def format_results(self, results: Sequence[ToolResult]) -> str:
        """Return the observation: the results in tags, as one text."""
        return "".join(f"<{self.result_tag}>{each.text}</{self.result_tag}>" for each in results)

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
        """See `CallFormat.parse`."""
        return [call for each in self._texts(text) for call in _expressions(each)]

    def example(self, tool: Tool) -> str:
        """See `CallFormat.example`."""
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
    """Return a call format by name.

    Raises:
        ValueError: the name does not exist.
    """
    if isinstance(calls, CallFormat):
        return calls
    one_of("call_format", calls, FORMATS)
    return FORMATS[calls]()


def after_thoughts(turn: str) -> str:
    """Return the text after the last `</think>`; calls inside thoughts are not executed.

    Example:
        >>> after_thoughts("<think>up?</think>down")
        'down'
    """
    return turn.rpartition(THOUGHTS_END)[2]


def _check_tag(name: str, tag: str) -> None:
    good = re.fullmatch(r"[\w.-]+", tag) is not None
    require(good, f"{name} is {tag!r}; it must be a word without brackets, such as 'call'.")


def _parse_tagged(text: str, tag: str, parse_one: Callable[[str], ToolCall]) -> list[ToolCall]:
    """Return the calls in these tags.

    A closing tag in a text of the call does not end it: the call ends at the first closing tag up
    to which it is well-formed. The last one may be open: if the closing tag is a stop string, the
    turn ends without it.
    """
    opening, closing = f"<{tag}>", re.compile(f"</{re.escape(tag)}>")
    calls, place = [], text.find(opening)
    while place >= 0:
        start = place + len(opening)
        ends = islice(closing.finditer(text, start), MAX_TRIED)
        tried = [match.start() for match in ends] or [len(text)]
        parsed = [(end, parse_one(text[start:end])) for end in tried[:1]]
        for end in tried[1:]:
            if not parsed[-1][1].wrong or end - start > MAX_CALL_CHARS:
                break
            parsed.append((end, parse_one(text[start:end])))
        end, call = parsed[0] if parsed[-1][1].wrong else parsed[-1]
        calls.append(call)
        place = text.find(opening, end)
    return calls


def _count_thought_ends(call: ToolCall) -> int:
    """Count `</think>` in the arguments of a well-formed call."""
    return json.dumps([*call.positional, call.arguments], ensure_ascii=False).count(THOUGHTS_END)


TOO_LONG = ToolCall(wrong=f"a call has at most {MAX_CALL_CHARS} characters")


def _from_json(text: str) -> ToolCall:
    """Parse a JSON object with `name` and `arguments`."""
    if len(text) > MAX_CALL_CHARS:
        return TOO_LONG
    try:
        found = parse_json(text)
    except (ValueError, RecursionError):
        return ToolCall(wrong="the call is not JSON")
    if isinstance(found, dict) and isinstance(found.get("function"), dict):
        found = found["function"]  # OpenAI's format, in which the call is inside
    how = ToolCall(wrong='a call is {"name": ..., "arguments": {...}}')
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return how
    given = [key for key in ARGUMENTS if key in found]
    if len(given) > 1:
        return ToolCall(wrong=f"a call has both {given[0]} and {given[1]}")
    arguments = found[given[0]] if given else {}
    if isinstance(arguments, str):  # OpenAI's format: an object as text
        try:
            arguments = parse_json(arguments)
        except (ValueError, RecursionError):
            return ToolCall(wrong="the arguments are not JSON")
    # A call without arguments may give null.
    arguments = {} if arguments is None else arguments
    return ToolCall(found["name"], arguments) if isinstance(arguments, dict) else how


def _one_expression(text: str, how: str) -> ToolCall:
    """Parse exactly one call; on failure the message is `how` to write it."""
    found = _expressions(f"[{text.strip()}]", how)
    return found[0] if len(found) == 1 else ToolCall(wrong=how)


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
    """Yield calls with literal arguments.

    Raises:
        ValueError: an element is not such a call.
    """
    require(isinstance(body, ast.List), "not a list")
    assert isinstance(body, ast.List)
    for each in body.elts:
        require(isinstance(each, ast.Call), "not a call")
        assert isinstance(each, ast.Call)
        name = ast.unparse(each.func)
        require(re.fullmatch(NAME, name) is not None, "not a name")
        named = [(keyword.arg or "**", _plain(keyword.value)) for keyword in each.keywords]
        yield ToolCall(name, unique_keys(named), tuple(map(_plain, each.args)))


def _plain(node: ast.expr) -> Any:
    """Return a literal in JSON types; tuples become lists.

    Raises:
        ValueError: it is not a literal, or JSON cannot represent it.
    """
    return json.loads(json.dumps(ast.literal_eval(node), allow_nan=False))
