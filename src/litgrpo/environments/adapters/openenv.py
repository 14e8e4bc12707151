"""Environments of OpenEnv: a class in this process, or a server by its address."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from litgrpo.arguments import require
from litgrpo.environments.adapters.external import (
    ExternalEnvironment,
    construct,
    format_opening,
    game_result,
    import_package,
    reject_action,
)
from litgrpo.environments.base import StepResult
from litgrpo.environments.tool import import_object
from litgrpo.environments.tool_calls import after_thoughts

SEEDS = 2**31
NOT_SEEN = ("done", "reward", "metadata")


@dataclass(eq=False)
class OpenEnv(ExternalEnvironment):
    """An environment of OpenEnv: `reset(seed=)`, `step(action)`, with actions of one text.

    A turn becomes the action's `action_field`; with `action_field: ""` it is the action as a JSON
    object, from the first { to the last }. What the class of the actions refuses, and a turn
    without such an object, is answered by `invalid_message` and counts as a failed call; an error
    of a
    server fails the episode.

    Args:
        factory: class of the environment, a function that makes it, or its import path.
        action_class: class of its actions, or its import path; with `factory`.
        url: instead of both, the address of a server, such as http://localhost:8000; the package's
            own client speaks to it by WebSocket, one session for each episode.
        kwargs: arguments of `factory`.
        action_field: field of the action that the turn becomes.
        observation_field: field of the observation that is heard; None: all of them, as JSON.
        timeout_s: seconds that a server has to answer.
        invalid_message: the text.
    """

    factory: str | Callable[..., Any] | None = None
    action_class: str | Callable[..., Any] | None = None
    url: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    action_field: str = "message"
    observation_field: str | None = None
    timeout_s: float = 60.0
    invalid_message: str = "That is no action."

    def __post_init__(self) -> None:
        """Begin an episode once, to see that it can be heard."""
        alone = (self.url is None) != (self.factory is None)
        require(alone, "OpenEnv needs either factory: an.import.path, or url: http://host:port.")
        pair = (self.action_class is None) == (self.factory is None)
        require(
            pair,
            "action_class, the class of the actions, goes with factory; a server knows its own.",
        )
        construct(f"OpenEnv {self.url or self.factory}", lambda: self.reset({}, 0))
        self.close()

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Begin an episode; see `Environment.reset`."""
        self.close()
        self._game = self._made()
        return format_opening(row, self._told(_fields(self._game.reset(seed=seed % SEEDS))))

    def step(self, action: str) -> StepResult:
        """Take one action; see `Environment.step`."""
        try:
            action = self._action(after_thoughts(action))
        except (ValueError, TypeError):  # also pydantic's ValidationError
            return reject_action(self.invalid_message)
        seen = _fields(self._game.step(action))
        text = self._told(seen)
        return game_result(text, seen["reward"] or 0.0, done=bool(seen["done"]), state=text)

    def _made(self) -> Any:
        if self.url is None:
            return import_object("factory", self.factory)(**self.kwargs)  # type: ignore[arg-type]
        client = import_package("openenv.core.generic_client", "openenv").GenericEnvClient
        address = self.url.rstrip("/")
        game = client(base_url=address, message_timeout_s=self.timeout_s).sync()
        game.connect()
        return game

    def _action(self, said: str) -> Any:
        """The action that a turn says.

        Raises:
            ValueError, TypeError: it says none.
        """
        values = {self.action_field: said}
        if not self.action_field:
            found = re.search(r"\{.*\}", said, re.DOTALL)
            values = json.loads(found[0] if found else "")
        return (
            values
            if self.action_class is None
            else import_object("action_class", self.action_class)(**values)
        )

    def _told(self, seen: dict[str, Any]) -> str:
        if self.observation_field is None:
            return json.dumps(
                {name: seen[name] for name in seen if name not in NOT_SEEN}, default=str
            )
        known = ", ".join(seen)
        require(
            self.observation_field in seen,
            f"an observation has no {self.observation_field!r}; it has: {known}.",
        )
        return str(seen[self.observation_field])


def _fields(answer: Any) -> dict[str, Any]:
    """The fields of an observation, or of a server's answer, with `reward` and `done`."""
    if hasattr(answer, "model_dump"):
        return dict(answer.model_dump())
    return {**answer.observation, "reward": answer.reward, "done": answer.done}
