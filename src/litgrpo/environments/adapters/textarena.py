"""Adapter for single-player games of TextArena."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from litgrpo.arguments import import_package
from litgrpo.environments.adapters.external import (
    ExternalEnvironment,
    construct,
    format_opening,
    game_result,
)
from litgrpo.environments.base import StepResult

SEEDS = 2**31


@dataclass(eq=False)
class TextArena(ExternalEnvironment):
    """Single-player game of TextArena, such as GuessTheNumber-v0.

    TextArena repeats the conversation in each observation; the policy gets only the new part,
    without the echo of its turn. The game responds to invalid moves, which count as failed calls,
    and ends after several. The reward is given at the end. The state is the whole observation, so
    that states are equal only after equal moves. TextArena seeds the global generator of `random`.

    Args:
        env_id: id of the game.
        kwargs: arguments of `textarena.make`.

    Example::

        game = TextArena("GuessTheNumber-v0")
        game.reset({}, seed=0)
        game.step("[7]").observation
    """

    env_id: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A game is begun once to check that it has one player.
        arena = import_package("textarena", "textarena")
        construct(f"env_id: {self.env_id}", lambda: arena.make(self.env_id, **self.kwargs))
        construct(f"env_id: {self.env_id} for one player", lambda: self.reset({}, 0))
        self.close()

    def reset(self, row: dict[str, Any], seed: int) -> str:
        self.close()
        self._game = import_package("textarena", "textarena").make(self.env_id, **self.kwargs)
        self._game.reset(num_players=1, seed=seed % SEEDS)
        self._seen = self._observation()
        return format_opening(row, self._seen)

    def step(self, action: str) -> StepResult:
        done, _ = self._game.step(action)
        state = self._game.state
        failed = bool(state.error_count or state.game_info[0]["invalid_move"])
        if done:
            rewards, _ = self._game.close()
            self._game = None
            return game_result(
                "", rewards[0], done=True, state=f"{self._seen}{action}", failed=failed
            )
        before, self._seen = self._seen, self._observation()
        new = without_echo(self._seen.removeprefix(before), action).strip()
        return game_result(new, 0.0, done=False, state=self._seen, failed=failed)

    def close(self) -> None:
        """Drop the game; TextArena's `close` only returns its rewards."""
        self._game = None

    def _observation(self) -> str:
        return str(self._game.get_observation()[1])


def without_echo(new: str, action: str) -> str:
    r"""Remove the line that repeats the action, with or without brackets.

    Example:
        >>> without_echo("\n[Player] [up]\n[GAME] 2 4", "up")
        '\n[GAME] 2 4'
    """
    return re.sub(rf"^\s*\[[^\]\n]*\] \[?{re.escape(action)}\]?(?=\n|$)", "", new)
