"""Reward functions and objects that keep state from call to call."""

from collections import Counter
from typing import Any


def count_calls(completions: list[str]) -> list[float]:
    """A function of a module."""
    return [float(len(text)) for text in completions]


class SavedNovelty:
    """1 for a completion that was not seen before; its counts are state of a run."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def __call__(self, completions: list[str], log_metric: Any) -> list[float]:
        rewards = [float(not self.seen[text]) for text in completions]
        self.seen.update(completions)
        log_metric("seen", self.seen.total())
        return rewards

    def state_dict(self) -> dict[str, int]:
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = Counter(state)
