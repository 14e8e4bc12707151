"""Adapter for OpenEnv environments: a class in this process, or a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from numbers import Real
from typing import Any
from urllib.parse import urlsplit

from litgrpo.arguments import import_object, import_package, require
from litgrpo.environments.adapters.external import (
    ExternalEnvironment,
    construct,
    format_opening,
    game_result,
    reject_action,
)
from litgrpo.environments.base import StepResult
from litgrpo.environments.tool_calls import after_thoughts

SEEDS = 2**31
NOT_SEEN = ("done", "reward", "metadata")


@dataclass(eq=False)
class OpenEnv(ExternalEnvironment):
    """OpenEnv environment: `reset(seed=)`, `step(action)`.

    The text of a turn becomes the action's `action_field`. With `action_field: ""` the turn must
    contain the action as a JSON object. A turn without one, or that the action class rejects, gets
    `invalid_message` and counts as a failed call. An error of a server fails the episode.

    Args:
        factory: class of the environment, a function that returns it, or its import path.
        action_class: class of its actions, or its import path; required with `factory`.
        url: instead of both, the address of a server, such as http://localhost:8000; OpenEnv's
            client opens one WebSocket session per episode.
        kwargs: arguments of `factory`.
        action_field: field of the action that receives the text.
        observation_field: field that the policy sees; default: all fields, as JSON.
        timeout_s: time limit of a server's response.
        invalid_message: observation after an invalid action.

    Example::

        OpenEnv(url="http://localhost:8000", observation_field="text")
        OpenEnv("my_env.Env", "my_env.Action", action_field="guess")
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
        # An episode is begun once to check the settings.
        parts = urlsplit(self.url or "")
        require(
            "@" not in parts.netloc and not parts.query,
            "OpenEnv: url must not contain a user name, a password or a query, which would be "
            "written to files and logs.",
        )
        alone = (self.url is None) != (self.factory is None)
        require(alone, "OpenEnv needs either factory: an.import.path, or url: http://host:port.")
        pair = (self.action_class is None) == (self.factory is None)
        require(
            pair,
            "action_class is required with factory and not allowed with url.",
        )
        construct(f"OpenEnv {self.url or self.factory}", lambda: self.reset({}, 0))
        self.close()

    def reset(self, row: dict[str, Any], seed: int) -> str:
        self.close()
        self._game = self._make_game()
        return format_opening(row, self._observe(_fields(self._game.reset(seed=seed % SEEDS))))

    def step(self, action: str) -> StepResult:
        try:
            action = self._action(after_thoughts(action))
        except (ValueError, TypeError):  # also pydantic's ValidationError
            return reject_action(self.invalid_message)
        seen = _fields(self._game.step(action))
        text = self._observe(seen)
        return game_result(text, seen["reward"] or 0.0, done=seen["done"], state=text)

    def _make_game(self) -> Any:
        if self.url is None:
            return import_object("factory", self.factory)(**self.kwargs)
        client = import_package("openenv.core.generic_client", "openenv").GenericEnvClient
        address = self.url.rstrip("/")
        game = client(base_url=address, message_timeout_s=self.timeout_s).sync()
        game.connect()
        return game

    def _action(self, turn: str) -> Any:
        """Build the action of a turn; ValueError or TypeError if it has none."""
        values = {self.action_field: turn}
        if not self.action_field:
            begin, end = turn.find("{"), turn.rfind("}")
            values = json.loads(turn[begin : end + 1] if 0 <= begin < end else "")
        return (
            values
            if self.action_class is None
            else import_object("action_class", self.action_class)(**values)
        )

    def _observe(self, seen: dict[str, Any]) -> str:
        if self.observation_field is None:
            return json.dumps(
                {name: seen[name] for name in seen if name not in NOT_SEEN}, default=str
            )
        names = ", ".join(seen)
        require(
            self.observation_field in seen,
            f"an observation has no {self.observation_field!r}; it has: {names}.",
        )
        return str(seen[self.observation_field])


def _fields(answer: Any) -> dict[str, Any]:
    """Return the fields of an observation or of a server's response, with `reward` and `done`."""
    if hasattr(answer, "model_dump"):
        fields = dict(answer.model_dump())
    else:
        observation = answer.observation
        require(
            isinstance(observation, dict),
            f"the observation is {type(observation).__name__}; expected an object",
        )
        fields = {**observation, "reward": answer.reward, "done": answer.done}
    reward, done = fields.get("reward"), fields.get("done")
    is_number = isinstance(reward, Real) and isfinite(reward)
    require(reward is None or is_number, f"reward is {reward!r:.60}; expected a finite number")
    # A bool of numpy is none of Python; "false" is a true text.
    is_bool = not isinstance(done, str) and done in (None, False, True)
    require(is_bool, f"done is {done!r:.60}; expected true or false")
    return {**fields, "reward": reward, "done": bool(done)}
