"""Rows for games that need no data: a prompt, and a number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from litgrpo.arguments import at_least, require
from litgrpo.data.rows import NUMBER
from litgrpo.data.sources import Generated


@dataclass(frozen=True)
class Episodes(Generated):
    """Rows of a game that needs no data: `size` times the same prompt, each with a number.

    The environment's seed makes each episode another one. Rows have `prompt`, `episode_number` and
    the `columns`. Rows with different numbers are different ones, also to `val_fraction`, which
    holds some of them out; for a validation source of its own take other numbers by `first`.

    Args:
        size: rows.
        prompt: the prompt of each; what the environment's `reset` returns comes after it.
        first: number of the first row.
        columns: {name: value}, the same in each row, such as `{level: easy}`.
    """

    size: int = 1000
    prompt: str = "Play."
    first: int = 0
    columns: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what can give no rows."""
        at_least("size of Episodes", self.size, 1)
        at_least("first of Episodes", self.first, 0)
        require(bool(self.prompt.strip()), "prompt of Episodes is empty; a row needs a text")
        for name in ("prompt", NUMBER):
            require(name not in self.columns, f"columns of Episodes name {name!r}, which rows have")

    @property
    def name(self) -> str:
        """For messages."""
        return f"Episodes({self.size})"

    def rows(self) -> list[dict[str, Any]]:
        """The rows, by number."""
        numbers = range(self.first, self.first + self.size)
        return [{"prompt": self.prompt, NUMBER: number, **self.columns} for number in numbers]
