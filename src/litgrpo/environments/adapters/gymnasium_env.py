"""Adapter for environments with gymnasium's interface: gymnasium, GEM, user-defined."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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

# {class of a game: names of its actions, by number}
NAMES: dict[str, tuple[str, ...]] = {
    "FrozenLakeEnv": ("left", "down", "right", "up"),
    "CliffWalkingEnv": ("up", "right", "down", "left"),
    "TaxiEnv": ("south", "north", "east", "west", "pickup", "dropoff"),
    "BlackjackEnv": ("stick", "hit"),
}
STANDS = ("red", "green", "yellow", "blue")
CLIFF = (4, 12)  # rows, columns


def frozen_lake(observation: Any, game: Any) -> str:
    """Draw the map: F frozen, H hole, G goal, P the player."""
    rows = [[cell.decode() for cell in row] for row in game.desc]
    position = divmod(int(observation), len(rows[0]))
    return f"{_draw(rows, position, 'P')}\nP is you, S start, F ice, H hole, G goal."


def cliff_walking(observation: Any, game: Any) -> str:
    """Draw the map: C cliff, G goal, P the player."""
    height, width = CLIFF
    rows = [["."] * width for _ in range(height)]
    rows[-1] = ["S", *"C" * (width - 2), "G"]
    position = divmod(int(observation), width)
    return f"{_draw(rows, position, 'P')}\nP is you, S start, C cliff, G goal."


def taxi(observation: Any, game: Any) -> str:
    """Draw the map with its walls, and describe the passenger's place and destination."""
    row, column, passenger, goal = (int(number) for number in game.decode(int(observation)))
    rows = [[cell.decode() for cell in line] for line in game.desc]
    where = f"at {STANDS[passenger]}" if passenger < len(STANDS) else "in the taxi"
    map_ = _draw(rows, (row + 1, 2 * column + 1), "T")
    return f"{map_}\nT is the taxi. The passenger is {where} and goes to {STANDS[goal]}."


def blackjack(observation: Any, game: Any) -> str:
    """Describe the player's sum and the dealer's open card."""
    total, dealer, ace = (int(number) for number in observation)
    return f"You have {total}{' with a usable ace' if ace else ''}. The dealer shows {dealer}."


DESCRIBERS: dict[str, Callable[[Any, Any], str]] = {
    "FrozenLakeEnv": frozen_lake,
    "CliffWalkingEnv": cliff_walking,
    "TaxiEnv": taxi,
    "BlackjackEnv": blackjack,
}


def _draw(rows: list[list[str]], position: tuple[int, int], mark: str) -> str:
    rows[position[0]][position[1]] = mark
    return "\n".join("".join(row) for row in rows)


SEEDS = 2**31  # some games seed numpy's global generator, which accepts seeds below 2**32


