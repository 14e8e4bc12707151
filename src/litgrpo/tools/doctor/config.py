"""A run's configuration, asked by the keys of its recipe."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NOT_GIVEN = object()


@dataclass(frozen=True)
class Config:
    """A resolved recipe.

    Args:
        values: what `config.yaml` holds; empty where there is none.
        path: of that file, for commands; "" where there is none.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key; `init_args` need not be said.

        Example:
            >>> Config({"model": {"init_args": {"group_size": 8}}}).get("model.group_size")
            8
        """
        found: Any = self.values
        for word in key.split("."):
            found = step_into(found, word)
            if found is NOT_GIVEN:
                return default
        return default if found is None else found

    def number(self, key: str, default: float) -> float:
        """The number of a key; the default where there is none."""
        found = self.get(key, default)
        return float(found) if isinstance(found, int | float) else default

    @property
    def steps_per_iteration(self) -> float:
        """Optimizer steps of an iteration; infinite where there is no recipe to ask."""
        epochs = self.number("model.update.epochs_per_rollout", 1)
        steps = epochs * self.number("model.update.num_mini_batches", 1)
        return steps if self.values else math.inf

    def command(self, key: str, value: str) -> str:
        """Starts the run anew with one key changed, or looks at its rewards.

        "" where there is no recipe, or nothing to set.
        """
        rewards = key.startswith("model.rewards") and not value
        if not self.path or not (value or rewards):
            return ""
        if rewards:
            return f"python cli.py audit -c {shlex.quote(self.path)}"
        folder = str(self.path).rpartition("/")[0] or "."
        words = ["-c", self.path, "--run_dir", f"{folder}-changed", f"--{key}", value]
        return f"python cli.py fit {shlex.join(words)}"


def step_into(found: Any, word: str) -> Any:
    """What stands under a word of a key."""
    inside = found.get("init_args") if isinstance(found, Mapping) else None
    for place in (found, inside):
        if isinstance(place, Mapping) and word in place:
            return place[word]
    return NOT_GIVEN
