"""Rows for games that need no data: a prompt, and a number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from litgrpo.arguments import at_least, require
from litgrpo.data.rows import NUMBER
from litgrpo.data.sources import GeneratedSource


@dataclass(frozen=True)
class EpisodePrompts(GeneratedSource):
    """Rows of a game that needs no data: `size` times the same prompt, each with a number.

    The environment's seed makes each episode another one. Rows have `prompt`, `episode_number` and
    the `columns`. Rows with different numbers are different ones, also to `val_fraction`, which
    holds some of them out; for a validation source of its own take other numbers by `first`.

    Args:
        size: rows.
        prompt: the prompt of each; what the environment's `reset` returns comes after it.
        first_episode: number of the first row.
        columns: {name: value}, the same in each row, such as `{level: easy}`.
    """

    size: int = 1000
    prompt: str = "Play."
    first_episode: int = 0
    columns: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what can give no rows."""
        at_least("size of EpisodePrompts", self.size, 1)
        at_least("first_episode of EpisodePrompts", self.first_episode, 0)
        require(bool(self.prompt.strip()), "prompt of EpisodePrompts is empty; a row needs a text")
        for name in ("prompt", NUMBER):
            require(
                name not in self.columns,
                f"columns of EpisodePrompts name {name!r}, which rows have",
            )

    @property
    def name(self) -> str:
        """For messages."""
        return f"EpisodePrompts({self.size})"

    def rows(self) -> list[dict[str, Any]]:
        """The rows, by number."""
        numbers = range(self.first_episode, self.first_episode + self.size)
        return [{"prompt": self.prompt, NUMBER: number, **self.columns} for number in numbers]
