"""Another environment for each task of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import require, without_repeats
from litgrpo.environments.base import (
    Environment,
    Message,
    StepResult,
    schemas_of,
    shown_tools_of,
)
from litgrpo.instantiate import instantiate_environment
from litgrpo.types import TASK


@check_field_types
@dataclass(eq=False)
class TaskEnvironments:
    """Plays each row in the environment of its task; rows of other tasks are a single turn.

    The column `task` of a row names its task (docs/howto/tasks_and_rollouts.md). The chat template
    shows the tools of that task only.

    Args:
        environments: {task: its environment}, an object, the import path of a class without
            arguments, or {class_path, init_args}.

    Example:
        >>> game = TaskEnvironments({"game": "litgrpo.environments.examples.NumberGame"})
        >>> game.reset({"prompt": "1+1?", "task": "sums"}, seed=0)
        ''
        >>> game.step("2")  # not a row of the game
        StepResult(observation='', reward=None, done=True, state=None, log={}, calls={})
    """

    environments: dict[str, Any]
    current: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        require(bool(self.environments), "environments is {}; give {task: environment}")
        self.environments = {
            str(task): instantiate_environment(entry) for task, entry in self.environments.items()
        }
        for task, environment in self.environments.items():
            require(
                isinstance(environment, Environment),
                f"the environment of task {task!r} is {environment!r:.80}, which has no "
                "`reset(row, seed)` or `step(action)`",
            )
        schemas = map(schemas_of, self.environments.values())
        self.tools = without_repeats(chain.from_iterable(schemas))

    @property
    def shown_tools(self) -> Mapping[str, list[dict[str, Any]]]:
        """{task: schemas of the tools that the chat template shows}."""
        return {
            task: shown_tools_of(environment) for task, environment in self.environments.items()
        }

    def reset(self, row: dict[str, Any], seed: int) -> str | list[Message]:
        """Begin an episode in the environment of the row's task; see `Environment.reset`."""
        self.close()
        self.current = self.environments.get(str(row.get(TASK)))
        opening: str | list[Message] = "" if self.current is None else self.current.reset(row, seed)
        return opening

    def step(self, action: str) -> StepResult:
        """Answer one turn; the first one ends the episode of a task without an environment."""
        if self.current is None:
            return StepResult(reward=None, done=True)
        result: StepResult = self.current.step(action)
        return result

    def close(self) -> None:
        """End the episode."""
        if hasattr(self.current, "close"):
            self.current.close()
        self.current = None
