"""An environment whose answers are those of tools: functions, or a class with TRL's contract."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan
from typing import Any, Literal

from litgrpo.arguments import at_least, did_you_mean, one_of, require
from litgrpo.environments.base import Message, StepResult
from litgrpo.environments.episode import shorten
from litgrpo.environments.tool import (
    UNKNOWN,
    Tool,
    ToolResult,
    import_object,
    make_tool,
    name_of,
    quote_name,
    resolve,
    run_calls,
    schema_of,
    to_result,
)
from litgrpo.environments.tool_calls import CallFormat, ToolCall, after_thoughts, format_of

NOT_TOOLS = ("reset", "get_reward", "close")
COLUMN = "environment"  # names a row's class, where there are several
Function = str | Callable
ToolsByName = dict[str, "EpisodeTools"]


@dataclass(frozen=True)
class EpisodeTools:
    """What the rows of one class are played with.

    Args:
        factory: makes its instances; None where there are only functions.
        tools: by name; methods are bound to an instance when an episode begins.
        methods: names of those that are methods.
        reward_attribute: attribute or method that holds the reward; "" for none.
    """

    factory: Callable[[], Any] | None
    tools: dict[str, Tool]
    methods: frozenset[str] = frozenset()
    reward_attribute: str = ""

    def bound(self, instance: object) -> dict[str, Tool]:
        """Its tools, the methods being those of the instance."""
        own = {name: getattr(instance, name) for name in self.methods}
        return self.tools | {name: replace(self.tools[name], function=own[name]) for name in own}


@dataclass(eq=False)
class Tools:
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
        call_format: `hermes`, `tags` or `python`, or a format object, such as
            `litgrpo.environments.TagFormat` with other tags.
        call_cost: subtracted from the reward per call, including failed ones.
        reward_attribute: attribute or method of the class with the reward; default: `get_reward`
            if the class has it.
        reward_timing: `turn` reads the reward after each turn and pays the change since the turn
            before, so a truncated episode has its reward; `episode` reads it once, after a turn
            without a call.
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
    call_format: str | CallFormat = "hermes"
    call_cost: float = 0.0
    reward_attribute: str | None = None
    reward_timing: Literal["turn", "episode"] = "turn"
    list_tools_in_prompt: bool = False
    max_calls_per_turn: int = 8
    max_calls: int = 64
    max_result_chars: int = 2_000
    error_text: str | None = None

    def __post_init__(self) -> None:
        """Check the settings, and describe every tool."""
        self._format = format_of(self.call_format)
        one_of("reward_timing", self.reward_timing, ("turn", "episode"))
        at_least("call_cost", self.call_cost, 0)
        at_least("max_calls_per_turn", self.max_calls_per_turn, 1)
        at_least("max_calls", self.max_calls, 1)
        at_least("max_result_chars", self.max_result_chars, 1)
        listed = isinstance(self.functions, list | tuple)
        require(
            listed, f"functions is {self.functions!r}; it must be a list, such as [my_tools.f]."
        )
        alone = self.factory is None
        require(not (alone and self.kwargs), "kwargs are arguments of factory, which is not given.")
        require(
            not (alone and self.reward_attribute),
            "reward_attribute needs factory, which is not given.",
        )
        self._kinds = self._described()
        every = [tool for kind in self._kinds.values() for tool in kind.tools.values()]
        require(bool(every), "Tools has no tools; give functions: [my_tools.f], or make: my.Class.")
        schemas = [tool.schema for tool in every]
        self.tools = [each for n, each in enumerate(schemas) if each not in schemas[:n]]
        self._instance: Any = None
        self._forget()

    def reset(self, row: dict[str, Any], seed: int) -> str | list[Message]:
        """Begin an episode; see `Environment.reset`.

        Raises:
            ValueError: `reset` of the class wants a column that the data lack, or the row's
                `environment` is none of those given.
        """
        self.close()
        name = row.get(COLUMN) if self._is_several else ""
        known = ", ".join(self._kinds)
        require(name in self._kinds, f"{COLUMN} of a row is {name!r}; factory has: {known}.")
        self._kind = self._kinds[str(name)]
        self._instance = self._kind.factory() if self._kind.factory else None
        self._tools |= self._kind.bound(self._instance)
        columns = {key: row[key] for key in row if not (self._is_several and key == COLUMN)}
        said = resolve(self._began(columns, seed))
        reward, there = self._kind.reward_attribute, dir(self._instance)
        has = not reward or reward in there
        require(has, f"reward: the class of tools has no {reward!r}{did_you_mean(reward, there)}.")
        fine = said is None or isinstance(said, str)
        require(fine, f"reset of a class of tools returned {said!r}; it must be None or a text.")
        return (self._description() if self.list_tools_in_prompt else "") + (said or "")

    def step(self, action: str) -> StepResult:
        """Make the calls of a turn; see `Environment.step`."""
        calls = self._format.parse(after_thoughts(action), self._tools)
        allowed = min(self.max_calls_per_turn, self.max_calls - self._num_calls)
        answers = self._answered(calls[:allowed]) + self._refused(calls[allowed:], allowed)
        answers = [replace(each, text=self._heard_text(each)) for each in answers]
        self._num_calls += len(calls[:allowed])
        called = Counter(each.tool for each in answers)
        failed = Counter(each.tool for each in answers if each.failed)
        return StepResult(
            observation=self._format.format_results(answers) if answers else "",
            reward=self._reward(len(calls)),
            done=not calls,
            calls={name: (called[name], failed[name]) for name in called},
        )

    def close(self) -> None:
        """End the episode."""
        instance = self._instance
        self._forget()
        if hasattr(instance, "close"):
            resolve(instance.close())

    def __getstate__(self) -> dict[str, Any]:
        """Without the instance, which may hold what cannot be copied."""
        return self.__dict__ | {"_instance": None, "_tools": {}}

    @property
    def _is_several(self) -> bool:
        return isinstance(self.factory, Mapping)

    def _forget(self) -> None:
        """As before the first episode."""
        self._instance = None
        self._tools: dict[str, Tool] = {}
        self._num_calls, self._paid = 0, 0.0

    def _described(self) -> ToolsByName:
        """The tools of each kind of rows, as schemas."""
        functions = _by_name(make_tool(each) for each in self.functions)
        if self.factory is None:
            return {"": EpisodeTools(None, functions)}
        makes = self.factory if isinstance(self.factory, Mapping) else {"": self.factory}
        return {str(name): self._of_class(given, functions) for name, given in makes.items()}

    def _of_class(self, given: Function, functions: dict[str, Tool]) -> EpisodeTools:
        """What one class brings; an instance is made and closed to see it."""
        factory = import_object("factory", given)
        require(callable(factory), f"factory is {given!r}; it must be a class, or make instances.")
        named = name_of(factory)

        make = partial(factory, **self.kwargs)
        try:
            instance = make()
        except Exception as error:  # whatever a user's class raises
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(f"factory: {named} cannot be made: {why}. See kwargs.") from error
        members = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
        require("reset" in members, f"factory: {named} has no method reset(self, **columns).")
        public = [name for name in members if name[0] != "_" and name not in NOT_TOOLS]
        own = [
            Tool(name, getattr(type(instance), name), schema_of(getattr(instance, name)))
            for name in public
        ]
        reward = {"get_reward"} & {*members}
        if "close" in members:
            resolve(instance.close())
        tools = _by_name([*functions.values(), *own])
        return EpisodeTools(
            make, tools, frozenset(public), self.reward_attribute or "".join(reward)
        )

    def _began(self, columns: dict[str, Any], seed: int) -> Any:
        """What `reset` of the instance returns."""
        if self._instance is None:
            return None
        parameters = inspect.signature(self._instance.reset).parameters.values()
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        # A class that names `seed` gets the group's, unless the data have such a column.
        given = {"seed": seed} | columns
        named = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
        missing = [
            each.name
            for each in parameters
            if each.name in named - {*given}
            and each.default is each.empty
            and each.kind is not each.VAR_POSITIONAL
        ]
        require(
            not missing,
            f"reset of {name_of(type(self._instance))} needs the column '{''.join(missing[:1])}';"
            f" the data have: {', '.join(columns)}.",
        )
        wanted = named | ({*columns} if takes_all else set())
        return self._instance.reset(**{name: given[name] for name in given if name in wanted})

    def _answered(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The answers, in the order of the calls."""
        checked = [self._checked(call) for call in calls]
        good = [each for each in checked if not isinstance(each, ToolResult)]
        results = iter(run_calls([(tool.function, arguments) for tool, arguments in good]))
        return [
            each if isinstance(each, ToolResult) else to_result(each[0], next(results))
            for each in checked
        ]

    def _checked(self, call: ToolCall) -> tuple[Tool, dict[str, Any]] | ToolResult:
        """The tool and its arguments, or what is wrong with the call."""
        tool = self._tools.get(call.name)
        if tool is None:
            known = f"unknown tool {quote_name(call.name)}; tools: {', '.join(self._tools)}"
            return ToolResult(UNKNOWN, f"error: {call.wrong or known}", failed=True)
        try:
            return tool, tool.arguments(call.arguments, call.positional)
        except ValueError as error:
            return ToolResult(tool.name, f"error: {error}", failed=True)

    def _refused(self, calls: Sequence[ToolCall], allowed: int) -> list[ToolResult]:
        """One error for the calls above the limits."""
        many = f"error: at most {allowed} calls; {len(calls)} were left out"
        none = "error: no calls are left"
        names = [call.name if call.name in self._tools else UNKNOWN for call in calls]
        return [ToolResult(name, many if allowed else none, failed=True) for name in names[:1]]

    def _heard_text(self, said: ToolResult) -> str:
        """An answer's text within its limit, and encodable."""
        fixed = self.error_text if said.failed else None
        text = said.text if fixed is None else fixed
        said_text = text.encode("utf-8", "replace").decode()
        return str(shorten(said_text, self.max_result_chars))

    def _reward(self, num_calls: int) -> float | None:
        """What the turn is paid; None where the class abstains and calls cost nothing."""
        cost = self.call_cost * num_calls
        if not self._kind.reward_attribute or (self.reward_timing == "episode" and num_calls):
            return 0.0 - cost
        holds = getattr(self._instance, self._kind.reward_attribute)
        value = resolve(holds() if callable(holds) else holds)
        if value is None or isnan(value):
            return -cost if cost else None
        change, self._paid = float(value) - self._paid, float(value)
        return change - cost

    def _description(self) -> str:
        """The tools, and how one is called, for the end of a prompt."""
        lines = "".join(f"- {tool.line}\n" for tool in self._tools.values())
        first = next(iter(self._tools.values()))
        return f"\n\nTools:\n{lines}Call a tool like this: {self._format.example(first)}\n"


def _by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Tools by name.

    Raises:
        ValueError: two have the same.
    """
    listed = list(tools)
    twice = [name for name, number in Counter(tool.name for tool in listed).items() if number > 1]
    require(not twice, f"several tools have the name '{''.join(twice[:1])}'; rename one of them.")
    return {tool.name: tool for tool in listed}
