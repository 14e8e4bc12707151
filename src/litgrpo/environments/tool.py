"""One tool: its JSON schema, the check of its arguments, its call and its result as text."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isfinite
from typing import Any

from litgrpo.arguments import did_you_mean, import_by_path, require
from litgrpo.environments.code import require_sandbox, run_python

HOW = (
    "a tool is `def f(x: int) -> str` with a docstring that says what it does and, under `Args:`,"
    " has a line `x: what it is` for each argument"
)
MOST_CHARS = 200  # of why a function cannot be described
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
Schema = Mapping[str, Any]
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "string": ("a string", lambda value: isinstance(value, str)),
    "integer": ("an integer", lambda value: type(value) is int),
    "number": ("a number", lambda value: type(value) is int or _is_finite(value)),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "array": ("a list", lambda value: isinstance(value, list)),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "null": ("null", lambda value: value is None),
}


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema that chat templates show, by `transformers.utils.get_json_schema`.

    Raises:
        ValueError: the function says too little about itself; what to write.
    """
    from transformers.utils import get_json_schema  # slow

    name = name_of(function)
    parameters = inspect.signature(function).parameters.values()
    odd = [str(each) for each in parameters if each.kind not in NAMED]
    require(not odd, f"tool '{name}' has an argument without a name ({''.join(odd[:1])}); {HOW}.")
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # by whatever the annotations of a user raise when they are read
        words = " ".join(str(error).split()).partition(". ")[0].rstrip("!.")
        why = words.removeprefix(f"Cannot generate JSON schema for {name} because ")[:MOST_CHARS]
        raise ValueError(f"tool '{name}' cannot be described: {why}; {HOW}.") from error
    says = schema["function"]["description"]
    require(bool(says), f"tool '{name}' cannot be described: its docstring is empty; {HOW}.")
    return schema


def name_of(given: Any) -> str:
    """The name of a class, function or method; of anything else, that of its class."""
    routine = isinstance(given, type) or inspect.isroutine(given)
    return str(given.__name__ if routine else type(given).__name__)


def explain_mismatch(name: str, value: Any, schema: Schema) -> str:
    """Why a value does not fit its schema, for the policy; "" where it does.

    Types are exact: "3" and 3.0 are no integers, true is no number; an integer is a number.
    """
    choices = ", ".join(map(repr, schema.get("enum", ())))
    wanted = f"one of {choices}" if choices else _kinds(schema)
    return "" if _fits(value, schema) else f"'{name}' must be {wanted}"


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and isfinite(value)


def _kinds(schema: Schema) -> str:
    """The types that a schema allows, in words."""
    alternatives = schema.get("anyOf") or [schema]
    names = [name for each in alternatives for name in _names(each)]
    items = [_kinds(each["items"]) for each in alternatives if "items" in each]
    of = f", each item {items[0]}" if items else ""
    return " or ".join(KINDS[name][0] for name in names) + of if names else "of another kind"


def _names(schema: Schema) -> list[str]:
    kind = schema.get("type", [])
    return [kind] if isinstance(kind, str) else list(kind)


def _fits(value: Any, schema: Schema) -> bool:
    """Whether it fits every keyword that `get_json_schema` writes."""
    if value is None and schema.get("nullable", False):
        return True
    return all(check(value, schema[key]) for key, check in CHECKS.items() if key in schema)


def _is_of(value: Any, kinds: str | list[str]) -> bool:
    return any(KINDS[each][1](value) for each in _names({"type": kinds}))


def _in_enum(value: Any, choices: list[Any]) -> bool:
    return any(type(value) is type(each) and value == each for each in choices)


def _each_place(value: Any, schemas: list[Schema]) -> bool:
    same = len(value) == len(schemas)
    return same and all(map(_fits, value, schemas))


CHECKS: dict[str, Callable[[Any, Any], bool]] = {
    "type": _is_of,
    "enum": _in_enum,
    "anyOf": lambda value, schemas: any(_fits(value, each) for each in schemas),
    "items": lambda value, schema: all(_fits(each, schema) for each in value),
    "prefixItems": _each_place,
    "additionalProperties": lambda value, schema: all(
        _fits(each, schema) for each in value.values()
    ),
}


log = logging.getLogger(__name__)

UNKNOWN = "unknown"  # the name under which calls of no tool are counted
MOST_ERROR_CHARS = 200
# Of an error's text what differs between machines and runs: addresses, and absolute paths.
NOT_SAID = re.compile(r"\b0x[0-9a-fA-F]+\b|(?<![\w.])(?:/[\w.+-]+){2,}/?")
Outcome = tuple[Any, BaseException | None]  # what a function returned, or raised


