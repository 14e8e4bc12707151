"""What the adapters of other libraries have in common: late imports, one game per episode."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import Any

from litgrpo.environments.base import Message, StepResult

ACTION = "action"  # what the calls of a game are counted as


class ExternalEnvironment(ABC):
    """An environment that plays one game of another library at a time."""

    _game: Any = None

    @abstractmethod
    def reset(self, row: dict[str, Any], seed: int) -> str | list[Message]:
        """Begin an episode; see `Environment.reset`."""

    @abstractmethod
    def step(self, action: str) -> StepResult:
        """Answer one turn; see `Environment.step`."""

    def close(self) -> None:
        """End the game, if one is played."""
        game, self._game = self._game, None
        if hasattr(game, "close"):
            game.close()

    def __getstate__(self) -> dict[str, Any]:
        """Without the game, which may hold what cannot be copied."""
        return {name: value for name, value in vars(self).items() if name != "_game"}


def import_package(module: str, install: str) -> Any:
    """A module of a package that is not among our requirements.

    Raises:
        ValueError: it cannot be imported; with the command that installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"{error}; `pip install {install}` installs it.") from error


def construct(what: str, make: Callable[[], Any]) -> Any:
    """What `make` makes.

    Raises:
        ValueError: it raised; `what` was make_tool, and why it could not be, in one line.
    """
    try:
        return make()
    except (Exception, SystemExit) as error:  # libraries raise, and some exit, as they like
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"{what} cannot be played: {type(error).__name__}: {why}") from error


def format_opening(row: dict[str, Any], text: str) -> str:
    """The first observation, on lines of its own where the prompt has a text."""
    return f"\n\n{text.strip()}" if row.get("prompt") else text.strip()


def reject_action(text: str) -> StepResult:
    """A turn without an action that can be played: a fixed text, and a call that failed."""
    return StepResult(text, calls={ACTION: (1, 1)})


def game_result(
    said: str | list[Message], reward: float, *, done: bool, state: str, failed: bool = False
) -> StepResult:
    """A turn that the game answered; its state is a hash, equal in every process."""
    digest = hashlib.blake2b(state.encode("utf-8", "replace"), digest_size=12).hexdigest()
    return StepResult(said, float(reward), done, digest, calls={ACTION: (1, int(failed))})
