"""Environment with few imports, so that worker processes start quickly."""

from __future__ import annotations

from dataclasses import dataclass, field

from litgrpo.environments.base import StepResult


@dataclass
class Echo:
    """Answers with a number of letters that depends on the turn; rewards turn numbers."""

    lengths: tuple[int, ...] = (3, 1, 40)
    opening: str = ""
    turns: list[str] = field(default_factory=list)

    def reset(self, row, seed):
        self.seed = seed
        return self.opening

    def step(self, action):
        self.turns.append(action)
        number = len(self.turns)
        length = self.lengths[(number + len(action)) % len(self.lengths)]
        return StepResult(
            "x" * length, reward=float(number), state=len(action), calls={"echo": (1, 0)}
        )
