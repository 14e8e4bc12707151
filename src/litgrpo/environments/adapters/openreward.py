"""Environments of an OpenReward server (package openreward, Open Reward Standard)."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import import_package, require, summarize_error
from litgrpo.environments.adapters.external import construct, no_connection, schema_of
from litgrpo.environments.base import Message, StepResult
from litgrpo.environments.tool import EpisodeError, Tool
from litgrpo.environments.tool_caller import ToolCaller
from litgrpo.http import call_within
from litgrpo.types import TASK_DATA

KEY_VARIABLE = "OPENREWARD_API_KEY"
CALL_S = 300.0  # limit of a call of the package, which has none


@check_field_types
@dataclass(eq=False)
class OpenReward(ToolCaller):
    """Plays tasks of an OpenReward environment, whose tools give rewards and end the episode.

    The rows come from `OpenRewardTasks`. Every episode has its own session. The reward of a turn is
    the sum of those of its calls. If the environment has a terminal tool, a turn without a call is
    passed to it; otherwise such a turn ends the episode.

    Args:
        url: address of the environment's server, such as http://localhost:8080.
        environment: `owner/name` on OpenReward's platform, whose key is read from the environment
            variable OPENREWARD_API_KEY; any name for another server.
        variant: name of the environment, in lower case, if the server has several.
        call_format: see `Tools`; so are `call_cost`, `max_calls_per_turn`, `max_calls`,
            `max_result_chars`, `error_text` and `list_tools_in_prompt`.

    Example::

        OpenReward(url="http://localhost:8080", environment="sums")
    """

    url: str
    environment: str
    variant: str | None = None

    def __post_init__(self) -> None:
        # The schemas of the tools come from the server.
        self._check_calls()
        server = find_environment(self.url, self.environment, self.variant)
        what = f"OpenReward {self.url}"
        listed = construct(what, lambda: call_within(CALL_S, server.list_tools))
        terminal = construct(what, lambda: call_within(CALL_S, server.terminal_tool))
        self._has_terminal = terminal is not None
        self._listed = {
            tool.name: Tool(
                tool.name,
                no_connection,
                schema_of(tool.name, tool.description, tool.input_schema),
            )
            for tool in listed
        }
        self.tools = [tool.schema for tool in self._listed.values()]
        self._session: Any = None
        self._clear()

    def reset(self, row: dict[str, Any], seed: int) -> str | list[Message]:
        """Begin an episode; see `Environment.reset`.

        Raises:
            ValueError: the row is not of `OpenRewardTasks`.
        """
        self.close()
        require(
            TASK_DATA in row,
            f"the data have no column {TASK_DATA!r}; `train` must be OpenRewardTasks.",
        )
        self._task: Mapping[str, Any] = json.loads(row[TASK_DATA])
        self._tools = {
            name: replace(tool, function=partial(self._call, name))
            for name, tool in self._listed.items()
        }
        return self._description() if self.list_tools_in_prompt and self._tools else ""

    def step(self, action: str) -> StepResult:
        result = super().step(action)
        if result.done and self._has_terminal and not self._is_over:
            self._ask(lambda session: session.call_terminal_tool(action))
            result = replace(result, reward=self._reward(0))
        return replace(result, done=result.done or self._is_over)

    def close(self) -> None:
        """End the episode and its session."""
        session, self._session = self._session, None
        self._clear()
        if session is not None:
            session.__exit__(None, None, None)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the session."""
        return vars(self) | {"_session": None, "_tools": {}}

    def _clear(self) -> None:
        super()._clear()
        self._task = {}
        self._gain, self._is_over = 0.0, False

    def _reward(self, num_calls: int) -> float:
        gain, self._gain = self._gain, 0.0
        return gain - self.call_cost * num_calls

    def _call(self, name: str, /, **arguments: Any) -> str:
        if self._is_over:
            raise ValueError("the episode is over")
        return self._ask(lambda session: session.call_tool(name, arguments))

    def _ask(self, call: Callable[[Any], Any]) -> str:
        """Call a tool in the session, which begins with the first call."""
        # ValueError is for the policy: the call does not fit the tool. All else ends the episode.
        errors = import_package("openreward.api.errors", "openreward")
        try:
            if self._session is None:
                session = open_session(self.url, self.environment, self.variant, self._task)
                self._session = call_within(CALL_S, session.__enter__)
            output = call_within(CALL_S, lambda: call(self._session))
        except errors.ToolCallError as error:
            raise ValueError(error.detail) from error
        except Exception as error:  # aiohttp, openreward
            raise EpisodeError(f"OpenReward: {summarize_error(error)}") from error
        self._gain += float(output.reward or 0.0)
        self._is_over |= bool(output.finished)
        return text_of(output.blocks)


def find_environment(url: str, environment: str, variant: str | None) -> Any:
    """Return the client of an environment (`openreward`, synchronous)."""
    client = _client(url, os.getpid())
    get = partial(client.get, environment, variant=variant)
    return construct(f"OpenReward {url}", lambda: call_within(CALL_S, get))


def open_session(url: str, environment: str, variant: str | None, task: Mapping[str, Any]) -> Any:
    """Return a session for a task, which is entered as a context."""
    types = import_package("openreward.api.environments.types", "openreward")
    return find_environment(url, environment, variant).session(task=types.Task(**task))


def text_of(blocks: Sequence[Any]) -> str:
    """Return blocks of a prompt or result as text; images are named only."""
    return "\n".join(str(getattr(block, "text", f"[{block.type}]")) for block in blocks)


@functools.cache
def _client(url: str, process: int) -> Any:
    """Return the client of a server; its thread does not survive a fork."""
    api = import_package("openreward.api.environments.client", "openreward")
    return api.EnvironmentsAPI(url, os.environ.get(KEY_VARIABLE, ""))
