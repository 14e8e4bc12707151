"""Tools: JSON schema, argument check, call, and result as text."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from litgrpo.arguments import import_object, require
from litgrpo.environments.code import require_sandbox, run_python
from litgrpo.environments.schemas import explain_mismatch, quote_name
from litgrpo.event_loops import wait_for

SIGNATURE_HELP = (
    "a tool is `def f(x: int) -> str` with a docstring that says what it does and, under `Args:`,"
    " has a line `x: what it is` for each argument"
)
MOST_CHARS = 200  # of why a function cannot be described
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema that chat templates show, from `transformers.utils.get_json_schema`."""
    from transformers.utils import get_json_schema  # slow

    name = name_of(function)
    parameters = inspect.signature(function).parameters.values()
    odd = [str(parameter) for parameter in parameters if parameter.kind not in NAMED]
    require(
        not odd,
        f"tool '{name}' has an argument without a name ({''.join(odd[:1])}); {SIGNATURE_HELP}.",
    )
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # reading a user's annotations runs the user's code
        words = " ".join(str(error).split()).partition(". ")[0].rstrip("!.")
        why = words.removeprefix(f"Cannot generate JSON schema for {name} because ")[:MOST_CHARS]
        raise ValueError(f"tool '{name}' cannot be described: {why}; {SIGNATURE_HELP}.") from error
    says = schema["function"]["description"]
    require(
        bool(says), f"tool '{name}' cannot be described: its docstring is empty; {SIGNATURE_HELP}."
    )
    return schema


def name_of(value: Any) -> str:
    """Return the name of a class, function or method, or of the class of another object."""
    routine = isinstance(value, type) or inspect.isroutine(value)
    return str(value.__name__ if routine else type(value).__name__)


log = logging.getLogger(__name__)

UNKNOWN = "unknown"  # counts calls of tools that do not exist
MOST_ERROR_CHARS = 200
# Addresses and absolute paths differ between machines and runs, so the policy must not see them.
VOLATILE = re.compile(r"\b0x[0-9a-fA-F]+\b|(?<![\w.])(?:/[\w.+-]+){2,}/?")
Outcome = tuple[Any, BaseException | None]  # what a function returned, or raised


class EpisodeError(RuntimeError):
    """Raised by a tool whose episode must end, such as after a lost connection.

    Any other exception of a tool is an observation of the policy. This one fails the episode, which
    is left out of its group.
    """


@dataclass(frozen=True)
class ToolResult:
    """Result of a tool call."""

    tool: str  # name of the tool; `unknown` if it does not exist
    text: str  # observation of the policy
    failed: bool = False  # the call was invalid, or the tool raised


