"""Shared code of the adapters: optional imports, one game per episode."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from litgrpo.arguments import summarize_error
from litgrpo.environments.base import Message, StepResult
from litgrpo.environments.schemas import validator_for
from litgrpo.environments.tool import EpisodeError

ACTION = "action"  # name under which turns are counted as tool calls


class ExternalEnvironment(ABC):
    """Environment that plays one game of another library at a time.

    Example::

        class Coin(ExternalEnvironment):
            def reset(self, row, seed):
                self._game = coin_library.make(seed)
                return format_opening(row, "Heads or tails?")

            def step(self, action):
                text, reward = self._game.play(action)
                return game_result(text, reward, done=True, state=text)
    """

    _game: Any = None

    @abstractmethod
    def reset(self, row: dict[str, Any], seed: int) -> str | list[Message]:
        """Begin an episode; see `Environment.reset`."""

    @abstractmethod
    def step(self, action: str) -> StepResult:
        """Answer one turn; see `Environment.step`."""

    def close(self) -> None:
        """Close the current game."""
        game, self._game = self._game, None
        if hasattr(game, "close"):
            game.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the game, which may hold windows or connections."""
        return {name: value for name, value in vars(self).items() if name != "_game"}


def construct(what: str, make: Callable[[], Any]) -> Any:
    """Call `make` and return its result; an error becomes a ValueError in one line with `what`."""
    try:
        return make()
    except (Exception, SystemExit) as error:  # some libraries call sys.exit
        raise ValueError(f"{what} cannot be played: {summarize_error(error)}") from error


def format_opening(row: dict[str, Any], text: str) -> str:
    """Return the first observation, separated from the prompt's text by an empty line."""
    return f"\n\n{text.strip()}" if row.get("prompt") else text.strip()


def reject_action(text: str) -> StepResult:
    """Return the result of a turn without a valid action: a fixed text and a failed call."""
    return StepResult(text, calls={ACTION: (1, 1)})


def game_result(
    observation: str | list[Message], reward: float, *, done: bool, state: str, failed: bool = False
) -> StepResult:
    """Return the result of a valid action.

    The state is a digest, because `hash` of a string differs between processes.
    """
    digest = hashlib.blake2b(state.encode("utf-8", "replace"), digest_size=12).hexdigest()
    return StepResult(observation, float(reward), done, digest, calls={ACTION: (1, int(failed))})


def no_connection(**arguments: Any) -> str:
    """Fail the episode: the function of a tool outside of one."""
    raise EpisodeError("a tool of a server was called outside of an episode")


def schema_of(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> Any:
    """Return a tool of a server as chat templates show it, and check its JSON schema."""
    says = " ".join((description or name).split())
    try:
        schema = {"type": "object", "properties": {}, **(parameters or {})}
        if schema["type"] != "object" or not isinstance(schema["properties"], Mapping):
            raise ValueError("it is not the schema of an object with named properties")
        validator_for(json.dumps(schema, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"the server's schema of the tool {name!r:.60} cannot be used: "
            f"{summarize_error(error).removeprefix('ValueError: ')}. Leave this tool out, or "
            "correct its schema."
        ) from error
    # Prompts show the type of each argument, which the schemas `true` and `false` do not have.
    as_objects: dict[Any, Any] = {True: {}, False: {"not": {}}}
    schema["properties"] = {
        key: as_objects[part] if isinstance(part, bool) else part
        for key, part in schema["properties"].items()
    }
    return {
        "type": "function",
        "function": {"name": name, "description": says, "parameters": schema},
    }
