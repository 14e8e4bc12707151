"""Calls of tools in the turns of an episode, whether the tools are functions or on servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from litgrpo.arguments import at_least
from litgrpo.environments.base import StepResult, schemas_of
from litgrpo.environments.episode import shorten
from litgrpo.environments.schemas import quote_name
from litgrpo.environments.tool import (
    UNKNOWN,
    EpisodeError,
    Tool,
    ToolResult,
    run_calls,
    to_result,
)
from litgrpo.environments.tool_calls import CallFormat, ToolCall, format_of


@dataclass(eq=False, kw_only=True)
class ToolCaller(ABC):
    """Environment that executes the tool calls of a turn; a turn without a call ends the episode.

    A subclass calls `_check_calls` when it is constructed, sets `_tools` at reset, and defines the
    reward of a turn. Arguments: see `Tools`.

    Example::

        class Clock(ToolCaller):
            def __post_init__(self):
                self._check_calls()

            def reset(self, row, seed):
                self._clear()
                self._tools = {"now": make_tool(now)}
                return ""

            def _reward(self, num_calls):
                return 0.0
    """

    call_format: str | CallFormat = "hermes"
    call_cost: float = 0.0
    list_tools_in_prompt: bool = False
    max_calls_per_turn: int = 8
    max_calls: int = 64
    max_result_chars: int = 2_000
    error_text: str | None = None

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """Schemas that the chat template shows; [] if the prompt text lists the tools."""
        return [] if self.list_tools_in_prompt else schemas_of(self)

    def step(self, action: str) -> StepResult:
        """Execute the calls of a turn; see `Environment.step`."""
        calls = self._format.parse_turn(action, self._tools)
        allowed = min(self.max_calls_per_turn, self.max_calls - self._num_calls)
        results = self._execute(calls[:allowed]) + self._reject_excess(calls[allowed:], allowed)
        results = [replace(result, text=self._observation_text(result)) for result in results]
        self._num_calls += len(calls[:allowed])
        called = Counter(result.tool for result in results)
        failed = Counter(result.tool for result in results if result.failed)
        return StepResult(
            observation=self._format.format_results(results) if results else "",
            reward=self._reward(len(calls)),
            done=not calls,
            calls={name: (called[name], failed[name]) for name in called},
        )

    @abstractmethod
    def _reward(self, num_calls: int) -> float | None:
        """Return the reward of the turn; None if there is none and no call costs anything."""

    def _clear(self) -> None:
        """Clear the state of the last episode."""
        self._tools: dict[str, Tool] = {}
        self._num_calls = 0

    def _check_calls(self) -> None:
        """Check the settings of calls."""
        self._format = format_of(self.call_format)
        at_least("call_cost", self.call_cost, 0)
        at_least("max_calls_per_turn", self.max_calls_per_turn, 1)
        at_least("max_calls", self.max_calls, 1)
        at_least("max_result_chars", self.max_result_chars, 1)

    def _execute(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the valid calls; return results in the order of the calls."""
        checked = [self._check(call) for call in calls]
        valid = [call for call in checked if not isinstance(call, ToolResult)]
        outcomes = run_calls([(tool.function, arguments) for tool, arguments in valid])
        for _, error in outcomes:
            if isinstance(error, EpisodeError):
                raise error
        results = iter(outcomes)
        return [
            call if isinstance(call, ToolResult) else to_result(call[0], next(results))
            for call in checked
        ]

    def _check(self, call: ToolCall) -> tuple[Tool, dict[str, Any]] | ToolResult:
        """Return the tool and its arguments, or the error of an invalid call."""
        tool = self._tools.get(call.name)
        if tool is None:
            name = quote_name(call.name, otherwise="of that name")
            unknown = f"unknown tool {name}; tools: {', '.join(self._tools)}"
            return ToolResult(UNKNOWN, f"error: {call.wrong or unknown}", failed=True)
        try:
            return tool, tool.arguments(call.arguments, call.positional)
        except ValueError as error:
            return ToolResult(tool.name, f"error: {error}", failed=True)

    def _reject_excess(self, calls: Sequence[ToolCall], allowed: int) -> list[ToolResult]:
        """Return one error for all calls above the limits."""
        if not calls:
            return []
        name = calls[0].name if calls[0].name in self._tools else UNKNOWN
        many = f"error: at most {allowed} calls; {len(calls)} were left out"
        return [ToolResult(name, many if allowed else "error: no calls are left", failed=True)]

    def _observation_text(self, result: ToolResult) -> str:
        """Return the text of a result, shortened to `max_result_chars`."""
        text = result.text
        if result.failed and self.error_text is not None:
            text = self.error_text
        # A lone surrogate in a Python string cannot be encoded by tokenizers.
        text = text.encode("utf-8", "replace").decode()
        return str(shorten(text, self.max_result_chars))

    def _description(self) -> str:
        """Describe the tools and an example call, for the end of a prompt."""
        lines = "".join(f"- {tool.line}\n" for tool in self._tools.values())
        first = next(iter(self._tools.values()))
        return f"\n\nTools:\n{lines}Call a tool like this: {self._format.example(first)}\n"
