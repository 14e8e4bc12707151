"""Environments with gymnasium's signature: GEM, gymnasium's own games, yours."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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

# Class of a game: its actions by number.
NAMES: dict[str, tuple[str, ...]] = {
    "FrozenLakeEnv": ("left", "down", "right", "up"),
    "CliffWalkingEnv": ("up", "right", "down", "left"),
    "TaxiEnv": ("south", "north", "east", "west", "pickup", "dropoff"),
    "BlackjackEnv": ("stick", "hit"),
}
STANDS = ("red", "green", "yellow", "blue")
CLIFF = (4, 12)  # rows, columns


def frozen_lake(observation: Any, game: Any) -> str:
    """The map: F frozen, H hole, G goal, P the player."""
    rows = [[cell.decode() for cell in row] for row in game.desc]
    place = divmod(int(observation), len(rows[0]))
    return f"{_drawn(rows, place, 'P')}\nP is you, S start, F ice, H hole, G goal."


def cliff_walking(observation: Any, game: Any) -> str:
    """The map: C cliff, G goal, P the player."""
    height, width = CLIFF
    rows = [["."] * width for _ in range(height)]
    rows[-1] = ["S", *"C" * (width - 2), "G"]
    place = divmod(int(observation), width)
    return f"{_drawn(rows, place, 'P')}\nP is you, S start, C cliff, G goal."


def taxi(observation: Any, game: Any) -> str:
    """The map with its walls, and where the passenger is and wants to go."""
    row, column, passenger, goal = (int(each) for each in game.decode(int(observation)))
    rows = [[cell.decode() for cell in line] for line in game.desc]
    where = f"at {STANDS[passenger]}" if passenger < len(STANDS) else "in the taxi"
    map_ = _drawn(rows, (row + 1, 2 * column + 1), "T")
    return f"{map_}\nT is the taxi. The passenger is {where} and goes to {STANDS[goal]}."


def blackjack(observation: Any, game: Any) -> str:
    """The player's sum, and the card that the dealer shows."""
    total, shown, ace = (int(each) for each in observation)
    return f"You have {total}{' with a usable ace' if ace else ''}. The dealer shows {shown}."


DESCRIBERS: dict[str, Callable[[Any, Any], str]] = {
    "FrozenLakeEnv": frozen_lake,
    "CliffWalkingEnv": cliff_walking,
    "TaxiEnv": taxi,
    "BlackjackEnv": blackjack,
}


def _drawn(rows: list[list[str]], place: tuple[int, int], mark: str) -> str:
    rows[place[0]][place[1]] = mark
    return "\n".join("".join(row) for row in rows)


SEEDS = 2**31  # numpy's global generator takes no larger ones than 2**32 - 1


