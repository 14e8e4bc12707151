"""The text-like games of gymnasium: names of their actions, and what is seen, as a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
