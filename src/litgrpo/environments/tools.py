"""Tool environment: typed functions, or a class for TRL's `environment_factory`."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan
from typing import Any

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import import_object, require, without_repeats
from litgrpo.environments.adapters.mcp_tools import McpTools
from litgrpo.environments.base import Message
from litgrpo.environments.tool import (
    Tool,
    make_tool,
    name_of,
    resolve,
    schema_of,
)
from litgrpo.environments.tool_caller import ToolCaller

NOT_TOOLS = ("reset", "get_reward", "close")
COLUMN = "environment"  # selects the class of a row if there are several
Function = str | Callable
ToolsByName = dict[str, "EpisodeTools"]


@dataclass(frozen=True)
class EpisodeTools:
    """Tools of the rows of one class."""

    factory: Callable[[], Any] | None  # returns an instance; None if there are only functions
    tools: dict[str, Tool]  # {name: tool}; methods are bound to an instance at reset
    methods: frozenset[str] = frozenset()  # names of the tools that are methods
    has_reward: bool = False  # the class has `get_reward`

    def bind(self, instance: object) -> dict[str, Tool]:
        """Return the tools with methods bound to the instance."""
        functions = {name: getattr(instance, name) for name in self.methods}
        return self.tools | {
            name: replace(self.tools[name], function=functions[name]) for name in functions
        }


@check_field_types
@dataclass(eq=False)
class Tools(ToolCaller):
    """Runs the model's tool calls and returns the results; a turn without a call ends the episode.

    Tools are typed Python functions with docstrings, or the public methods of a class. Classes for
    TRL's `environment_factory` run unchanged.

    Args:
        functions: functions, plain or async, or their import paths.
        factory: a class, a function that returns instances, or its import path. Instances have
            `reset`, which gets the row's columns and returns None or a text to append to the last
            user message; optionally `get_reward()` and `close()`; their other public methods are
            tools. Or {name: class}, selected by the column `environment`.
        kwargs: arguments of `factory`.
        mcp_servers: {name: entry} of MCP servers whose tools are added, with the keys of
            `litgrpo.environments.adapters.mcp_tools.McpServer`, such as `{files: {command: python,
            args: [server.py]}}`.
        call_format: `hermes`, `tags` or `python`, or a format object, such as
            `litgrpo.environments.TagFormat` with other tags.
        call_cost: subtracted from the reward per call, including failed ones.
        list_tools_in_prompt: describe the tools in the prompt, for chat templates that do not.
        max_calls_per_turn: maximal executed calls per turn; the rest get an error message.
        max_calls: the same per episode.
        max_result_chars: maximal characters of a result; longer ones are cut in the middle.
        error_text: replaces every error message, for vocabularies that cannot encode them.

    Example:
        >>> tools = Tools(["litgrpo.environments.examples.calculate"], call_format="tags")
        >>> tools.reset({}, seed=0)
        ''
        >>> tools.step("<call>6*7</call>").observation
        '<res>42</res>'
    """

    functions: Sequence[Function] | str = ()
    factory: Function | dict[str, Function] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    mcp_servers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_calls()
        listed = isinstance(self.functions, list | tuple)
        require(
            listed, f"functions is {self.functions!r}; it must be a list, such as [my_tools.f]."
        )
        alone = self.factory is None
        require(not (alone and self.kwargs), "kwargs are arguments of factory, which is not given.")
        self._mcp = McpTools(self.mcp_servers)
        self._kinds = self._describe_tools()
        tools = [tool for kind in self._kinds.values() for tool in kind.tools.values()]
        require(
            bool(tools),
            "Tools has no tools; give functions: [my_tools.f], factory: my.Class, or mcp_servers.",
        )
        self.tools = without_repeats(tool.schema for tool in tools)
        self._instance: Any = None
        self._clear()

    def reset(self, row: dict[str, Any], seed: int) -> str | list[Message]:
        """Begin an episode; see `Environment.reset`.

        Raises:
            ValueError: `reset` of the class needs a column that the data do not have, or the row's
                `environment` names an unknown class.
        """
        self.close()
        name = row.get(COLUMN) if self._is_several else ""
        names = ", ".join(self._kinds)
        require(name in self._kinds, f"{COLUMN} of a row is {name!r}; factory has: {names}.")
        self._kind = self._kinds[str(name)]
        self._instance = self._kind.factory() if self._kind.factory else None
        self._tools |= self._kind.bind(self._instance) | self._mcp.begin(row, seed)
        columns = {key: row[key] for key in row if not (self._is_several and key == COLUMN)}
        opening = resolve(self._reset_instance(columns, seed))
        fine = opening is None or isinstance(opening, str)
        require(fine, f"reset of a class of tools returned {opening!r}, expected None or a text.")
        return (self._description() if self.list_tools_in_prompt else "") + (opening or "")

    def close(self) -> None:
        """End the episode."""
        instance = self._instance
        self._clear()
        self._mcp.close()
        if hasattr(instance, "close"):
            resolve(instance.close())

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the instance, which may hold connections or locks."""
        return self.__dict__ | {"_instance": None, "_tools": {}}

    @property
    def _is_several(self) -> bool:
        return isinstance(self.factory, Mapping)

    def _clear(self) -> None:
        super()._clear()
        self._instance, self._paid = None, 0.0

    def _describe_tools(self) -> ToolsByName:
        """Return {class name in the column `environment`: its tools}."""
        functions = _by_name([*map(make_tool, self.functions), *self._mcp.tools])
        if self.factory is None:
            return {"": EpisodeTools(None, functions)}
        makes = self.factory if isinstance(self.factory, Mapping) else {"": self.factory}
        return {str(name): self._of_class(factory, functions) for name, factory in makes.items()}

    def _of_class(self, source: Function, functions: dict[str, Tool]) -> EpisodeTools:
        """Return the tools of a class; one instance is created and closed to inspect it."""
        factory = import_object("factory", source)
        require(callable(factory), f"factory is {source!r}; it must be a class, or make instances.")
        class_name = name_of(factory)

        make = partial(factory, **self.kwargs)
        try:
            instance = make()
        except Exception as error:  # a user's class may raise anything
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(
                f"Could not construct factory {class_name}: {why}. Check kwargs."
            ) from error
        members = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
        require("reset" in members, f"factory: {class_name} has no method reset(self, **columns).")
        public = [name for name in members if name[0] != "_" and name not in NOT_TOOLS]
        methods = [
            Tool(name, getattr(type(instance), name), schema_of(getattr(instance, name)))
            for name in public
        ]
        if "close" in members:
            resolve(instance.close())
        tools = _by_name([*functions.values(), *methods])
        return EpisodeTools(make, tools, frozenset(public), "get_reward" in members)

    def _reset_instance(self, columns: dict[str, Any], seed: int) -> Any:
        """Call `reset` of the instance with the columns that it takes."""
        if self._instance is None:
            return None
        parameters = inspect.signature(self._instance.reset).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        # A parameter `seed` receives the group's seed, unless the data have such a column.
        values = {"seed": seed} | columns
        names = {
            parameter.name
            for parameter in parameters
            if parameter.kind is not parameter.VAR_KEYWORD
        }
        missing = [
            parameter.name
            for parameter in parameters
            if parameter.name in names - {*values}
            and parameter.default is parameter.empty
            and parameter.kind is not parameter.VAR_POSITIONAL
        ]
        require(
            not missing,
            f"reset of {name_of(type(self._instance))} needs the column '{''.join(missing[:1])}';"
            f" the data have: {', '.join(columns)}.",
        )
        taken = names | ({*columns} if takes_all else set())
        return self._instance.reset(**{name: values[name] for name in values if name in taken})

    def _reward(self, num_calls: int) -> float | None:
        """Return the reward of the turn; None if the class abstains and no call costs anything."""
        cost = self.call_cost * num_calls
        if not self._kind.has_reward:
            return 0.0 - cost
        value = resolve(self._instance.get_reward())
        if value is None or isnan(value):
            return -cost if cost else None
        # Changes add up to the final value, so turns get credit and the episode's sum is unchanged.
        change, self._paid = float(value) - self._paid, float(value)
        return change - cost


def _by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Return {name: tool}; two tools of one name are an error."""
    listed = list(tools)
    twice = [name for name, number in Counter(tool.name for tool in listed).items() if number > 1]
    require(not twice, f"several tools have the name '{''.join(twice[:1])}'; rename one of them.")
    return {tool.name: tool for tool in listed}