@dataclass(eq=False)
class TextEnv(ExternalEnvironment):
    """Game with gymnasium's interface, played by text.

    `reset(seed=)` returns (observation, info), `step(action)` (observation, reward, terminated,
    truncated, info). For discrete actions, the last word of a turn that is the name or the number
    of an action is played; other games receive the text. A turn without an action, or whose step
    raises ValueError, gets `invalid_message` and counts as a failed call.

    Args:
        env_id: id of a gymnasium game, such as FrozenLake-v1.
        factory: instead of `env_id`, a class or function that returns the game, or its import path:
            `gem.envs.registration.make`, `my_games.Maze`.
        kwargs: arguments of the game.
        action_names: names of discrete actions, in order; built in for FrozenLake, CliffWalking,
            Taxi and Blackjack.
        action_pattern: regular expression; the action is in the first group of its last match.
        format_observation: `format_observation(observation, game) -> text`, or its import path;
            built in for those four games; default: `str(observation)`.
        invalid_message: observation after an invalid action; {actions} is replaced by the names.

    Example::

        game = TextEnv("FrozenLake-v1", kwargs={"is_slippery": False})
        game.reset({}, seed=0)
        game.step("I go right").reward  # 0.0
    """

    env_id: str | None = None
    factory: str | Callable[..., Any] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    action_names: Sequence[str] | None = None
    action_pattern: str | None = None
    format_observation: str | Callable[..., str] | None = None
    invalid_message: str = "That is no action. {actions}"

    def __post_init__(self) -> None:
        # A game is created once to check that it can be played by text.
        alone = (self.env_id is None) != (self.factory is None)
        require(alone, "TextEnv needs either env_id: FrozenLake-v1, or factory: an.import.path.")
        if self.action_pattern is not None:
            _check_pattern(self.action_pattern)
        game = self._make_game()
        kind = type(_bare(game)).__name__
        self._describe = self._describer(kind, _space(game, "observation_space"))
        self._numbers = self._action_numbers(kind, _space(game, "action_space"))
        listed = ", ".join(name for name in self._numbers if not name.isdecimal())
        numbers = f"the numbers {', '.join(self._numbers)}"
        self._actions = f"Actions: {listed or numbers}." if self._numbers else ""
        self._game = game
        self.close()

    def reset(self, row: dict[str, Any], seed: int) -> str:
        self.close()
        self._game = self._make_game()
        observation, info = self._game.reset(seed=seed % SEEDS)
        return format_opening(row, f"{self._observe(observation, info)}\n{self._actions}")

    def step(self, action: str) -> StepResult:
        fixed = self.invalid_message.replace("{actions}", self._actions).strip()
        game_action = self._action(action)
        if game_action is None:
            return reject_action(fixed)
        try:
            observation, reward, terminated, truncated, info = self._game.step(game_action)
        except ValueError:
            return reject_action(fixed)
        text = self._observe(observation, info)
        return game_result(text, reward, done=bool(terminated or truncated), state=text)

    def _make_game(self) -> Any:
        if self.factory is None:
            gymnasium = import_package("gymnasium", '"gymnasium[toy-text]"')
            return construct(
                f"env_id: {self.env_id}", lambda: gymnasium.make(self.env_id, **self.kwargs)
            )
        make = import_object("factory", self.factory)
        require(callable(make), f"factory is {self.factory!r}; it must be a class or a function.")
        return construct(f"factory: {self.factory}", lambda: make(**self.kwargs))

    def _describer(self, kind: str, space: Any) -> Callable[[Any, Any], str]:
        if self.format_observation is not None:
            describe: Callable[[Any, Any], str] = import_object(
                "format_observation", self.format_observation
            )
            return describe
        flat = space is None or len(space.shape or ()) < 2  # noqa: PLR2004 - rows and columns
        require(
            flat,
            f"{kind} has image observations; set format_observation to describe them.",
        )
        return DESCRIBERS.get(kind, lambda observation, _: str(observation))

    def _action_numbers(self, kind: str, space: Any) -> dict[str, int]:
        """Return {name or number as a text: action}; {} if actions are texts."""
        form = "Text" if space is None else type(space).__name__
        fits = form in ("Text", "Discrete")
        require(fits, f"{kind} has actions of type {form}; only Text and Discrete are supported.")
        if form == "Text":
            return {}
        first, number = int(space.start), int(space.n)
        names = list(NAMES.get(kind, ()) if self.action_names is None else self.action_names)
        full = not names or len({name.casefold() for name in names}) == number
        require(
            full, f"action_names has {names}; {kind} has {number} actions, each with its own name."
        )
        words = all(re.fullmatch(r"[^\W\d][\w-]*", name) for name in names)
        require(words, f"action_names has {names}; a name must be one word, not a number.")
        numbers = {str(first + n): first + n for n in range(number)}
        return {name.casefold(): first + n for n, name in enumerate(names)} | numbers

    def _action(self, turn: str) -> str | int | None:
        """Return the action of a turn, or None."""
        text: str | None = turn
        if self.action_pattern is not None:
            matches = [match[1] for match in re.finditer(self.action_pattern, after_thoughts(turn))]
            text = matches[-1] if matches else None
        if text is None or not self._numbers:
            return text
        words = re.findall(r"[\w.-]+", after_thoughts(text).casefold())
        names = [word.rstrip(".-") for word in words if word.rstrip(".-") in self._numbers]
        return self._numbers[names[-1]] if names else None

    def _observe(self, observation: Any, info: dict[str, Any]) -> str:
        """Return an observation as text, with the suffix that GEM puts into `info`."""
        text = self._describe(observation, _bare(self._game))
        return f"{text}\n{info.get('suffix') or ''}".strip()


def _bare(game: Any) -> Any:
    """Return a game without gymnasium's wrappers."""
    return getattr(game, "unwrapped", game)


def _space(game: Any, name: str) -> Any:
    """Return a space of a game, or None."""
    return getattr(game, name, None)


def _check_pattern(pattern: str) -> None:
    """Reject a pattern that is not a regular expression with a group."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(
            f"action_pattern is {pattern!r}, not a regular expression: {error}."
        ) from error
    require(groups > 0, f"action_pattern is {pattern!r}; put the action in (parentheses).")