@dataclass(frozen=True)
class ToolResult:
    """What a call is answered with.

    Args:
        tool: its name; `unknown` where there is no such tool.
        text: that the policy hears.
        failed: whether the call could not be make_tool, or the tool raised.
    """

    tool: str
    text: str
    failed: bool = False


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Args:
        name: by which it is called.
        function: plain or async, with named parameters.
        schema: JSON schema of `transformers.utils.get_json_schema`.
    """

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """{parameter: its schema}, in order."""
        found: dict[str, dict[str, Any]] = self.schema["function"]["parameters"]["properties"]
        return found

    @property
    def required(self) -> list[str]:
        """The parameters without a default."""
        return list(self.schema["function"]["parameters"].get("required", ()))

    @property
    def line(self) -> str:
        """Its name, parameters with their types, and what it does."""
        typed = ", ".join(f"{name}: {_type_of(each)}" for name, each in self.parameters.items())
        return f"{self.name}({typed}): {self.schema['function']['description']}"

    def arguments(self, named: Mapping[str, Any], positional: Sequence[Any]) -> dict[str, Any]:
        """The arguments of a call by name.

        Raises:
            ValueError: they do not fit; the text is for the policy.
        """
        takes = list(self.parameters)
        takes_what = f"it takes {', '.join(takes) or 'no arguments'}"
        too_many = len(positional) > len(takes)
        require(not too_many, f"{self.name} has too many arguments; {takes_what}")
        given = dict(zip(takes, positional, strict=False))
        twice = [name for name in given if name in named]
        require(not twice, f"{self.name}: '{''.join(twice[:1])}' is given twice")
        given |= named
        unknown = [quote_name(name) for name in given if name not in takes]
        require(not unknown, f"{self.name} has no argument {''.join(unknown[:1])}; {takes_what}")
        missing = [name for name in self.required if name not in given]
        require(not missing, f"{self.name} needs {', '.join(missing)}")
        wrong = [
            why
            for name in given
            if (why := explain_mismatch(name, given[name], self.parameters[name]))
        ]
        require(not wrong, f"{self.name}: {''.join(wrong[:1])}")
        return given


def make_tool(given: str | Callable[..., Any]) -> Tool:
    """Build a tool from a function or its import path.

    Raises:
        ValueError: the function does not exist, has no types or docstring, or cannot run here.
    """
    function = import_object("tool", given)
    require(
        callable(function) and not inspect.isclass(function),
        f"tool {given!r} is no function; a class whose methods are tools is given as factory.",
    )
    if function is run_python:
        require_sandbox()  # at start-up instead of at the first call
    schema = schema_of(function)
    return Tool(schema["function"]["name"], function, schema)


def import_object(what: str, given: str | Callable[..., Any]) -> Any:
    """What an import path names, or what was given itself.

    Raises:
        ValueError: there is nothing of that name; what is near it.
    """
    if not isinstance(given, str):
        return given
    try:
        return import_by_path(given)
    except ValueError as error:
        module, _, name = given.rpartition(".")
        near = [each for each in dir(sys.modules.get(module)) if each[0] != "_"]
        raise ValueError(f"{what} {given!r}: {error}{did_you_mean(name, near)}") from error


def run_calls(calls: Sequence[tuple[Callable[..., Any], dict[str, Any]]]) -> list[Outcome]:
    """What functions return or raise, in order; those that wait, wait together.

    Plain functions run first, one after the other; then the coroutines, in one event loop. It has
    a thread of its own, because a notebook has a loop in this one.
    """
    first = [_outcome(function, arguments) for function, arguments in calls]
    waiting = [value for value, _ in first if inspect.isawaitable(value)]
    if not waiting:
        return first

    async def together() -> list[Outcome]:
        return list(await asyncio.gather(*map(_awaited, waiting)))

    with ThreadPoolExecutor(1) as pool:
        later = iter(pool.submit(asyncio.run, together()).result())
    return [next(later) if inspect.isawaitable(value) else (value, why) for value, why in first]


def resolve(value: Any) -> Any:
    """A value, awaited where it is a coroutine; what it raises is raised."""
    ((result, error),) = run_calls([(lambda: value, {})])
    if error is not None:
        raise error
    return result


def to_result(tool: Tool, outcome: Outcome) -> ToolResult:
    """What a tool returned as the text that is heard: a text as it is, anything else as JSON."""
    result, error = outcome
    if error is not None:
        _tell(tool, error)
        return ToolResult(tool.name, f"error: {describe_error(tool.name, error)}", failed=True)
    try:
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        kind = type(result).__name__
        text = f"error: {tool.name} returned {kind}, which is neither a text nor JSON"
        return ToolResult(tool.name, text, failed=True)
    return ToolResult(tool.name, text)


def describe_error(name: str, error: BaseException) -> str:
    """What the policy hears of an exception: its author's words, or its type.

    ValueError, RuntimeError and exceptions of a user's own say what their author wrote; what Python
    itself says differs between versions. Only the first line, without addresses and paths.
    """
    own = isinstance(error, ValueError | RuntimeError) or type(error).__module__ != "builtins"
    words = NOT_SAID.sub("...", str(error).strip().partition("\n")[0][:MOST_ERROR_CHARS])
    return words if own and words else f"{name} failed ({type(error).__name__})"


def quote_name(name: str) -> str:
    """A name that the policy wrote, in quotes, if it is short and harmless; else nothing."""
    return repr(name) if re.fullmatch(r"[\w.-]{1,40}", name, re.ASCII) else "of that name"


def _outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> Outcome:
    try:
        return function(**arguments), None
    except (Exception, SystemExit) as error:  # a tool's failure is the policy's to hear of
        return None, error


async def _awaited(waiting: Any) -> Outcome:
    try:
        return await waiting, None
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return None, error


_told: set[tuple[str, str]] = set()


def _tell(tool: Tool, error: BaseException) -> None:
    """Log where a tool raised, once for each kind of error; ValueError is a tool's own answer."""
    kind = (tool.name, type(error).__name__)
    if kind in _told or isinstance(error, ValueError):
        return
    _told.add(kind)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{frame.filename}, line {frame.lineno}"
    log.warning("the tool %s raised %s: %s (%s)", *kind, error, place)


def _type_of(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "any")
    return kind if isinstance(kind, str) else " or ".join(kind)