@dataclass(frozen=True)
class Tool:
    """Function that the policy may call."""

    name: str  # name in calls
    function: Callable[..., Any]  # plain or async function with named parameters
    schema: dict[str, Any]  # JSON schema of `transformers.utils.get_json_schema`

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """{parameter: schema}, in order."""
        properties: dict[str, dict[str, Any]] = self.schema["function"]["parameters"]["properties"]
        return properties

    @property
    def required(self) -> list[str]:
        """The parameters without a default."""
        return list(self.schema["function"]["parameters"].get("required", ()))

    @property
    def line(self) -> str:
        """Name, typed parameters and description in one line."""
        typed = ", ".join(f"{name}: {_type_of(schema)}" for name, schema in self.parameters.items())
        return f"{self.name}({typed}): {self.schema['function']['description']}"

    def arguments(self, keywords: Mapping[str, Any], positional: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments of a call by name; the text of the error is for the policy."""
        parameters = list(self.parameters)
        takes_what = f"it takes {', '.join(parameters) or 'no arguments'}"
        too_many = len(positional) > len(parameters)
        require(not too_many, f"{self.name} has too many arguments; {takes_what}")
        arguments = dict(zip(parameters, positional, strict=False))
        twice = [name for name in arguments if name in keywords]
        require(not twice, f"{self.name}: '{''.join(twice[:1])}' is given twice")
        arguments |= keywords
        closed = not self.schema["function"]["parameters"].get("additionalProperties")
        unknown = [name for name in arguments if closed and name not in parameters]
        if unknown:
            name = quote_name(unknown[0], otherwise="of that name")
            raise ValueError(f"{self.name} has no argument {name}; {takes_what}")
        missing = [name for name in self.required if name not in arguments]
        require(not missing, f"{self.name} needs {', '.join(missing)}")
        wrong = explain_mismatch(self.schema["function"]["parameters"], arguments)
        require(not wrong, f"{self.name}: {wrong}")
        return arguments


def make_tool(source: str | Callable[..., Any]) -> Tool:
    """Build a tool from a function or its import path."""
    function = import_object("tool", source)
    require(
        callable(function) and not inspect.isclass(function),
        f"tool must be a function, got {source!r}; pass a class of tools as factory.",
    )
    if function is run_python:
        require_sandbox()  # at start-up instead of at the first call
    schema = schema_of(function)
    return Tool(schema["function"]["name"], function, schema)


def run_calls(calls: Sequence[tuple[Callable[..., Any], dict[str, Any]]]) -> list[Outcome]:
    """Call functions; return their results or exceptions in order. Coroutines run concurrently.

    Plain functions run first, one after the other; then the coroutines, in one event loop.
    """
    first = [_outcome(function, arguments) for function, arguments in calls]
    waiting = [value for value, _ in first if inspect.isawaitable(value)]
    if not waiting:
        return first

    async def together() -> list[Outcome]:
        return list(await asyncio.gather(*map(_await_outcome, waiting)))

    later = iter(wait_for(together(), "tools"))
    return [next(later) if inspect.isawaitable(value) else (value, why) for value, why in first]


def resolve(value: Any) -> Any:
    """Return a value; await it if it is a coroutine."""
    ((result, error),) = run_calls([(lambda: value, {})])
    if error is not None:
        raise error
    return result


def to_result(tool: Tool, outcome: Outcome) -> ToolResult:
    """Convert the outcome of a call to text: strings unchanged, other values as JSON."""
    result, error = outcome
    if error is not None:
        _log_once(tool, error)
        return ToolResult(tool.name, f"error: {describe_error(tool.name, error)}", failed=True)
    try:
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        kind = type(result).__name__
        text = f"error: {tool.name} returned {kind}, which is neither a text nor JSON"
        return ToolResult(tool.name, text, failed=True)
    return ToolResult(tool.name, text)


def describe_error(name: str, error: BaseException) -> str:
    """Return the error text for the policy: the message of the tool's author, or the type."""
    # ValueError, RuntimeError and user-defined exceptions carry their author's message. Messages of
    # Python itself differ between versions, and would make rollouts depend on the installation.
    # Only the first line is used, without addresses and paths.
    is_authored = (
        isinstance(error, ValueError | RuntimeError) or type(error).__module__ != "builtins"
    )
    words = VOLATILE.sub("...", str(error).strip().partition("\n")[0][:MOST_ERROR_CHARS])
    return words if is_authored and words else f"{name} failed ({type(error).__name__})"


def _outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> Outcome:
    try:
        return function(**arguments), None
    except (
        Exception,
        SystemExit,
    ) as error:  # a failing tool is an observation
        return None, error


async def _await_outcome(waiting: Any) -> Outcome:
    try:
        return await waiting, None
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return None, error


_logged: set[tuple[str, str]] = set()


def _log_once(tool: Tool, error: BaseException) -> None:
    """Log where a tool raised, once per error type; ValueError is an intended reply."""
    kind = (tool.name, type(error).__name__)
    if kind in _logged or isinstance(error, ValueError):
        return
    _logged.add(kind)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    location = f"{frame.filename}, line {frame.lineno}"
    log.warning("the tool %s raised %s: %s (%s)", *kind, error, location)


def _type_of(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "any")
    return kind if isinstance(kind, str) else " or ".join(kind)