@dataclass(eq=False)
class TextEnv(ExternalEnvironment):
    """A game with gymnasium's signature, played by what the policy says.

    `reset(seed=)` returns (observation, info), `step(action)` (observation, reward, terminated,
    truncated, info). A game of numbered actions takes the last word of a turn that is the name
    or the number of one; any other game takes the text. A turn without an action, and one whose
    step raises ValueError, is answered by `invalid_message` and counts as a failed call.

    Args:
        env_id: of a game of gymnasium, such as FrozenLake-v1.
        factory: instead of it, a class or function that makes the game, or its import path:
            `gem.envs.registration.make`, `my_games.Maze`.
        kwargs: its arguments.
        action_names: names of numbered actions, in their order; those of FrozenLake,
            CliffWalking, Taxi
            and Blackjack are known.
        action_pattern: regular expression; the action is in the first group of its last match.
        format_observation: `format_observation(observation, game) -> text`, or its import path;
            for those four games
            there is one, else an observation is written as it is.
        invalid_message: the text; {actions} are the names.
    """

    env_id: str | None = None
    factory: str | Callable[..., Any] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    action_names: Sequence[str] | None = None
    action_pattern: str | None = None
    format_observation: str | Callable[..., str] | None = None
    invalid_message: str = "That is no action. {actions}"

    def __post_init__(self) -> None:
        """Make a game once, and look whether it can be played by texts."""
        alone = (self.env_id is None) != (self.factory is None)
        require(alone, "TextEnv needs either env_id: FrozenLake-v1, or factory: an.import.path.")
        if self.action_pattern is not None:
            _check_pattern(self.action_pattern)
        game = self._made()
        kind = type(_bare(game)).__name__
        self._describe = self._describer(kind, _space(game, "observation_space"))
        self._numbers = self._numbered(kind, _space(game, "action_space"))
        listed = ", ".join(name for name in self._numbers if not name.isdecimal())
        numbers = f"the numbers {', '.join(self._numbers)}"
        self._actions = f"Actions: {listed or numbers}." if self._numbers else ""
        self._game = game
        self.close()

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Begin a game, and tell its actions; see `Environment.reset`."""
        self.close()
        self._game = self._made()
        observation, info = self._game.reset(seed=seed % SEEDS)
        return format_opening(row, f"{self._told(observation, info)}\n{self._actions}")

    def step(self, action: str) -> StepResult:
        """Play one action; see `Environment.step`."""
        fixed = self.invalid_message.replace("{actions}", self._actions).strip()
        found = self._action(action)
        if found is None:
            return reject_action(fixed)
        try:
            observation, reward, terminated, truncated, info = self._game.step(found)
        except ValueError:
            return reject_action(fixed)
        text = self._told(observation, info)
        return game_result(text, reward, done=bool(terminated or truncated), state=text)

    def _made(self) -> Any:
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
            flat, f"{kind} is seen as images; give format_observation: my.function to write them."
        )
        return DESCRIBERS.get(kind, lambda observation, _: str(observation))

    def _numbered(self, kind: str, space: Any) -> dict[str, int]:
        """{name or number as a text: action}; nothing where actions are texts."""
        form = "Text" if space is None else type(space).__name__
        fits = form in ("Text", "Discrete")
        require(fits, f"{kind} takes actions of {form}; only texts and Discrete can be said.")
        if form == "Text":
            return {}
        first, number = int(space.start), int(space.n)
        names = list(NAMES.get(kind, ()) if self.action_names is None else self.action_names)
        full = not names or len({name.casefold() for name in names}) == number
        require(
            full, f"action_names has {names}; {kind} has {number} actions, each with its own name."
        )
        words = all(re.fullmatch(r"[^\W\d][\w-]*", name) for name in names)
        require(words, f"action_names has {names}; a name is one word that is no number.")
        numbers = {str(first + n): first + n for n in range(number)}
        return {name.casefold(): first + n for n, name in enumerate(names)} | numbers

    def _action(self, said: str) -> str | int | None:
        """The action that was said; None for none."""
        text = said
        if self.action_pattern is not None:
            found = [match[1] for match in re.finditer(self.action_pattern, after_thoughts(said))]
            text = (found or [None])[-1]
        if text is None or not self._numbers:
            return text
        words = re.findall(r"[\w.-]+", after_thoughts(text).casefold())
        known = [word.rstrip(".-") for word in words if word.rstrip(".-") in self._numbers]
        return self._numbers[known[-1]] if known else None

    def _told(self, observation: Any, info: dict[str, Any]) -> str:
        """An observation as a text, and what GEM would say after it."""
        text = self._describe(observation, _bare(self._game))
        return f"{text}\n{info.get('suffix') or ''}".strip()


def _bare(game: Any) -> Any:
    """A game without the wrappers of gymnasium, where it has some."""
    return getattr(game, "unwrapped", game)


def _space(game: Any, name: str) -> Any:
    """A space of a game; None where it has none."""
    return getattr(game, name, None)


def _check_pattern(pattern: str) -> None:
    """Refuse a pattern that is no regular expression with a group."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(
            f"action_pattern is {pattern!r}, no regular expression: {error}."
        ) from error
    require(groups > 0, f"action_pattern is {pattern!r}; put the action in (parentheses).")
